"""Narrow models of families whose width ComfyUI fixes, for tests of many runs; `tiny_models` has them at their real width.

They have the layers, ranks and conditioning of those. ComfyUI builds them while `small_sizes` is in effect.
"""

from __future__ import annotations

from pathlib import Path

import torch
from support.small_sizes import metadata
from support.tiny_models import _on_meta, _save, _shapes_of, _unet, sdxl_unet_config, z_image_config


def sdxl(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0, shallow: bool = True) -> Path:
    """Write an SDXL UNet 64 channels wide instead of 320, with one head instead of five; ``shallow``: 2 blocks where it has 10."""
    config = sdxl_unet_config()
    sizes = {"model_channels": 64} | ({"transformer_depth": [0, 0, 1, 1, 2, 2]} if shallow else {})
    return _save(path, _shapes_of(_unet(config | sizes)), dtype, seed, metadata=metadata(sizes, {key: config[key] for key in sizes}))


def qwen_image(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a Qwen-Image model with 2 heads instead of 24."""
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    sizes = {"num_attention_heads": 2}
    model = _on_meta(QwenImageTransformer2DModel, in_channels=64, num_layers=1, **sizes)
    return _save(path, _shapes_of(model), dtype, seed, metadata=metadata(sizes))


def z_image(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a Z-Image model with 2 heads instead of 30."""
    from comfy.ldm.lumina.model import NextDiT

    sizes = z_image_config(heads=2)
    return _save(path, _shapes_of(_on_meta(NextDiT, **sizes)), dtype, seed, metadata=metadata(sizes, {"dim": 3840}))


def krea2(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a Krea 2 model with 2 heads of 128 channels instead of 48, and a text width of 128 in 2 layers."""
    from comfy.ldm.krea2.model import SingleStreamDiT

    sizes = {"txtheads": 1, "txtkvheads": 1, "multiplier": 1}
    model = _on_meta(SingleStreamDiT, features=256, txtdim=128, heads=2, kvheads=1, layers=2, txtlayers=2, **sizes)
    return _save(path, _shapes_of(model), dtype, seed, metadata=metadata(sizes))


FAMILIES = {"sdxl": sdxl, "qwen_image": qwen_image, "z_image": z_image}
