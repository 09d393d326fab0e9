"""NaN planted where a run takes it from: a weight, a LoRA, a conditioning, one product of one call; in families whose own code hides NaN in fp16 and in some that do not."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from support import families, tiny_models


class Family(NamedTuple):
    """``write``: writes the clean model; ``layer``: a product in front of the code that hides NaN; ``text``: width of the text, and what is beside it."""

    write: object
    layer: str
    text: int
    pooled: int = 0
    masked: bool = False


HIDING = {
    "flux": Family(tiny_models.flux, "double_blocks.0.txt_mlp.2", 4096, 768),
    "chroma": Family(tiny_models.chroma, "double_blocks.1.txt_mlp.2", 4096),
    "hunyuan_video": Family(tiny_models.hunyuan_video, "double_blocks.0.txt_mlp.2", 4096, 768),
    "lumina2": Family(
        functools.partial(tiny_models.lumina2, refiners=1), "layers.1.feed_forward.w2", 2304, masked=True
    ),
    "z_image": Family(tiny_models.narrow_z_image, "layers.1.feed_forward.w2", 2560, masked=True),
}
PLAIN = {
    "wan": Family(tiny_models.wan, "blocks.0.ffn.2", 4096),
    "sd15": Family(tiny_models.narrow_sd15, "middle_block.1.transformer_blocks.0.ff.net.2", 768),
}
FAMILIES = HIDING | PLAIN


def write(family: str, folder: Path) -> Path:
    return FAMILIES[family].write(folder / f"plant_{family}.safetensors")


def conditioning(family: str, batch: int = 1, seed: int = 1) -> list:
    found, generator = FAMILIES[family], torch.Generator().manual_seed(seed)
    text = torch.randn(batch, 16, found.text, generator=generator)
    extra = {"attention_mask": torch.ones(batch, 16, dtype=torch.long)} if found.masked else {}
    extra |= {"pooled_output": torch.randn(batch, found.pooled, generator=generator)} if found.pooled else {}
    return [[text, extra]]


def sample(model, family: str, positive: list | None = None, batch: int = 1, steps: int = 2) -> torch.Tensor:
    """A latent from ComfyUI's sampler, with a negative conditioning too."""
    import comfy.sample

    start = families.noise(model, batch)
    positive, negative = positive or conditioning(family, batch), conditioning(family, batch, seed=9)
    return comfy.sample.sample(
        model, start, steps, 3.0, "euler", "simple", positive, negative, torch.zeros_like(start), seed=1
    )


def nan_text(family: str, batch: int = 1, row: int = 0) -> list:
    """A positive conditioning with one NaN."""
    cond = conditioning(family, batch)
    cond[0][0][row, 3, 5] = math.nan
    return cond


def nan_lora(model, family: str):
    """A clone with a LoRA of a NaN."""
    clone, name = model.clone(), f"diffusion_model.{FAMILIES[family].layer}.weight"
    delta = torch.zeros(model.model_state_dict()[name].shape)
    delta.view(-1)[0] = math.nan
    clone.add_patches({name: ("diff", (delta,))}, 1.0)
    return clone


def weight_of(model, family: str) -> torch.Tensor:
    """The numbers of the family's layer in memory, as this patcher has them: ComfyUI leaves the LoRA that another patcher of the model
    merged until the model is loaded again, and would put its own copy of the weight back over what is planted."""
    import comfy.model_management

    comfy.model_management.load_models_gpu([model])
    return model.model.diffusion_model.get_submodule(FAMILIES[family].layer).weight.data


@contextlib.contextmanager
def nan_weight(model, family: str, value: float = math.nan) -> Iterator[None]:
    """A NaN in the first element of a weight in memory."""
    weight = weight_of(model, family).view(-1)
    before = weight[0].clone()
    weight[0] = value
    try:
        yield
    finally:
        weight[0] = before


@contextlib.contextmanager
def loud_weights(model, family: str) -> Iterator[None]:
    """A layer whose product passes fp16's range, in front of the code that clamps it."""
    weight = weight_of(model, family)
    before = weight.clone()
    weight *= 3e4 / float(weight.abs().amax())
    try:
        yield
    finally:
        weight.copy_(before)


@contextlib.contextmanager
def fault(model, layer: str, value: float = math.nan) -> Iterator[None]:
    """One number of the first result of a layer, and of that alone, is NaN, as of a device that fails once."""
    left = [value]

    def spoil(module, args, result):
        if left:
            result = result.clone()
            result.view(-1)[0] = left.pop()
        return result

    handle = model.model.diffusion_model.get_submodule(layer).register_forward_hook(spoil)
    try:
        yield
    finally:
        handle.remove()
