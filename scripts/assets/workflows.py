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
from workflow_sheet import Output, Sheet  # noqa: E402

MODEL, CLIP, VAE, SIGHT = 1, 1, 2, 3  # columns after the note
FP16, BF16 = "wan2.1_t2v_1.3B_fp16.safetensors", "wan2.1_t2v_1.3B_bf16.safetensors"
TEXT, WAN_VAE = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
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


def _load(sheet: Sheet, storage: str, compute: str, file: str = FP16, **sources: Output) -> Output:
    return Output(sheet.add("HalfsafeLoadDiffusionModel", MODEL, 160, file, storage, compute, **sources))


def _load_text_and_vae(sheet: Sheet) -> tuple[Output, Output]:
    clip = sheet.add("HalfsafeLoadCLIP", CLIP, 270, TEXT, "wan", "auto", "auto", "none", "none", "none")
    return Output(clip), Output(sheet.add("HalfsafeLoadVAE", CLIP, 130, WAN_VAE, "auto"))


def _prompts(sheet: Sheet, clip: Output, column: int = 2, text: str = ASKED) -> dict[str, Output]:
    positive = sheet.add("CLIPTextEncode", column, 120, text, title="Prompt", clip=clip)
    negative = sheet.add("CLIPTextEncode", column, 90, UNWANTED, title="Negative prompt", clip=clip)
    return {"positive": Output(positive), "negative": Output(negative)}


def _prompt_alone(sheet: Sheet, clip: Output, column: int) -> dict[str, Output]:
    """For a model that was made for cfg 1: what is not wanted is empty."""
    positive = Output(sheet.add("CLIPTextEncode", column, 160, ASKED, title="Prompt", clip=clip))
    return {"positive": positive, "negative": Output(sheet.add("ConditioningZeroOut", column, 30, conditioning=positive))}


def _frame(sheet: Sheet, column: int = 2) -> Output:
    return Output(sheet.add("EmptyHunyuanLatentVideo", column, 130, 832, 480, 1, 1))


def _sample(sheet: Sheet, model: Output, asked: dict[str, Output], column: int = 3, control: str = "randomize", title: str = "") -> Output:
    values = (SEED, control, 20, 6.0, "euler", "simple", 1.0)
    return Output(sheet.add("KSampler", column, 270, *values, title=title, model=model, **asked))


def _picture(sheet: Sheet, latent: Output, vae: Output, name: str, columns: tuple[int, int] = (3, 4), height: int = 380, title: str = "") -> Output:
    image = Output(sheet.add("VAEDecode", columns[0], 50, samples=latent, vae=vae))
    sheet.add("SaveImage", columns[1], height, f"halfsafe/{name}", title=title, images=image)
    return image


def _report(sheet: Sheet, model: Output, after: Output, column: int = 4) -> None:
    sheet.add("HalfsafeReport", column, 420, model=model, after=after)


def _one_node(sheet: Sheet, height: int = 460, **given: Output) -> tuple[Output, Output, Output]:
    node = sheet.add("HalfsafeAutoPrecision", 2, height, "balanced", "retry_higher", "off", **given)
    return Output(node, 0), Output(node, 1), Output(node, 2)


def fix_black_images(sheet: Sheet) -> None:
    sheet.note(
        "### No more black images\n\nThe **Halfsafe** node stands between the loaders and the sampler. It picks the arithmetic for your device, "
        "repeats a step that would come out black, and lists what it did on itself.\n\n"
        "**Your own graph:** open it, then click *Guard this workflow* in the Halfsafe sidebar. That adds this one node.\n\n"
        "**Here:** press Run. ComfyUI offers to download the three files that are missing (9.8 GB).", 220)  # fmt: skip
    model, clip, vae = _one_node(sheet, model=_stock(sheet, FP16), clip=_stock_text(sheet, TEXT, "wan"), vae=_stock_vae(sheet, WAN_VAE))
    asked = _prompts(sheet, clip, 3) | {"latent_image": _frame(sheet, 3)}
    _picture(sheet, _sample(sheet, model, asked), vae, "fixed", (4, 4))


def find_the_layer(sheet: Sheet) -> None:
    sheet.note(
        "### Which layer turns it black?\n\nThe loader is told to compute in **fp16**, whose largest number is 65504. A model that exceeds it "
        "gives NaN, and a black picture. **NaN Guard** finds the layer, repeats the step with that layer in a wider format, and tells you. "
        "**Guard VAE** does so for the decoder.\n\n1. Choose the model that turns black for you in the loader. Wan 2.1, named here, is fine in fp16.\n"
        "2. Press Run.\n3. Read *Guard* in the report: step, layer, from which format to which.\n\nCtrl+B on both guards shows the black picture.", 290)  # fmt: skip
    model = _load(sheet, "auto", "fp16", BF16)
    clip, vae = _load_text_and_vae(sheet)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    guarded = Output(sheet.add("HalfsafeNaNGuard", 3, 110, "retry_higher", 8, "off", model=model))
    safe_vae = Output(sheet.add("HalfsafeGuardVAE", 3, 70, "retry_higher", vae=vae))
    latent = _sample(sheet, guarded, asked)
    _report(sheet, guarded, _picture(sheet, latent, safe_vae, "rescued", (3, 4), 300))


def half_the_memory(sheet: Sheet) -> None:
    sheet.note(
        "### Half the memory\n\n**Load Diffusion Model** keeps the weights in scaled fp8: half of 16 bit. Layers that do not stand 8 bits "
        "stay as they are in the file.\n\nTry `storage` = **int8**: the error is smaller, and on RTX 20 and newer it can be faster. "
        "`auto` goes below 16 bit only if the model does not fit.\n\nThe report lists each layer's format, and why.", 220)  # fmt: skip
    model = _load(sheet, "fp8_e4m3fn", "auto")
    clip, vae = _load_text_and_vae(sheet)
    latent = _sample(sheet, model, _prompts(sheet, clip) | {"latent_image": _frame(sheet)})
    _report(sheet, model, _picture(sheet, latent, vae, "quick-fp8", (3, 4), 300))


def old_gpu(sheet: Sheet) -> None:
    sheet.note(
        "### A GPU without bf16\n\nRTX 20, V100, T4, RX 6000, Apple M1 and M2 have no bf16. Their fp16 is fast, but some models overflow in it "
        "and turn black; ComfyUI then falls back to slow fp32.\n\n`compute` = **fp16_safe** multiplies in fp16 and keeps everything between the "
        "products in fp32: it cannot overflow.\n\nGTX 16 computes wrongly in fp16: choose `auto` there, which takes fp32.\n\n"
        "For Qwen-Image or Z-Image start from *Halfsafe with Qwen-Image* or *Halfsafe with Z-Image Turbo*.", 280)  # fmt: skip
    model = _load(sheet, "auto", "fp16_safe", BF16)
    clip, vae = _load_text_and_vae(sheet)
    latent = _sample(sheet, model, _prompts(sheet, clip) | {"latent_image": _frame(sheet)})
    _report(sheet, model, _picture(sheet, latent, vae, "old-gpu", (3, 4), 300))


def which_precision(sheet: Sheet) -> None:
    sheet.note(
        "### Which precision for this card?\n\n**Measure Precisions** runs your prompt with each of its candidates and writes down the time of a "
        "step, the memory and the error against fp32. Its first line names the best.\n\nThe second loader takes the best for *balanced* and draws "
        "with it.\n\nNumbers hold for this model, size and card. Keep `as_file` in the first loader: what is quantized already cannot be compared "
        "with the original.", 260)  # fmt: skip
    original = _load(sheet, "as_file", "auto")
    clip, vae = _load_text_and_vae(sheet)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    measured = sheet.add("HalfsafeMeasurePrecisions", 3, 620, SEED, CANDIDATES, model=original, **asked)
    best = Output(sheet.add("HalfsafeLoadDiffusionModel", 4, 160, FP16, "auto", "auto", rules=Output(measured, 1)))
    latent = _sample(sheet, best, asked, 4, "fixed")
    _picture(sheet, latent, vae, "which-precision", (4, 4), 300)


def fp8_against_the_original(sheet: Sheet) -> None:
    sheet.note(
        "### What does fp8 cost?\n\nThe same prompt, seed and steps twice: with the weights as in the file, then in scaled fp8.\n\n"
        "**Compare Images** gives the difference: PSNR in dB (above about 30 it is hard to see), the largest error and SSIM, and shows it amplified.\n\n"
        "Change `storage` or `compute` of the second loader to compare anything else.", 240)  # fmt: skip
    original = _load(sheet, "as_file", "auto")
    clip, vae = _load_text_and_vae(sheet)
    changed = _load(sheet, "fp8_e4m3fn", "auto")
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    first = _sample(sheet, original, asked, 2, "fixed", "Original")
    image = _picture(sheet, first, vae, "original", (2, 3), 300, "Original")
    second = _sample(sheet, changed, asked, 3, "fixed", "fp8")
    candidate = _picture(sheet, second, vae, "fp8", (3, 4), 300, "fp8")
    compared = sheet.add("HalfsafeCompareImages", 4, 60, reference=image, candidate=candidate)
    sheet.add("PreviewAny", 4, 120, title="Difference in numbers", source=Output(compared))
    sheet.add("PreviewImage", 4, 260, title="Difference, amplified", images=Output(compared, 1))


def save_fp8(sheet: Sheet) -> None:
    sheet.note(
        "### Save your own fp8 file\n\n**Analyze Layers** runs the model on your prompt and measures, layer by layer, what fp8 would change. "
        "Layers below the target become rules that keep them high.\n\n**Save Model** writes a file with those rules. It appears among the diffusion "
        "models, and ComfyUI's own loader reads it too.\n\nThe second loader shows at once what the picture becomes.\n\n"
        "Raise `target_snr_db` to keep more layers, lower it for a smaller file.", 280)  # fmt: skip
    model = _load(sheet, "as_file", "auto")
    clip, vae = _load_text_and_vae(sheet)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    rules = Output(sheet.add("HalfsafeAnalyzeLayers", 3, 470, SEED, "fp8_e4m3fn", 25.0, "keep high", model=model, **asked))
    sheet.add("HalfsafeSaveModel", 3, 160, "diffusion_models/halfsafe", "fp8_e4m3fn", model=model, rules=rules)
    trial = Output(sheet.add("HalfsafeLoadDiffusionModel", 4, 160, FP16, "fp8_e4m3fn", "auto", rules=rules))
    latent = _sample(sheet, trial, asked, 4, "fixed")
    _picture(sheet, latent, vae, "analysed-fp8", (4, 4), 300)


def save_calibrated(sheet: Sheet) -> None:
    sheet.note(
        "### Save a calibrated int8 file\n\n**Calibrate** samples the model once on your prompt, eight steps, and sums what each layer meets. "
        "**Save Model** rounds the weights by that: an int8 file closer to the original, of the same size and speed, that any ComfyUI loads. "
        "w6a8, w4a8 and fp8 gain too.\n\nThe picture is the original's. Press R after the run and choose the saved file in the second loader to compare.\n\n"
        "For several prompts add a **Calibrate** for each and chain them by `previous`.", 280)  # fmt: skip
    model = _load(sheet, "as_file", "auto")
    clip, vae = _load_text_and_vae(sheet)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    learned = sheet.add("HalfsafeCalibrate", 3, 240, SEED, "", model=model, **asked)
    sheet.add("PreviewAny", 3, 160, title="What was measured", source=Output(learned, 1))
    calibration = Output(learned)
    sheet.add("HalfsafeSaveModel", 3, 160, "diffusion_models/halfsafe-calibrated", "int8", model=model, calibration=calibration)
    trial = Output(sheet.add("HalfsafeLoadDiffusionModel", 4, 160, FP16, "as_file", "auto"))
    latent = _sample(sheet, trial, asked, 4, "fixed")
    _picture(sheet, latent, vae, "calibrated", (4, 4), 300)


def faster_sums(sheet: Sheet) -> None:
    sheet.note(
        "### fp16 sums, where they are safe\n\nRTX 20 to 50 multiply fp16 up to twice as fast if the sums are fp16 too. ComfyUI's `--fast "
        "fp16_accumulation` turns that on for everything.\n\n**Accumulation** does it for this model only, in layers whose sums are proven to fit into "
        "fp16. The others keep fp32 sums, and the report names them. After each call torch's own switches are back as they were.\n\n"
        "It acts on fp16 compute only, so the loader's `compute` is fp16.", 260)  # fmt: skip
    model = _load(sheet, "auto", "fp16")
    clip, vae = _load_text_and_vae(sheet)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    fast = Output(sheet.add("HalfsafeAccumulation", 3, 170, "auto", "unchanged", "unchanged", "auto", "auto", model=model))
    latent = _sample(sheet, fast, asked)
    _report(sheet, fast, _picture(sheet, latent, vae, "accumulation", (3, 4), 300))


def _stock(sheet: Sheet, file: str, title: str = "") -> Output:
    return Output(sheet.add("UNETLoader", MODEL, 90, file, "default", title=title))


def _stock_text(sheet: Sheet, file: str, kind: str) -> Output:
    return Output(sheet.add("CLIPLoader", CLIP, 110, file, kind, "default"))


def _stock_vae(sheet: Sheet, file: str, title: str = "") -> Output:
    return Output(sheet.add("VAELoader", CLIP, 60, file, title=title))


def _with(sheet: Sheet, name: str, size: int, more: str = "", height: int = 200) -> None:
    sheet.note(
        f"### {name}\n\nComfyUI's own loaders and settings for this model, and one **Halfsafe** node behind them. It picks the arithmetic for "
        f"your device, repeats a step that would come out black, and shows what it did.\n\n{more}ComfyUI offers to download the files that are missing "
        f"(about {size} GB).", height)  # fmt: skip


def with_z_image(sheet: Sheet) -> None:
    _with(sheet, "Z-Image Turbo", 21, "In fp16 ComfyUI clamps what overflows in it; `fp16_safe` has nothing to clamp.\n\n", 210)
    loaded = _stock(sheet, "z_image_turbo_bf16.safetensors"), _stock_text(sheet, "qwen_3_4b.safetensors", "lumina2"), _stock_vae(sheet, "ae.safetensors")
    model, clip, vae = _one_node(sheet, **dict(zip(("model", "clip", "vae"), loaded, strict=True)))
    shifted = Output(sheet.add("ModelSamplingAuraFlow", 3, 50, 3.0, model=model))
    asked = _prompt_alone(sheet, clip, 3) | {"latent_image": Output(sheet.add("EmptySD3LatentImage", 3, 110, 1024, 1024, 1))}
    latent = sheet.add("KSampler", 3, 270, SEED, "randomize", 8, 1.0, "res_multistep", "simple", 1.0, model=shifted, **asked)
    _picture(sheet, Output(latent), vae, "z-image-turbo", (4, 4))


def with_qwen_image(sheet: Sheet) -> None:
    _with(sheet, "Qwen-Image", 30, "Black in plain fp16; on a GPU without bf16 it runs as `fp16_safe` here instead of in fp32.\n\n", 220)
    model = _stock(sheet, "qwen_image_fp8_e4m3fn.safetensors")
    clip = _stock_text(sheet, "qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image")
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "qwen_image_vae.safetensors"))
    shifted = Output(sheet.add("ModelSamplingAuraFlow", 3, 50, 3.1, model=model))
    asked = _prompts(sheet, clip, 3) | {"latent_image": Output(sheet.add("EmptySD3LatentImage", 3, 110, 1328, 1328, 1))}
    latent = sheet.add("KSampler", 3, 270, SEED, "randomize", 20, 4.0, "euler", "simple", 1.0, model=shifted, **asked)
    _picture(sheet, Output(latent), vae, "qwen-image", (4, 4))


def with_flux(sheet: Sheet) -> None:
    _with(sheet, "Flux.1 dev", 34, "The file is 23.8 GB in bf16. To hold it in 8 bits use Halfsafe's Load Diffusion Model instead of the first loader.\n\n", 230)
    model = _stock(sheet, "flux1-dev.safetensors")
    clip = Output(sheet.add("DualCLIPLoader", CLIP, 140, "clip_l.safetensors", "t5xxl_fp16.safetensors", "flux", "default"))
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "ae.safetensors"))
    asked = _prompt_alone(sheet, clip, 3) | {"latent_image": Output(sheet.add("EmptySD3LatentImage", 3, 110, 1024, 1024, 1))}
    latent = sheet.add("KSampler", 3, 270, SEED, "randomize", 20, 1.0, "euler", "simple", 1.0, model=model, **asked)
    _picture(sheet, Output(latent), vae, "flux-1-dev", (4, 4))


def with_krea(sheet: Sheet) -> None:
    _with(sheet, "Krea 2 Turbo", 19)
    model = _stock(sheet, "krea2_turbo_fp8_scaled.safetensors")
    clip = _stock_text(sheet, "qwen3vl_4b_fp8_scaled.safetensors", "krea2")
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "qwen_image_vae.safetensors"))
    asked = _prompt_alone(sheet, clip, 3) | {"latent_image": Output(sheet.add("EmptyLatentImage", 3, 110, 1024, 1024, 1))}
    latent = sheet.add("KSampler", 3, 270, SEED, "randomize", 8, 1.0, "euler", "simple", 1.0, model=model, **asked)
    _picture(sheet, Output(latent), vae, "krea-2-turbo", (4, 4))


def with_wan22(sheet: Sheet) -> None:
    _with(sheet, "Wan 2.2, 14B", 35, "It is two models: one for high noise, one for low noise. Each has its own Halfsafe node.\n\n", 220)
    high = _stock(sheet, "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "High noise")
    low = _stock(sheet, "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors", "Low noise")
    clip, vae = _stock_text(sheet, TEXT, "wan"), _stock_vae(sheet, WAN_VAE)
    model, clip, vae = _one_node(sheet, 440, model=high, clip=clip, vae=vae)
    other = _one_node(sheet, 440, model=low)[0]
    first, second = (Output(sheet.add("ModelSamplingSD3", MODEL, 50, 5.0, model=one)) for one in (model, other))
    asked = _prompts(sheet, clip, MODEL)
    empty = Output(sheet.add("EmptyHunyuanLatentVideo", MODEL, 130, 640, 640, 81, 1))
    values = (SEED, "randomize", 20, 3.5, "euler", "simple")
    begun = Output(sheet.add("KSamplerAdvanced", 3, 330, "enable", *values, 0, 10, "enable", model=first, latent_image=empty, **asked))
    values = (0, "fixed", 20, 3.5, "euler", "simple")
    latent = Output(sheet.add("KSamplerAdvanced", 3, 330, "disable", *values, 10, 10000, "disable", model=second, latent_image=begun, **asked))
    images = Output(sheet.add("VAEDecode", 4, 50, samples=latent, vae=vae))
    video = Output(sheet.add("CreateVideo", 4, 110, 16.0, images=images))
    sheet.add("SaveVideo", 4, 380, "video/halfsafe-wan-2.2", "auto", "auto", video=video)


def with_minimax_h3(sheet: Sheet) -> None:
    _with(sheet, "MiniMax H3", 57, "Video with sound, two seconds. In fp16 it is known to give NaN on GPUs without bf16.\n\n", 220)
    model = _stock(sheet, "minimax_h3_fl2va_pruned_int8_convrot.safetensors")
    clip = _stock_text(sheet, "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "minimax")
    vae, sound = _stock_vae(sheet, "minimax_h3_video_vae_fp16.safetensors"), _stock_vae(sheet, "minimax_h3_audio_vae_fp32.safetensors", "Load VAE (sound)")
    model, clip, vae = _one_node(sheet, 480, model=model, clip=clip, vae=vae)
    asked = sheet.add("MiniMaxH3ImageToVideo", MODEL, 270, ASKED, 832, 480, 56, clip=clip, vae=vae)
    noise = Output(sheet.add("RandomNoise", 2, 80, SEED, "randomize"))
    sampler = Output(sheet.add("KSamplerSelect", 3, 60, "res_multistep"))
    sigmas = Output(sheet.add("BasicScheduler", 3, 110, "simple", 20, 1.0, model=model))
    guider = Output(sheet.add("BasicGuider", 3, 50, model=model, conditioning=Output(asked)))
    parts = {"noise": noise, "guider": guider, "sampler": sampler, "sigmas": sigmas, "latent_image": Output(asked, 1)}
    latent = Output(sheet.add("SamplerCustomAdvanced", 3, 110, **parts))
    images = Output(sheet.add("VAEDecode", 3, 50, samples=latent, vae=vae))
    audio = Output(sheet.add("VAEDecodeAudio", 3, 50, samples=latent, vae=sound))
    video = Output(sheet.add("CreateVideo", 4, 110, 24.0, images=images, audio=audio))
    sheet.add("SaveVideo", 4, 380, "video/halfsafe-minimax-h3", "auto", "auto", video=video)


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
