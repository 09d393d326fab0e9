"""Write the workflows of `workflows/`: what each is for, its nodes, and the files it names.

    COMFYUI_DIR=<folder> .venv/bin/python scripts/assets/workflows.py

ComfyUI's template browser shows a pack's files by their names, so a name is a title. `pictures.py` draws their thumbnails.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "assets")]

from setup.comfyui_server import Server, make_base_directory  # noqa: E402
from workflow_models import FILES  # noqa: E402
from workflow_sheet import NARROW, WIDE_LAST, WIDE_THIRD, Output, Sheet  # noqa: E402

FP16 = "wan2.1_t2v_1.3B_fp16.safetensors"
TEXT, WAN_VAE = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
BUILT_IN = "halfsafe_example.safetensors"
ASKED = "a lighthouse on a cliff at dusk, warm light in its window, calm sea, photograph"
UNWANTED = "blurry, low quality, watermark"
SEED = 20260214
CANDIDATES = "auto/auto\nauto/fp16_safe\nas_file/bf16\nas_file/fp16\nint8/auto\nfp8_e4m3fn/auto\nfp8_e4m3fn/fp8"


def main() -> None:
    for title, workflow in made(_object_info()).items():
        path = ROOT / "workflows" / f"{title}.json"
        path.write_text(json.dumps(workflow, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8", newline="\n")
        print(path.relative_to(ROOT))


def made(info: dict) -> dict[str, dict]:
    """Title -> workflow, in the order of their numbers; ``info`` is the answer of ComfyUI's `/object_info`."""
    workflows = {}
    for title, fill in WORKFLOWS.items():
        sheet = Sheet(title, info, FILES)
        fill(sheet)
        workflows[title] = sheet.workflow()
    return workflows


def _object_info() -> dict:
    with tempfile.TemporaryDirectory() as folder, Server(Path(os.environ["COMFYUI_DIR"]), make_base_directory(Path(folder), ROOT)) as server:
        return server.object_info()


def _load(sheet: Sheet, storage: str, compute: str, column: int = 0, file: str = FP16, title: str = "", **sources: Output) -> Output:
    return Output(sheet.add("HalfsafeLoadDiffusionModel", column, 140, file, storage, compute, title=title, **sources))


def _load_text_and_vae(sheet: Sheet, text: int = 1, folded: bool = False) -> tuple[Output, Output]:
    """The prompt's column has the text encoder, the first one the VAE."""
    clip = sheet.add("HalfsafeLoadCLIP", text, 240, TEXT, "wan", "auto", "auto", "none", "none", "none", folded=folded)
    return Output(clip), Output(sheet.add("HalfsafeLoadVAE", 0, 80, WAN_VAE, "auto", folded=folded))


def _prompts(sheet: Sheet, clip: Output, column: int = 1, aside: bool = False) -> dict[str, Output]:
    """Both prompts; ``aside`` folds the negative one into the next column."""
    positive = sheet.add("CLIPTextEncode", column, 80 if aside else 100, ASKED, title="Prompt", clip=clip)
    negative = sheet.add("CLIPTextEncode", column + aside, 80, UNWANTED, title="Negative prompt", folded=aside, clip=clip)
    return {"positive": Output(positive), "negative": Output(negative)}


def _prompt_alone(sheet: Sheet, clip: Output, column: int) -> dict[str, Output]:
    """For a model that was made for cfg 1: what is not wanted is empty."""
    positive = Output(sheet.add("CLIPTextEncode", column, 160, ASKED, title="Prompt", clip=clip))
    return {"positive": positive, "negative": Output(sheet.add("ConditioningZeroOut", column, 30, conditioning=positive))}


def _frame(sheet: Sheet, column: int = 1, folded: bool = False) -> Output:
    return Output(sheet.add("EmptyHunyuanLatentVideo", column, 130, 832, 480, 1, 1, folded=folded))


def _sample(sheet: Sheet, model: Output, asked: dict[str, Output], column: int = 2, control: str = "randomize", title: str = "") -> Output:
    values = (SEED, control, 20, 6.0, "euler", "simple", 1.0)
    return Output(sheet.add("KSampler", column, 270, *values, title=title, model=model, **asked))


def _picture(sheet: Sheet, latent: Output, vae: Output, name: str, decoded: int = 3, column: int = 3, height: int = 320, title: str = "") -> Output:
    """A picture at the top of its column, where neither the page's map nor its edge covers it."""
    image = Output(sheet.add("VAEDecode", decoded, 50, folded=True, samples=latent, vae=vae))
    sheet.add("SaveImage", column, height, f"halfsafe/{name}", title=title, top=0, images=image)
    return image


def _report(sheet: Sheet, model: Output, after: Output, column: int = 2) -> None:
    sheet.add("HalfsafeReport", column, 380, model=model, after=after)


def _one_node(sheet: Sheet, height: int = 440, column: int = 1, **given: Output) -> tuple[Output, Output, Output]:
    node = sheet.add("HalfsafeAutoPrecision", column, height, "balanced", "retry_higher", "off", **given)
    return Output(node, 0), Output(node, 1), Output(node, 2)


def _built_in(sheet: Sheet, compute: str, text: int) -> tuple[Output, Output, Output, Output]:
    """The pack's own model, which overflows in fp16 and draws a red heart whatever is asked for, and its size."""
    model = _load(sheet, "auto", compute, 0, BUILT_IN, "A small built-in model")
    clip = sheet.add("HalfsafeLoadCLIP", text, 240, BUILT_IN, "sd3", "auto", "auto", "none", "none", "none")
    vae = sheet.add("HalfsafeLoadVAE", 0, 80, BUILT_IN, "auto", folded=True)
    return model, Output(clip), Output(vae), Output(sheet.add("EmptyHunyuanLatentVideo", 0, 130, 128, 128, 1, 1, folded=True))


def _heart(sheet: Sheet, clip: Output, column: int) -> dict[str, Output]:
    positive = Output(sheet.add("CLIPTextEncode", column, 90, "a red heart", title="Prompt", clip=clip))
    return {"positive": positive, "negative": positive}


def _sample_built_in(sheet: Sheet, model: Output, asked: dict[str, Output], column: int, title: str = "") -> Output:
    values = (7, "fixed", 16, 1.0, "euler", "simple", 1.0)
    return Output(sheet.add("KSampler", column, 270, *values, title=title, model=model, **asked))


def _enlarged(sheet: Sheet, latent: Output, vae: Output, column: int, folder: str, shown: int = 3, height: int = 320, title: str = "") -> Output:
    """The picture of 128 x 128, large enough to be seen."""
    image = Output(sheet.add("VAEDecode", column, 50, folded=True, samples=latent, vae=vae))
    large = Output(sheet.add("ImageScale", column, 130, "lanczos", 384, 384, "disabled", title="Enlarge", folded=True, image=image))
    sheet.add("SaveImage", shown, height, f"halfsafe/{folder}", title=title, top=0, images=large)
    return large


def fix_black_images(sheet: Sheet) -> None:
    sheet.note(
        "# No more black images\n\n## Press Run: black without Halfsafe, right with it.\n\nThe small model that comes with Halfsafe overflows in fp16. "
        "The **Halfsafe** node picks arithmetic for your device, repeats a step that would come out black, and lists what it did on itself.\n\n"
        "**Your own graph:** open it, then click *Guard this workflow* in the Halfsafe sidebar. That adds this one node. Nothing is downloaded here.", 300)  # fmt: skip
    sheet.leave(1, 310)
    sheet.leave(2, 310)
    model, clip, vae, frame = _built_in(sheet, "fp16", 1)
    guarded, safe_clip, safe_vae = _one_node(sheet, 350, 2, model=model, clip=clip, vae=vae)
    asked = _heart(sheet, safe_clip, 1) | {"latent_image": frame}
    without = _sample_built_in(sheet, model, asked, 3, "Without Halfsafe")
    _enlarged(sheet, without, vae, 0, "without", 1, 310, "Without Halfsafe")
    repaired = _sample_built_in(sheet, guarded, asked, 3, "With Halfsafe")
    _enlarged(sheet, repaired, safe_vae, 3, "with", 2, 310, "With Halfsafe")


def find_the_layer(sheet: Sheet) -> None:
    sheet.note(
        "# Which layer turns it black?\n\n## Press Run, then read *Guard* in the report.\n\nThis small built-in model computes in **fp16**, whose largest "
        "number is 65504. It exceeds that, and its picture would be black. **NaN Guard** finds the layer, repeats the step with that layer in a wider format, and tells you. "
        "**Guard VAE** does so for the decoder.\n\nThe report says which step and layer, and from which format to which. "
        "Ctrl+B on NaN Guard shows the black picture.\n\nIn your own graph: NaN Guard behind the model's loader.", 320)  # fmt: skip
    model, clip, vae, frame = _built_in(sheet, "fp16", 1)
    asked = _heart(sheet, clip, 1) | {"latent_image": frame}
    guarded = Output(sheet.add("HalfsafeNaNGuard", 1, 110, "retry_higher", 8, "off", model=model))
    safe_vae = Output(sheet.add("HalfsafeGuardVAE", 1, 60, "retry_higher", vae=vae))
    latent = _sample_built_in(sheet, guarded, asked, 2)
    sheet.leave(3, 320)
    _report(sheet, guarded, _enlarged(sheet, latent, safe_vae, 3, "rescued"))


def half_the_memory(sheet: Sheet) -> None:
    sheet.note(
        "# Half the memory\n\n## Press Run: the report lists each layer's format, and why.\n\n**Load Diffusion Model** keeps the weights in scaled fp8: half of 16 bit (0.6 to 0.7 for Flux and Qwen-Image). "
        "Layers that do not stand 8 bits stay as they are in the file.\n\nTry `storage` = **int8**: the error is smaller, and on RTX 20 and newer "
        "it can be faster. `auto` goes below 16 bit only if the model does not fit.", 280)  # fmt: skip
    model = _load(sheet, "fp8_e4m3fn", "auto")
    clip, vae = _load_text_and_vae(sheet)
    latent = _sample(sheet, model, _prompts(sheet, clip) | {"latent_image": _frame(sheet)})
    sheet.leave(3, 320)
    _report(sheet, model, _picture(sheet, latent, vae, "quick-fp8"))


def old_gpu(sheet: Sheet) -> None:
    sheet.note(
        "# A GPU without bf16\n\n## Press Run: fp16_safe cannot overflow.\n\nRTX 20, V100, T4, RX 6000, Apple M1 and M2 have no bf16. Their fp16 is fast, but some models overflow in it "
        "and turn black; ComfyUI then falls back to slow fp32.\n\n`compute` = **fp16_safe** multiplies in fp16 and keeps everything between the "
        "products in fp32. The small built-in model here is black in `fp16`: try it.\n\nGTX 16 computes wrongly in fp16: choose `auto` there.\n\n"
        "Real models: *Halfsafe with Qwen-Image*, *with Z-Image Turbo*.", 350)  # fmt: skip
    model, clip, vae, frame = _built_in(sheet, "fp16_safe", 1)
    latent = _sample_built_in(sheet, model, _heart(sheet, clip, 1) | {"latent_image": frame}, 2)
    sheet.leave(3, 320)
    _report(sheet, model, _enlarged(sheet, latent, vae, 3, "old-gpu"))


def which_precision(sheet: Sheet) -> None:
    sheet.columns = WIDE_THIRD
    sheet.note(
        "# Which precision for this card?\n\n## Press Run: four steps of your sampler for each candidate and the reference, 32 at most.\n\n**Measure Precisions** runs your prompt with each of its candidates and writes down the time of a "
        "step, the memory and the error against fp32. Its first line names the best. Making the weights takes time too.\n\n"
        "The second loader takes the best for *balanced* and draws with it.\n\nNumbers hold for this model, "
        "size and card. Keep `as_file` in the first loader: what is quantized already cannot be compared with the original.", 390)  # fmt: skip
    original = _load(sheet, "as_file", "auto")
    clip, vae = _load_text_and_vae(sheet, folded=True)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    measured = sheet.add("HalfsafeMeasurePrecisions", 2, 620, SEED, CANDIDATES, model=original, **asked)
    best = _load(sheet, "auto", "auto", 1, rules=Output(measured, 1))
    sheet.leave(3, 320)
    _picture(sheet, _sample(sheet, best, asked, 3, "fixed"), vae, "which-precision")


def fp8_against_the_original(sheet: Sheet) -> None:
    sheet.columns = WIDE_LAST
    sheet.note(
        "# What does fp8 cost?\n\n## Press Run, and compare both pictures.\n\nThe same prompt, seed and steps twice: with the weights as in the file, then in scaled fp8.\n\n"
        "**Compare Images** gives the difference: PSNR (above about 40 dB it is hard to see), the largest error and SSIM. Pull the line in its panel from one picture to the other.\n\n"
        "Change `storage` or `compute` of the second loader to compare anything else.", 260)  # fmt: skip
    sheet.leave(1, 310)
    sheet.leave(2, 310)
    sheet.leave(3, 390)
    original = _load(sheet, "as_file", "auto")
    changed = _load(sheet, "fp8_e4m3fn", "auto")
    clip, vae = _load_text_and_vae(sheet, 0, folded=True)
    asked = _prompts(sheet, clip, 1, True) | {"latent_image": _frame(sheet, 2, True)}
    first = _sample(sheet, original, asked, 1, "fixed", "Original")
    image = _picture(sheet, first, vae, "original", 3, 1, 310, "Original")
    second = _sample(sheet, changed, asked, 2, "fixed", "fp8")
    candidate = _picture(sheet, second, vae, "fp8", 3, 2, 310, "fp8")
    sheet.add("HalfsafeCompareImages", 3, 390, top=0, reference=image, candidate=candidate)


def save_fp8(sheet: Sheet) -> None:
    sheet.columns = WIDE_THIRD
    sheet.note(
        "# Save your own fp8 file\n\n## Press Run: 8 to 52 steps of your sampler, about 24 on average.\n\n**Analyze Layers** runs the model on your prompt and measures, layer by layer, what fp8 would change. "
        "Layers below the target become rules that keep them high.\n\n"
        "**Save Model** writes a file with those rules, which ComfyUI's own loader reads too. Press R to find it among the diffusion models.\n\n"
        "The second loader shows at once what the picture becomes. Raise `target_snr_db` to keep more layers, lower it for a smaller file.", 310)  # fmt: skip
    model = _load(sheet, "as_file", "auto")
    clip, vae = _load_text_and_vae(sheet, folded=True)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet, folded=True)}
    rules = Output(sheet.add("HalfsafeAnalyzeLayers", 2, 500, SEED, "fp8_e4m3fn", 25.0, "keep high", model=model, **asked))
    sheet.add("HalfsafeSaveModel", 1, 240, "diffusion_models/halfsafe", "fp8_e4m3fn", model=model, rules=rules)
    trial = _load(sheet, "fp8_e4m3fn", "auto", rules=rules)
    sheet.leave(3, 320)
    _picture(sheet, _sample(sheet, trial, asked, 3, "fixed"), vae, "analysed-fp8")


def save_calibrated(sheet: Sheet) -> None:
    sheet.note(
        "# Save a calibrated int8 file\n\n## Press Run: 8 steps of your sampler, then a long save.\n\n**Calibrate** samples the model once on your prompt and sums what each layer meets. "
        "**Save Model** rounds the weights by that: an int8 file closer to the original, of the same size and speed, that any ComfyUI loads.\n\n"
        "The picture is the original's. Press R after the run and choose the saved file in the second loader to compare.\n\n"
        "Several prompts: a **Calibrate** for each, chained by `previous`.", 310)  # fmt: skip
    model = _load(sheet, "as_file", "auto")
    clip, vae = _load_text_and_vae(sheet, folded=True)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    calibration = Output(sheet.add("HalfsafeCalibrate", 2, 330, SEED, "", model=model, **asked))
    sheet.add("HalfsafeSaveModel", 2, 240, "diffusion_models/halfsafe-calibrated", "int8", model=model, calibration=calibration)
    trial = _load(sheet, "as_file", "auto")
    sheet.leave(3, 320)
    _picture(sheet, _sample(sheet, trial, asked, 3, "fixed"), vae, "calibrated")


def faster_sums(sheet: Sheet) -> None:
    sheet.note(
        "# fp16 sums, where they are safe\n\n## Press Run: the report says which layers sum in fp16.\n\nRTX 20 to 50 multiply fp16 up to twice as fast if the sums are fp16 too. ComfyUI's `--fast "
        "fp16_accumulation` turns that on for everything.\n\n**Accumulation** does it for this model only, in layers whose sums are proven to fit into "
        "fp16. The others keep fp32 sums, and the report names them. After each call torch's own switches are back as they were.\n\n"
        "It acts on fp16 compute only, so the loader's `compute` is fp16.", 320)  # fmt: skip
    model = _load(sheet, "auto", "fp16")
    fast = Output(sheet.add("HalfsafeAccumulation", 1, 160, "auto", "unchanged", "unchanged", "auto", "auto", model=model))
    clip, vae = _load_text_and_vae(sheet, folded=True)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    latent = _sample(sheet, fast, asked)
    sheet.leave(3, 320)
    _report(sheet, fast, _picture(sheet, latent, vae, "accumulation"))


def _stock(sheet: Sheet, file: str, title: str = "") -> Output:
    return Output(sheet.add("UNETLoader", 0, 90, file, "default", title=title))


def _stock_text(sheet: Sheet, file: str, kind: str) -> Output:
    return Output(sheet.add("CLIPLoader", 0, 110, file, kind, "default"))


def _stock_vae(sheet: Sheet, file: str, title: str = "", folded: bool = False) -> Output:
    return Output(sheet.add("VAELoader", 0, 60, file, title=title, folded=folded))


def _empty(sheet: Sheet, kind: str, size: int) -> Output:
    return Output(sheet.add(kind, 1, 110, size, size, 1))


def _with(sheet: Sheet, name: str, size: int, more: str = "", height: int = 200) -> None:
    sheet.note(
        f"# {name}\n\nComfyUI's own loaders and settings for this model, and one **Halfsafe** node behind them. It picks the arithmetic for "
        f"your device, repeats a step that would come out black, and shows what it did.\n\n{more}ComfyUI offers to download the files that are missing "
        f"(about {size} GB).", height)  # fmt: skip


def with_z_image(sheet: Sheet) -> None:
    _with(sheet, "Z-Image Turbo", 21, "In fp16 ComfyUI clamps what overflows in it; `fp16_safe` has nothing to clamp.\n\n", 210)
    loaded = _stock(sheet, "z_image_turbo_bf16.safetensors"), _stock_text(sheet, "qwen_3_4b.safetensors", "lumina2"), _stock_vae(sheet, "ae.safetensors")
    model, clip, vae = _one_node(sheet, **dict(zip(("model", "clip", "vae"), loaded, strict=True)))
    shifted = Output(sheet.add("ModelSamplingAuraFlow", 1, 60, 3.0, model=model))
    asked = _prompt_alone(sheet, clip, 2) | {"latent_image": _empty(sheet, "EmptySD3LatentImage", 1024)}
    latent = sheet.add("KSampler", 2, 270, SEED, "randomize", 8, 1.0, "res_multistep", "simple", 1.0, model=shifted, **asked)
    sheet.leave(3, 420)
    _picture(sheet, Output(latent), vae, "z-image-turbo", height=420)


def with_qwen_image(sheet: Sheet) -> None:
    _with(sheet, "Qwen-Image", 30, "Black in plain fp16; on a GPU without bf16 it runs as `fp16_safe` here instead of in fp32.\n\n", 220)
    model = _stock(sheet, "qwen_image_fp8_e4m3fn.safetensors")
    clip = _stock_text(sheet, "qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image")
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "qwen_image_vae.safetensors"))
    shifted = Output(sheet.add("ModelSamplingAuraFlow", 1, 60, 3.1, model=model))
    asked = _prompts(sheet, clip, 2) | {"latent_image": _empty(sheet, "EmptySD3LatentImage", 1328)}
    latent = sheet.add("KSampler", 2, 270, SEED, "randomize", 20, 4.0, "euler", "simple", 1.0, model=shifted, **asked)
    sheet.leave(3, 420)
    _picture(sheet, Output(latent), vae, "qwen-image", height=420)


def with_flux(sheet: Sheet) -> None:
    _with(sheet, "Flux.1 dev", 34, "The file is 23.8 GB in bf16. To hold it in 8 bits use Halfsafe's Load Diffusion Model instead of the first loader.\n\n", 230)
    model = _stock(sheet, "flux1-dev.safetensors")
    clip = Output(sheet.add("DualCLIPLoader", 0, 140, "clip_l.safetensors", "t5xxl_fp16.safetensors", "flux", "default"))
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "ae.safetensors"))
    asked = _prompt_alone(sheet, clip, 2) | {"latent_image": _empty(sheet, "EmptySD3LatentImage", 1024)}
    latent = sheet.add("KSampler", 2, 270, SEED, "randomize", 20, 1.0, "euler", "simple", 1.0, model=model, **asked)
    sheet.leave(3, 420)
    _picture(sheet, Output(latent), vae, "flux-1-dev", height=420)


def with_krea(sheet: Sheet) -> None:
    _with(sheet, "Krea 2 Turbo", 19)
    model = _stock(sheet, "krea2_turbo_fp8_scaled.safetensors")
    clip = _stock_text(sheet, "qwen3vl_4b_fp8_scaled.safetensors", "krea2")
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "qwen_image_vae.safetensors"))
    asked = _prompt_alone(sheet, clip, 2) | {"latent_image": _empty(sheet, "EmptyLatentImage", 1024)}
    latent = sheet.add("KSampler", 2, 270, SEED, "randomize", 8, 1.0, "euler", "simple", 1.0, model=model, **asked)
    sheet.leave(3, 420)
    _picture(sheet, Output(latent), vae, "krea-2-turbo", height=420)


def with_wan22(sheet: Sheet) -> None:
    sheet.columns = NARROW
    _with(sheet, "Wan 2.2, 14B", 35, "It is two models: one for high noise, one for low noise. Each has its own Halfsafe node.\n\n", 230)
    high = _stock(sheet, "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "High noise")
    low = _stock(sheet, "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors", "Low noise")
    clip, vae = _stock_text(sheet, TEXT, "wan"), _stock_vae(sheet, WAN_VAE, folded=True)
    model, clip, vae = _one_node(sheet, 420, model=high, clip=clip, vae=vae)
    other = _one_node(sheet, 420, 2, model=low)[0]
    first, second = (Output(sheet.add("ModelSamplingSD3", 2, 60, 5.0, model=one)) for one in (model, other))
    asked = _prompts(sheet, clip, 1)
    sheet.leave(4, 340)
    empty = Output(sheet.add("EmptyHunyuanLatentVideo", 4, 130, 640, 640, 81, 1))
    values = (SEED, "randomize", 20, 3.5, "euler", "simple")
    begun = Output(sheet.add("KSamplerAdvanced", 3, 330, "enable", *values, 0, 10, "enable", model=first, latent_image=empty, **asked))
    values = (0, "fixed", 20, 3.5, "euler", "simple")
    latent = Output(sheet.add("KSamplerAdvanced", 3, 330, "disable", *values, 10, 10000, "disable", model=second, latent_image=begun, **asked))
    images = Output(sheet.add("VAEDecode", 4, 50, folded=True, samples=latent, vae=vae))
    video = Output(sheet.add("CreateVideo", 4, 110, 16.0, folded=True, images=images))
    sheet.add("SaveVideo", 4, 340, "video/halfsafe-wan-2.2", "auto", "auto", top=0, video=video)


def with_minimax_h3(sheet: Sheet) -> None:
    _with(sheet, "MiniMax H3", 57, "Video with sound, two seconds. In fp16 it is known to give NaN on GPUs without bf16.\n\n", 200)
    model = _stock(sheet, "minimax_h3_fl2va_pruned_int8_convrot.safetensors")
    clip = _stock_text(sheet, "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "minimax")
    vae, sound = _stock_vae(sheet, "minimax_h3_video_vae_fp16.safetensors"), _stock_vae(sheet, "minimax_h3_audio_vae_fp32.safetensors", "Load VAE (sound)")
    model, clip, vae = _one_node(sheet, 400, model=model, clip=clip, vae=vae)
    asked = sheet.add("MiniMaxH3ImageToVideo", 1, 270, ASKED, 832, 480, 56, clip=clip, vae=vae)
    noise = Output(sheet.add("RandomNoise", 2, 90, SEED, "randomize"))
    sampler = Output(sheet.add("KSamplerSelect", 2, 60, "res_multistep"))
    sigmas = Output(sheet.add("BasicScheduler", 2, 110, "simple", 20, 1.0, model=model))
    guider = Output(sheet.add("BasicGuider", 2, 50, model=model, conditioning=Output(asked)))
    parts = {"noise": noise, "guider": guider, "sampler": sampler, "sigmas": sigmas, "latent_image": Output(asked, 1)}
    latent = Output(sheet.add("SamplerCustomAdvanced", 2, 110, **parts))
    images = Output(sheet.add("VAEDecode", 2, 50, folded=True, samples=latent, vae=vae))
    audio = Output(sheet.add("VAEDecodeAudio", 2, 50, folded=True, samples=latent, vae=sound))
    sheet.leave(3, 400)
    video = Output(sheet.add("CreateVideo", 3, 110, 24.0, images=images, audio=audio))
    sheet.add("SaveVideo", 3, 400, "video/halfsafe-minimax-h3", "auto", "auto", top=0, video=video)


WORKFLOWS: dict[str, Callable[[Sheet], None]] = {
    "Halfsafe 1 - Fix black images": fix_black_images,
    "Halfsafe 2 - Find the layer that turns black": find_the_layer,
    "Halfsafe 3 - Half the memory": half_the_memory,
    "Halfsafe 4 - Old GPU without bf16": old_gpu,
    "Halfsafe 5 - Which precision suits my card": which_precision,
    "Halfsafe 6 - fp8 against the original": fp8_against_the_original,
    "Halfsafe 7 - Save your own fp8 file": save_fp8,
    "Halfsafe 8 - Save a calibrated int8 file": save_calibrated,
    "Halfsafe 9 - Faster fp16 sums": faster_sums,
    "Halfsafe with Flux 1 dev": with_flux,
    "Halfsafe with Krea 2 Turbo": with_krea,
    "Halfsafe with MiniMax H3": with_minimax_h3,
    "Halfsafe with Qwen-Image": with_qwen_image,
    "Halfsafe with Wan 2.2": with_wan22,
    "Halfsafe with Z-Image Turbo": with_z_image,
}

if __name__ == "__main__":
    main()
