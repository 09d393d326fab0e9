"""Write the workflows of `workflows/`: what each is for, its nodes, and the files it names; and the block of `subgraphs/`, which ComfyUI lists beside its own.

    COMFYUI_DIR=<folder> .venv/bin/python scripts/assets/workflows.py

ComfyUI's template browser shows a pack's files by their names, so a name is a title. `pictures.py` draws their thumbnails.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "scripts" / "assets")]

from setup.comfyui_server import Server, make_base_directory  # noqa: E402
from workflow_models import FILES, NEWER_NODES  # noqa: E402
from workflow_sheet import TWO_NODES, WIDE_SECOND, Output, Sheet  # noqa: E402

FP16 = "wan2.1_t2v_1.3B_fp16.safetensors"
TEXT, WAN_VAE = "umt5_xxl_fp8_e4m3fn_scaled.safetensors", "wan_2.1_vae.safetensors"
BUILT_IN = "halfsafe_example.safetensors"
ASKED = "a lighthouse on a cliff at dusk, warm light in its window, calm sea, photograph"
UNWANTED = "blurry, low quality, watermark"
SEED = 20260214
CFG = 6.0
CANDIDATES = "auto/auto\nauto/fp16_safe\nas_file/bf16\nas_file/fp16\nint8/auto\nfp8_e4m3fn/auto\nfp8_e4m3fn/fp8"


BLOCK = "Halfsafe int8 loader"
FIRST_FILE = ""
"""The page puts the first file of the list in its place."""


def main() -> None:
    info = _object_info()
    files = {ROOT / "workflows" / f"{title}.json": workflow for title, workflow in made(info).items()}
    for path, workflow in {**files, ROOT / "subgraphs" / f"{BLOCK}.json": block(info)}.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps(workflow, separators=(",", ":"), ensure_ascii=False) + "\n", encoding="utf-8", newline="\n"
        )
        print(path.relative_to(ROOT))


def block(info: dict) -> dict:
    """The one block of `subgraphs/`: a diffusion model in int8 with the one node, in place of a loader; clip and vae pass the guard too."""
    sheet = Sheet(BLOCK, info, FILES, NEWER_NODES)
    guarded = _one_node(sheet, model=_load(sheet, "int8", "auto", file=FIRST_FILE))
    return sheet.block(
        taken=[("clip", Output(guarded[0].node, 1)), ("vae", Output(guarded[0].node, 2))],
        given=guarded,
        shown=[(1, "model_name"), (1, "storage")],
    )


def made(info: dict) -> dict[str, dict]:
    """Title -> workflow, in the order of their numbers; ``info`` is the answer of ComfyUI's `/object_info`."""
    workflows = {}
    for title, fill in WORKFLOWS.items():
        sheet = Sheet(title, info, FILES, NEWER_NODES)
        fill(sheet)
        workflows[title] = sheet.workflow()
    return workflows


def _object_info() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        base = make_base_directory(Path(folder), ROOT)
        shutil.copy(ROOT / "tests" / "support" / "custom_nodes" / "qwen_image_21.py", base / "custom_nodes")
        with Server(Path(os.environ["COMFYUI_DIR"]), base) as server:
            return server.object_info()


def _load(
    sheet: Sheet,
    storage: str,
    compute: str,
    column: int = 0,
    file: str = FP16,
    title: str = "Load Diffusion Model",
    folded: bool = False,
    **sources: Output,
) -> Output:
    return Output(
        sheet.add(
            "HalfsafeLoadDiffusionModel", column, 142, file, storage, compute, title=title, folded=folded, **sources
        )
    )


def _load_text(sheet: Sheet, column: int = 0, file: str = TEXT, kind: str = "wan") -> Output:
    return Output(
        sheet.add("HalfsafeLoadCLIP", column, 240, file, kind, "auto", "auto", "none", "none", "none", folded=True)
    )


def _load_vae(sheet: Sheet, column: int = 0, file: str = WAN_VAE) -> Output:
    return Output(sheet.add("HalfsafeLoadVAE", column, 80, file, "auto", folded=True))


def _prompts(sheet: Sheet, clip: Output, column: int = 1, height: int = 102) -> dict[str, Output]:
    positive = sheet.add("CLIPTextEncode", column, height, ASKED, title="Prompt", clip=clip)
    negative = sheet.add("CLIPTextEncode", column, 80, UNWANTED, title="Negative prompt", folded=True, clip=clip)
    return {"positive": Output(positive), "negative": Output(negative)}


def _prompt_alone(sheet: Sheet, clip: Output, column: int, text: str = ASKED) -> dict[str, Output]:
    """For a model that was made for cfg 1: what is not wanted is empty."""
    positive = Output(sheet.add("CLIPTextEncode", column, 160, text, title="Prompt", clip=clip))
    return {
        "positive": positive,
        "negative": Output(sheet.add("ConditioningZeroOut", column, 30, folded=True, conditioning=positive)),
    }


def _frame(sheet: Sheet, column: int = 1, width: int = 832, height: int = 480) -> Output:
    return Output(
        sheet.add("EmptyHunyuanLatentVideo", column, 130, width, height, 1, 1, title="Empty latent", folded=True)
    )


def _sample(
    sheet: Sheet,
    model: Output,
    asked: dict[str, Output],
    column: int,
    control: str = "fixed",
    title: str = "",
    folded: bool = True,
) -> Output:
    values = (SEED, control, 20, CFG, "euler", "simple", 1.0)
    return Output(sheet.add("KSampler", column, 262, *values, title=title, folded=folded, model=model, **asked))


def _picture(
    sheet: Sheet,
    latent: Output,
    vae: Output,
    name: str,
    column: int = 3,
    height: int = 304,
    title: str = "",
    decoded: int = 3,
) -> Output:
    """A picture at the top of its column, where neither the page's map nor its edge covers it."""
    image = Output(sheet.add("VAEDecode", decoded, 50, folded=True, samples=latent, vae=vae))
    sheet.add("SaveImage", column, height, f"halfsafe/{name}", title=title, top=0, images=image)
    return image


def _report(sheet: Sheet, model: Output, after: Output, height: int) -> None:
    sheet.add("HalfsafeReport", 2, height, model=model, after=after)


def _one_node(sheet: Sheet, column: int = 1, **given: Output) -> tuple[Output, Output, Output]:
    node = sheet.add("HalfsafeAutoPrecision", column, 516, "balanced", "retry_higher", "off", **given)
    return Output(node, 0), Output(node, 1), Output(node, 2)


def _built_in(sheet: Sheet, compute: str) -> Output:
    """The pack's own model, which overflows in fp16 and draws a red heart whatever is asked for."""
    return _load(sheet, "auto", compute, 0, BUILT_IN, "A small built-in model")


def _heart(sheet: Sheet, clip: Output, column: int) -> dict[str, Output]:
    positive = Output(sheet.add("CLIPTextEncode", column, 102, "a red heart", title="Prompt", clip=clip))
    return {"positive": positive, "negative": positive}


def _sample_built_in(
    sheet: Sheet, model: Output, asked: dict[str, Output], column: int = 1, title: str = "", folded: bool = False
) -> Output:
    values = (7, "fixed", 16, 1.0, "euler", "simple", 1.0)
    return Output(sheet.add("KSampler", column, 262, *values, title=title, folded=folded, model=model, **asked))


def _enlarged(
    sheet: Sheet, latent: Output, vae: Output, folder: str, column: int = 3, title: str = "", decoded: int = 3
) -> Output:
    """The picture of 128 x 128 at the top of its column, large enough to be seen."""
    image = Output(sheet.add("VAEDecode", decoded, 50, folded=True, samples=latent, vae=vae))
    large = Output(
        sheet.add(
            "ImageScale", decoded, 130, "lanczos", 384, 384, "disabled", title="Enlarge", folded=True, image=image
        )
    )
    sheet.add("SaveImage", column, 310, f"halfsafe/{folder}", title=title, top=0, images=large)
    return large


def fix_black_images(sheet: Sheet) -> None:
    sheet.columns = WIDE_SECOND
    sheet.note(
        "# No more black images\n\n## Press Run: black without Halfsafe, right with it.\n\nThe small model that comes with Halfsafe overflows in fp16. "
        "The **Halfsafe** node computes in a format that does not overflow, and lists on itself what it did. If a step still comes out black, it repeats the step.\n\n"
        "**Your own graph:** open it, then click *Guard this workflow* in the Halfsafe sidebar. That adds this one node. Nothing is downloaded here.", 262)  # fmt: skip
    sheet.leave(2, 310)
    sheet.leave(3, 310)
    model, vae, frame = _built_in(sheet, "fp16"), _load_vae(sheet, 0, BUILT_IN), _frame(sheet, 0, 128, 128)
    clip = _load_text(sheet, 2, BUILT_IN, "sd3")
    guarded, safe_clip, safe_vae = _one_node(sheet, model=model, clip=clip, vae=vae)
    asked = _heart(sheet, safe_clip, 2) | {"latent_image": frame}
    without = _sample_built_in(sheet, model, asked, 1, "Without Halfsafe", folded=True)
    repaired = _sample_built_in(sheet, guarded, asked, 1, "With Halfsafe", folded=True)
    _enlarged(sheet, without, vae, "without", 2, "Without Halfsafe", 2)
    _enlarged(sheet, repaired, safe_vae, "with", 3, "With Halfsafe")


def find_the_layer(sheet: Sheet) -> None:
    sheet.note(
        "# Which layer turns it black?\n\n## Press Run, then read *Guard* in the report.\n\nThis small built-in model computes in **fp16**, whose largest "
        "number is 65504. It exceeds that, and its picture would be black. **NaN Guard** finds the layer, repeats the step with that layer in a wider format, and tells you. "
        "**Guard VAE** does so for the decoder.\n\nCtrl+B on NaN Guard and on Guard VAE, then Run: the black picture.\n\n"
        "In your own graph: NaN Guard behind the model's loader.", 300)  # fmt: skip
    model, vae, clip = _built_in(sheet, "fp16"), _load_vae(sheet, 0, BUILT_IN), _load_text(sheet, 1, BUILT_IN, "sd3")
    guarded = Output(sheet.add("HalfsafeNaNGuard", 2, 176, "retry_higher", 8, "off", model=model))
    latent = _sample_built_in(sheet, guarded, _heart(sheet, clip, 1) | {"latent_image": _frame(sheet, 1, 128, 128)})
    safe_vae = Output(sheet.add("HalfsafeGuardVAE", 1, 60, "retry_higher", folded=True, vae=vae))
    sheet.leave(3, 310)
    _report(sheet, guarded, _enlarged(sheet, latent, safe_vae, "rescued"), 380)


def half_the_memory(sheet: Sheet) -> None:
    sheet.note(
        "# Half the memory\n\n## Press Run: the report lists each layer's format, and why.\n\n**Load Diffusion Model** keeps the weights in scaled fp8: half of 16 bit (0.6 to 0.7 for Flux and Qwen-Image). "
        "Layers that do not stand 8 bits stay as they are in the file.\n\nTry `storage` = **int8**: the error is smaller, and on RTX 20 and newer "
        "it can be faster. `auto` goes below 16 bit only if the model does not fit.", 290)  # fmt: skip
    model = _load(sheet, "fp8_e4m3fn", "auto")
    vae, clip = _load_vae(sheet), _load_text(sheet, 1)
    asked = _prompts(sheet, clip) | {"latent_image": _frame(sheet)}
    latent = _sample(sheet, model, asked, 1, "randomize", folded=False)
    sheet.leave(3, 304)
    _report(sheet, model, _picture(sheet, latent, vae, "quick-fp8"), 550)


def old_gpu(sheet: Sheet) -> None:
    sheet.note(
        "# A GPU without bf16\n\n## Press Run: fp16_safe cannot overflow.\n\nRTX 20, V100, T4, RX 6000, Apple M1 and M2 have no bf16. Their fp16 is fast, but some models overflow in it "
        "and turn black; ComfyUI then falls back to slow fp32.\n\n`compute` = **fp16_safe** multiplies in fp16 and keeps everything between the "
        "products in fp32. The small built-in model here is black in `fp16`: try it.\n\nGTX 16 computes wrongly in fp16: choose `auto` there.\n\n"
        "Real models: *Halfsafe with Qwen-Image*, *with Z-Image Turbo*.", 350)  # fmt: skip
    model = _built_in(sheet, "fp16_safe")
    clip, vae = _load_text(sheet, 1, BUILT_IN, "sd3"), _load_vae(sheet, 1, BUILT_IN)
    latent = _sample_built_in(sheet, model, _heart(sheet, clip, 1) | {"latent_image": _frame(sheet, 1, 128, 128)})
    sheet.leave(3, 310)
    _report(sheet, model, _enlarged(sheet, latent, vae, "old-gpu"), 550)


def which_precision(sheet: Sheet) -> None:
    sheet.note(
        "# Which precision for this card?\n\n## Press Run: four euler steps for each candidate and the reference, 32 at most.\n\n**Measure Precisions** runs your prompt in each candidate and shows a "
        "step's time, the memory and the error against fp32. Its first line names the best, which the second loader takes and draws with. If times were too noisy, it stays on `auto`.\n\n"
        "It holds for this model, size and card. The first loader stays on `as_file`, to compare with the original.", 300)  # fmt: skip
    original = _load(sheet, "as_file", "auto")
    asked = _prompts(sheet, _load_text(sheet), height=150) | {"latent_image": _frame(sheet)}
    measured = sheet.add("HalfsafeMeasurePrecisions", 2, 546, SEED, CANDIDATES, CFG, model=original, **asked)
    vae = _load_vae(sheet, 1)
    best = _load(sheet, "auto", "auto", 1, rules=Output(measured, 1))
    sheet.leave(3, 304)
    _picture(sheet, _sample(sheet, best, asked, 3), vae, "which-precision")


def save_calibrated(sheet: Sheet) -> None:
    sheet.note(
        "# Save a calibrated int8 file\n\n## Press Run: 8 euler steps, then a long save.\n\n**Calibrate** samples the model on your prompt and sums what each layer meets. "
        "**Save Model** rounds the weights by that: an int8 file closer to the original, as small and fast, that any ComfyUI loads.\n\n"
        "The picture is the original's. Press R after the run and choose the saved file in the second loader.", 264)  # fmt: skip
    model = _load(sheet, "as_file", "auto")
    clip, frame = _load_text(sheet), _frame(sheet, 0)
    sheet.leave(1, 334)
    asked = _prompts(sheet, clip) | {"latent_image": frame}
    calibration = Output(sheet.add("HalfsafeCalibrate", 2, 350, SEED, "", model=model, **asked))
    sheet.add(
        "HalfsafeSaveModel",
        1,
        334,
        "diffusion_models/halfsafe-calibrated",
        "int8",
        True,
        top=0,
        model=model,
        calibration=calibration,
    )
    vae = _load_vae(sheet, 1)
    trial = _load(sheet, "as_file", "auto", 2)
    sheet.leave(3, 304)
    _picture(sheet, _sample(sheet, trial, asked, 3), vae, "calibrated")


def _stock(sheet: Sheet, file: str, title: str = "", folded: bool = False) -> Output:
    return Output(sheet.add("UNETLoader", 0, 86, file, "default", title=title, folded=folded))


def _stock_text(sheet: Sheet, file: str, kind: str, folded: bool = False) -> Output:
    return Output(sheet.add("CLIPLoader", 0, 114, file, kind, "default", folded=folded))


def _stock_vae(sheet: Sheet, file: str, title: str = "", column: int = 0) -> Output:
    return Output(sheet.add("VAELoader", column, 60, file, title=title, folded=True))


def _empty(sheet: Sheet, kind: str, size: int) -> Output:
    return Output(sheet.add(kind, 2, 110, size, size, 1, folded=True))


def _sample_stock(
    sheet: Sheet,
    model: Output,
    asked: dict[str, Output],
    latent: Output,
    steps: int,
    cfg: float,
    sampler: str = "euler",
) -> Output:
    values = (SEED, "randomize", steps, cfg, sampler, "simple", 1.0)
    return Output(sheet.add("KSampler", 2, 262, *values, model=model, latent_image=latent, **asked))


def _sample_z_image(sheet: Sheet, model: Output, clip: Output, text: str = ASKED) -> Output:
    shifted = Output(sheet.add("ModelSamplingAuraFlow", 1, 62, 3.0, folded=True, model=model))
    asked = _prompt_alone(sheet, clip, 2, text)
    return _sample_stock(sheet, shifted, asked, _empty(sheet, "EmptySD3LatentImage", 1024), 8, 1.0, "res_multistep")


def _sample_h3(sheet: Sheet, model: Output, asked: int, noise: Output, column: int) -> Output:
    """Sample MiniMax H3 for what its node ``asked`` for; ``column``: that of the guider."""
    sampler = Output(sheet.add("KSamplerSelect", 2, 60, "res_multistep", folded=True))
    sigmas = Output(sheet.add("BasicScheduler", 2, 110, "simple", 20, 1.0, folded=True, model=model))
    guider = Output(sheet.add("BasicGuider", column, 50, folded=True, model=model, conditioning=Output(asked)))
    parts = {"noise": noise, "guider": guider, "sampler": sampler, "sigmas": sigmas, "latent_image": Output(asked, 1)}
    return Output(sheet.add("SamplerCustomAdvanced", 2, 110, folded=True, **parts))


def _save_h3(sheet: Sheet, latent: Output, vae: Output, sound: Output, name: str) -> Output:
    images = Output(sheet.add("VAEDecode", 3, 50, folded=True, samples=latent, vae=vae))
    audio = Output(sheet.add("VAEDecodeAudio", 3, 50, folded=True, samples=latent, vae=sound))
    video = Output(sheet.add("CreateVideo", 3, 110, 24.0, folded=True, images=images, audio=audio))
    sheet.add("SaveVideo", 3, 268, name, "auto", "auto", top=0, video=video)
    return images


def _guards(
    sheet: Sheet, compute: str, model: Output, clip: Output, vae: Output, folded: bool = False
) -> tuple[Output, Output, Output]:
    """The arithmetic chosen by hand, then a guard for each part. ``folded``: that of the model."""
    chosen = Output(sheet.add("HalfsafeComputeDtype", 1, 82, compute, model=model))
    guarded = sheet.add("HalfsafeNaNGuard", 1, 176, "retry_higher", 8, "off", folded=folded, model=chosen)
    safe_clip = sheet.add("HalfsafeGuardCLIP", 1, 60, "retry_higher", folded=True, clip=clip)
    safe_vae = sheet.add("HalfsafeGuardVAE", 1, 60, "retry_higher", folded=True, vae=vae)
    return Output(guarded), Output(safe_clip), Output(safe_vae)


def minimax_h3_on_old_cards(sheet: Sheet) -> None:
    sheet.note(
        "# MiniMax H3 on an RTX 20 or V100\n\n## Press Run: 16 bit without NaN.\n\nThese cards have no bf16, and in fp16 this model is known to give NaN. "
        "**Compute Dtype** = `auto` takes int8 products on an RTX 20 with a torch built for CUDA 13, else `fp16_safe`: fp16 that cannot overflow. "
        "**NaN Guard**, **Guard CLIP** and **Guard VAE** repeat what comes out as NaN.\n\nComfyUI's own files and settings, two seconds with sound (about 57 GB).", 290)  # fmt: skip
    sheet.leave(3, 268)
    model = _stock(sheet, "minimax_h3_fl2va_pruned_int8_convrot.safetensors")
    clip = _stock_text(sheet, "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "minimax", folded=True)
    vae, sound = (
        _stock_vae(sheet, "minimax_h3_video_vae_fp16.safetensors"),
        _stock_vae(sheet, "minimax_h3_audio_vae_fp32.safetensors", "Load VAE (sound)"),
    )
    model, clip, vae = _guards(sheet, "auto", model, clip, vae, folded=True)
    asked = sheet.add("MiniMaxH3ImageToVideo", 1, 246, ASKED, 864, 480, 56, clip=clip, vae=vae)
    noise = Output(sheet.add("RandomNoise", 2, 82, SEED, "randomize", folded=True))
    latent = _sample_h3(sheet, model, asked, noise, 2)
    images = _save_h3(sheet, latent, vae, sound, "video/halfsafe-minimax-h3-old-card")
    _report(sheet, model, images, 350)


def qwen_image_21(sheet: Sheet) -> None:
    sheet.columns = WIDE_SECOND
    sheet.note(
        "# Qwen-Image 2.1 without bf16\n\n## It needs ComfyUI 0.37.2 or newer. Then press Run.\n\nRTX 20, V100, RX 6000, Apple M1 and M2 have no bf16. "
        "**Compute Dtype** = `fp16_safe` multiplies in fp16 and keeps everything between the products in fp32: no overflow, and no slow fp32 products. "
        "**NaN Guard**, **Guard CLIP** and **Guard VAE** repeat what comes out as NaN.\n\nOn an RTX 20 with a torch built for CUDA 13, `auto` multiplies in int8.\n\n"
        "ComfyUI's own files and settings (about 17 GB).", 320)  # fmt: skip
    model = _stock(sheet, "qwen_image_2.1_int8_convrot.safetensors")
    clip = _stock_text(sheet, "qwen3vl_8b_int8_convrot.safetensors", "qwen_image", folded=True)
    vae = _stock_vae(sheet, "qwen_image_2.1_vae_bf16.safetensors")
    model, clip, vae = _guards(sheet, "fp16_safe", model, clip, vae)
    cached = Output(sheet.add("QwenImage21Cache", 1, 82, "auto", "default", folded=True, model=model))
    asked = sheet.add("TextEncodeQwenImage21", 2, 240, ASKED, "", 1024, clip=clip)
    parts = {"positive": Output(asked), "negative": Output(asked, 1)}
    latent = _sample_stock(sheet, cached, parts, _empty(sheet, "EmptyLatentImage", 1024), 25, 1.0)
    sheet.leave(3, 340)
    _picture(sheet, latent, vae, "qwen-image-2.1", height=340)


def z_image_with_a_lora(sheet: Sheet) -> None:
    sheet.columns = WIDE_SECOND
    sheet.note(
        "# Z-Image int8 + LoRA\n\n## Press Run: the node lists each layer's format.\n\n**Load Diffusion Model** makes int8 of the file as it loads: "
        "about half the memory. The LoRA is added beside the int8 weights, not rounded into them.\n\nComfyUI's own files and settings (about 21 GB).", 192)  # fmt: skip
    model = _load(sheet, "int8", "auto", file="z_image_turbo_bf16.safetensors")
    with_lora = Output(
        sheet.add("LoraLoaderModelOnly", 0, 82, "pixel_art_style_z_image_turbo.safetensors", 1.0, model=model)
    )
    clip, vae = _stock_text(sheet, "qwen_3_4b.safetensors", "lumina2", folded=True), _stock_vae(sheet, "ae.safetensors")
    model, clip, vae = _one_node(sheet, model=with_lora, clip=clip, vae=vae)
    sheet.leave(3, 340)
    _picture(
        sheet, _sample_z_image(sheet, model, clip, f"Pixel art style, {ASKED}"), vae, "z-image-int8-lora", height=340
    )


def _with(sheet: Sheet, name: str, size: int, more: str = "", height: int = 190, columns: tuple = WIDE_SECOND) -> None:
    sheet.columns = columns
    sheet.note(
        f"# {name}\n\nComfyUI's own loaders and settings for this model, and one **Halfsafe** node behind them. It picks the arithmetic for "
        f"your device, repeats a step that would come out black, and shows what it did.\n\n{more}ComfyUI offers to download the files that are missing "
        f"(about {size} GB).", height)  # fmt: skip
    sheet.leave(3, 340)


def with_z_image(sheet: Sheet) -> None:
    _with(
        sheet,
        "Z-Image Turbo",
        21,
        "In fp16 ComfyUI clamps what overflows in it; `fp16_safe` has nothing to clamp.\n\n",
        210,
    )
    loaded = (
        _stock(sheet, "z_image_turbo_bf16.safetensors"),
        _stock_text(sheet, "qwen_3_4b.safetensors", "lumina2"),
        _stock_vae(sheet, "ae.safetensors"),
    )
    model, clip, vae = _one_node(sheet, **dict(zip(("model", "clip", "vae"), loaded, strict=True)))
    _picture(sheet, _sample_z_image(sheet, model, clip), vae, "z-image-turbo", height=340)


def with_qwen_image(sheet: Sheet) -> None:
    _with(
        sheet,
        "Qwen-Image",
        30,
        "Black in plain fp16; on a GPU without bf16 it runs as `fp16_safe` here instead of in fp32.\n\n",
        210,
    )
    model = _stock(sheet, "qwen_image_fp8_e4m3fn.safetensors")
    clip = _stock_text(sheet, "qwen_2.5_vl_7b_fp8_scaled.safetensors", "qwen_image")
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "qwen_image_vae.safetensors"))
    shifted = Output(sheet.add("ModelSamplingAuraFlow", 1, 62, 3.1, folded=True, model=model))
    asked = _prompts(sheet, clip, 2, 160)
    latent = _sample_stock(sheet, shifted, asked, _empty(sheet, "EmptySD3LatentImage", 1328), 20, 4.0)
    _picture(sheet, latent, vae, "qwen-image", height=340)


def with_flux(sheet: Sheet) -> None:
    _with(
        sheet,
        "Flux.1 dev",
        34,
        "The file is 23.8 GB in bf16: Halfsafe's Load Diffusion Model holds it in 8 bits.\n\n",
        200,
    )
    model = _stock(sheet, "flux1-dev.safetensors")
    clip = Output(
        sheet.add("DualCLIPLoader", 0, 142, "clip_l.safetensors", "t5xxl_fp16.safetensors", "flux", "default")
    )
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "ae.safetensors"))
    latent = _sample_stock(
        sheet, model, _prompt_alone(sheet, clip, 2), _empty(sheet, "EmptySD3LatentImage", 1024), 20, 1.0
    )
    _picture(sheet, latent, vae, "flux-1-dev", height=340)


def with_krea(sheet: Sheet) -> None:
    _with(sheet, "Krea 2 Turbo", 19)
    model = _stock(sheet, "krea2_turbo_fp8_scaled.safetensors")
    clip = _stock_text(sheet, "qwen3vl_4b_fp8_scaled.safetensors", "krea2")
    model, clip, vae = _one_node(sheet, model=model, clip=clip, vae=_stock_vae(sheet, "qwen_image_vae.safetensors"))
    latent = _sample_stock(sheet, model, _prompt_alone(sheet, clip, 2), _empty(sheet, "EmptyLatentImage", 1024), 8, 1.0)
    _picture(sheet, latent, vae, "krea-2-turbo", height=340)


def with_wan22(sheet: Sheet) -> None:
    _with(
        sheet,
        "Wan 2.2, 14B",
        35,
        "Two models, for high and for low noise: each has its own Halfsafe node.\n\n",
        212,
        TWO_NODES,
    )
    sheet.leave(3, 268)
    high = _stock(sheet, "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors", "High noise", folded=True)
    low = _stock(sheet, "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors", "Low noise", folded=True)
    clip, vae = _stock_text(sheet, TEXT, "wan", folded=True), _stock_vae(sheet, WAN_VAE)
    model, clip, vae = _one_node(sheet, model=high, clip=clip, vae=vae)
    other = _one_node(sheet, 2, model=low)[0]
    first, second = (
        Output(sheet.add("ModelSamplingSD3", column, 60, 5.0, folded=True, model=one))
        for column, one in ((1, model), (2, other))
    )
    asked = _prompts(sheet, clip, 0, 90)
    empty = Output(sheet.add("EmptyHunyuanLatentVideo", 1, 130, 640, 640, 81, 1, folded=True))
    values = (SEED, "randomize", 20, 3.5, "euler", "simple")
    begun = Output(
        sheet.add(
            "KSamplerAdvanced",
            2,
            334,
            "enable",
            *values,
            0,
            10,
            "enable",
            folded=True,
            model=first,
            latent_image=empty,
            **asked,
        )
    )
    values = (0, "fixed", 20, 3.5, "euler", "simple")
    latent = Output(
        sheet.add(
            "KSamplerAdvanced",
            3,
            334,
            "disable",
            *values,
            10,
            10000,
            "disable",
            folded=True,
            model=second,
            latent_image=begun,
            **asked,
        )
    )
    images = Output(sheet.add("VAEDecode", 3, 50, folded=True, samples=latent, vae=vae))
    video = Output(sheet.add("CreateVideo", 3, 110, 16.0, folded=True, images=images))
    sheet.add("SaveVideo", 3, 268, "video/halfsafe-wan-2.2", "auto", "auto", top=0, video=video)


def with_minimax_h3(sheet: Sheet) -> None:
    _with(
        sheet,
        "MiniMax H3",
        57,
        "Video with sound, two seconds. In fp16 it is known to give NaN on GPUs without bf16.\n\n",
        200,
    )
    sheet.leave(3, 268)
    model = _stock(sheet, "minimax_h3_fl2va_pruned_int8_convrot.safetensors")
    clip = _stock_text(sheet, "qwen3vl_32b_minimax_h3_nvfp4_awq.safetensors", "minimax")
    model, clip, vae = _one_node(
        sheet, model=model, clip=clip, vae=_stock_vae(sheet, "minimax_h3_video_vae_fp16.safetensors")
    )
    sound = _stock_vae(sheet, "minimax_h3_audio_vae_fp32.safetensors", "Load VAE (sound)", 1)
    asked = sheet.add("MiniMaxH3ImageToVideo", 2, 246, ASKED, 832, 480, 56, clip=clip, vae=vae)
    noise = Output(sheet.add("RandomNoise", 2, 82, SEED, "randomize"))
    latent = _sample_h3(sheet, model, asked, noise, 1)
    _save_h3(sheet, latent, vae, sound, "video/halfsafe-minimax-h3")


WORKFLOWS: dict[str, Callable[[Sheet], None]] = {
    "Halfsafe 1 - Fix black images": fix_black_images,
    "Halfsafe 2 - Find the layer that turns black": find_the_layer,
    "Halfsafe 3 - Half the memory": half_the_memory,
    "Halfsafe 4 - Old GPU without bf16": old_gpu,
    "Halfsafe 5 - Which precision suits my card": which_precision,
    "Halfsafe 6 - MiniMax H3 on an RTX 20 or V100": minimax_h3_on_old_cards,
    "Halfsafe 7 - Qwen-Image 2.1 without bf16": qwen_image_21,
    "Halfsafe 8 - Save a calibrated int8 file": save_calibrated,
    "Halfsafe 9 - Z-Image in int8 with a LoRA": z_image_with_a_lora,
    "Halfsafe with Flux 1 dev": with_flux,
    "Halfsafe with Krea 2 Turbo": with_krea,
    "Halfsafe with MiniMax H3": with_minimax_h3,
    "Halfsafe with Qwen-Image": with_qwen_image,
    "Halfsafe with Wan 2.2": with_wan22,
    "Halfsafe with Z-Image Turbo": with_z_image,
}

if __name__ == "__main__":
    main()
