"""Denoiser calls of every small model family, and the ways to make each overflow fp16.

A call is captured once from ComfyUI's own sampler, with the conditioning the family gets there, and repeated on any
other load of the same model.
"""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support import tiny_models

CONTEXT_WIDTH = {"sd15": 768, "sdxl": 2048, "qwen_image": 3584, "z_image": 2560}
POOLED_WIDTH = {"flux": 768, "hunyuan_video": 768, "sd3": 2048, "sdxl": 1280}
NEEDS_MASK = ("ltxv", "z_image")
NO_CHART = np.zeros((1, 1, 3), dtype=np.uint8)

# family -> kind -> {pattern of tensor names: factor}
OVERFLOWS = {
    "wan": {
        "ffn": {r"blocks\.0\.ffn\.0\.weight": 128, r"blocks\.0\.ffn\.2\.weight": 2048},
        "residual": {r"blocks\.\d\.(ffn\.2|self_attn\.o)\.weight": 1e5},
        "attention": {r"self_attn\.norm_[qk]\.weight": 200},
        "embedding": {r"text_embedding\.0\.weight": 3e3, r"text_embedding\.2\.weight": 3e3},
    },
    "flux": {
        "ffn": {r"double_blocks\.0\.(img|txt)_mlp\.0\.weight": 128, r"double_blocks\.0\.(img|txt)_mlp\.2\.weight": 2048},
        "residual": {r"(attn\.proj|linear2)\.weight": 1e5},
        "attention": {r"(query|key)_norm\.(scale|weight)": 200},
        "embedding": {r"txt_in\.weight": 1e5},
    },
    "sd3": {
        "ffn": {r"joint_blocks\.0\..*mlp\.fc1\.weight": 128, r"joint_blocks\.0\..*mlp\.fc2\.weight": 2048},
        "residual": {r"(attn\.proj|mlp\.fc2)\.weight": 1e5},
        "attention": {r"attn\.qkv\.weight": 1e3},
        "embedding": {r"context_embedder\.weight": 1e5},
    },
    "hunyuan_video": {
        "ffn": {r"double_blocks\.0\.(img|txt)_mlp\.0\.weight": 128, r"double_blocks\.0\.(img|txt)_mlp\.2\.weight": 2048},
        "residual": {r"(img_attn\.proj|linear2)\.weight": 1e5},
        "attention": {r"(query|key)_norm\.(scale|weight)": 200},
        "embedding": {r"txt_in\.input_embedder\.weight": 1e5},
    },
    "ltxv": {
        "ffn": {r"blocks\.0\.ff\.net\.0\.proj\.weight": 128, r"blocks\.0\.ff\.net\.2\.weight": 2048},
        "residual": {r"(ff\.net\.2|attn1\.to_out\.0)\.weight": 1e5},
        "attention": {r"attn1\.[qk]_norm\.weight": 400},
        "embedding": {r"caption_projection\.linear_1\.weight": 3e3, r"caption_projection\.linear_2\.weight": 3e3},
    },
    "sdxl": {
        "ffn": {r"transformer_blocks\.0\.ff\.net\.0\.proj\.weight": 128, r"transformer_blocks\.0\.ff\.net\.2\.weight": 64},
        "residual": {r"transformer_blocks\.\d\.(ff\.net\.2|attn1\.to_out\.0)\.weight": 1e5},
        "attention": {r"input_blocks\.[34]\.1\.transformer_blocks\.0\.attn1\.to_[qk]\.weight": 300},
        "convolution": {r"in_layers\.2\.weight": 1e5, r"out_layers\.3\.weight": 1e5},
        "embedding": {r"label_emb\.0\.0\.weight": 1e3, r"label_emb\.0\.2\.weight": 1e3},
    },
    "qwen_image": {
        "ffn": {r"img_mlp\.net\.0\.proj\.weight": 128, r"img_mlp\.net\.2\.weight": 2048},
        "residual": {r"(to_out\.0|img_mlp\.net\.2)\.weight": 1e5},
        "attention": {r"attn\.norm_[qk]\.weight": 200},
    },
    "z_image": {
        "ffn": {r"layers\.0\.feed_forward\.w[13]\.weight": 300},
        "residual": {r"(attention\.out|feed_forward\.w2)\.weight": 1, r"(attention|ffn)_norm2\.weight": 1e5},
        "attention": {r"^layers\.0\.attention\.[qk]_norm\.weight": 200},
    },
}  # fmt: skip


@dataclass
class Call:
    """The arguments ComfyUI gave the denoiser."""

    args: tuple = ()
    kwargs: dict = field(default_factory=dict)


def write_scaled(source: Path, target: Path, factors: dict[str, float], dtype: torch.dtype | None = None) -> Path:
    """A copy of a model file, in ``dtype`` if given, whose tensors that match a pattern are multiplied; every pattern must match."""
    tensors, metadata = load_file(str(source)), metadata_of(source)
    for pattern, factor in factors.items():
        names = [name for name in tensors if re.search(pattern, name)]
        if not names:
            raise KeyError(f"{pattern} matches no tensor of {source.name}")
        tensors |= {name: (tensors[name].float() * factor).to(torch.bfloat16) for name in names}
    tensors = {name: tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()}
    save_file(tensors, str(target), metadata=metadata)
    return target


def metadata_of(path: Path) -> dict[str, str] | None:
    with safe_open(str(path), "pt") as file:
        return file.metadata()


def conditioning(family: str, batch: int = 1, length: int = 16, seed: int = 1) -> list:
    """Random conditioning with what the family asks for beside the text."""
    generator = torch.Generator().manual_seed(seed)
    context = torch.randn(batch, length, CONTEXT_WIDTH.get(family, 4096), generator=generator)
    pooled = torch.randn(batch, POOLED_WIDTH.get(family, 768), generator=generator)
    extra = {"attention_mask": torch.ones(batch, length, dtype=torch.long)} if family in NEEDS_MASK else {}
    return [[context, {"pooled_output": pooled, **extra}]]


def noise(model, batch: int = 1, size: int = 8, seed: int = 2, frames: int = 1) -> torch.Tensor:
    """A seeded latent of the model's shape; ``frames`` of it where it is a video's."""
    latent = model.model.latent_format
    shape = (batch, latent.latent_channels, *([frames] if latent.latent_dimensions == 3 else []), size, size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def sample(
    model, family: str, steps: int = 4, cond: list | None = None, sampler: str = "euler", **options
) -> torch.Tensor:
    """A latent from ComfyUI's sampler."""
    import comfy.sample

    cond, start = cond or conditioning(family), noise(model, **options)
    return comfy.sample.sample(model, start, steps, 1.0, sampler, "simple", cond, cond, torch.zeros_like(start), seed=1)


def capture(model, family: str, **options) -> Call:
    """The first denoiser call of a sampler run on a clone of ``model``."""
    from comfy.patcher_extension import WrappersMP

    calls, clone = [], model.clone()

    def record(executor, *args, **kwargs):
        calls.append(Call(args[:5], kwargs))
        return executor(*args, **kwargs)

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "capture", record)
    sample(clone, family, steps=1, **options)
    return calls[0]


def replay(model, call: Call, x: torch.Tensor | None = None, **changes) -> torch.Tensor:
    """What the model subtracts from the noisy latent, fp32, for a captured call with some arguments changed."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    model.pre_run()
    x = call.args[0] if x is None else x
    try:
        return x - apply(model, call, x, **changes).float()
    finally:
        model.cleanup()


def apply(model, call: Call, x: torch.Tensor, **changes) -> torch.Tensor:
    """The clean latent that a model, loaded and prepared for a run, makes of ``x`` in a captured call."""
    names = ("t", "c_concat", "c_crossattn", "control")
    arguments = {**dict(zip(names, call.args[1:], strict=False)), **call.kwargs, **changes}
    arguments["transformer_options"] = {**_call_options(call), **transformer_options(model)}
    with torch.inference_mode():
        return model.model.apply_model(x, **arguments)


def denoise(model) -> torch.Tensor:
    """The fp32 output of one denoiser call of a Wan-shaped ``model`` (a ModelPatcher): ``(1, 16, 1, 8, 8)``.

    As in ComfyUI's sampler: the model is loaded and its wrappers are in the transformer options.
    """
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    model.pre_run()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 16, 1, 8, 8, generator=generator)
    context = torch.randn(1, 12, 4096, generator=generator)
    options = transformer_options(model)
    try:
        with torch.inference_mode():
            return model.model.apply_model(
                x, torch.tensor([0.7]), c_crossattn=context, transformer_options=options
            ).float()
    finally:
        model.cleanup()


def transformer_options(model) -> dict:
    """A model's transformer options with its wrappers and callbacks, as ComfyUI's sampler prepares them."""
    import comfy.patcher_extension

    options = model.model_options["transformer_options"].copy()
    merge = comfy.patcher_extension.merge_nested_dicts
    for name, values in (("wrappers", model.wrappers), ("callbacks", model.callbacks)):
        options[name] = merge(options.get(name, {}).copy(), values, copy_dict1=False)
    return options


def louder(call: Call, factor: float, rows: slice | int = slice(None)) -> torch.Tensor:
    """The text of a captured call, some of its batch rows multiplied."""
    text = call.kwargs.get("c_crossattn", call.args[3] if len(call.args) > 3 else None).clone()
    text[rows] *= factor
    return text


def _call_options(call: Call) -> dict:
    """What the sampler tells a model of the call, without the wrappers of the patcher it was captured from."""
    given = call.kwargs.get("transformer_options") or (call.args[5] if len(call.args) > 5 else {})
    return {key: given[key] for key in ("cond_or_uncond", "uuids", "sigmas", "sample_sigmas") if key in given}


def write(family: str, folder: Path) -> Path:
    """The family's clean model, at the width that ComfyUI gives it."""
    build = {**tiny_models.FAMILIES, **tiny_models.SLOW_FAMILIES}[family]
    return build(folder / f"{family}.safetensors")


def write_narrow(family: str, folder: Path) -> Path:
    """The family's clean model, narrower than ComfyUI has it where that is wide."""
    build = {**tiny_models.FAMILIES, **tiny_models.NARROW}[family]
    return build(folder / f"narrow_{family}.safetensors")


def files_in(folder: Path, prefix: str) -> Callable[..., Path]:
    """(family, kind) -> the file of that model, written when it is first asked for; kind None: the clean one. Wide families are narrow."""
    made: dict[tuple, Path] = {}

    def get(family: str, kind: str | None = None) -> Path:
        if (family, None) not in made:
            made[family, None] = write_narrow(family, folder)
        if (family, kind) not in made:
            target = folder / f"{prefix}_{family}_{kind}.safetensors"
            made[family, kind] = write_scaled(made[family, None], target, OVERFLOWS[family][kind])
        return made[family, kind]

    return get


def load(comfy, path: Path, storage: str = "as_file", compute: str = "fp32", rules=None):
    """The model of a file through the pack's loader node."""
    inputs = {"model_name": path.name, "storage": storage, "compute": compute, "rules": rules}
    return comfy.run("HalfsafeLoadDiffusionModel", **inputs)[0]


def stock(path: Path, dtype: torch.dtype | None = None):
    """The model of a file through ComfyUI's own loader, computing in fp32."""
    import comfy.sd

    model = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype} if dtype else {})
    model.set_model_compute_dtype(torch.float32)
    return model


def with_compute(comfy, model, compute: str, rules=None):
    return comfy.run("HalfsafeComputeDtype", model=model, compute=compute, rules=rules)[0]


def unload_models() -> None:
    """Take every model off its device."""
    import comfy.model_management

    # ComfyUI's free_memory (comfy/model_management.py, 0.30) leaves an entry that fails for every later model where a
    # collection in its midst ends a patcher that it is about to unload, and on an entry whose model and patcher are gone.
    gc.collect()
    comfy.model_management.cleanup_models()
    comfy.model_management.unload_all_models()


def report(comfy, model) -> dict:
    """The JSON of the report node, whose chart is not drawn."""
    with mock.patch.object(sys.modules[comfy.nodes["HalfsafeReport"].__module__], "chart", lambda _: NO_CHART):
        return json.loads(comfy.run("HalfsafeReport", model=model)[1])
