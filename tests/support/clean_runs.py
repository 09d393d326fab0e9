"""Clean runs of every small model family in every arithmetic, under the guard's check."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from unittest.mock import patch

from support import families, rare_families, shapes, tiny_models
from support.guarding import guarded
from support.summing import accumulation

# storage, compute, device profile
ARITHMETICS = {
    "fp32": ("fp32", "fp32", "cpu"),
    "fp16_safe": ("fp16", "fp16_safe", "cpu"),
    "fp16": ("fp16", "fp16", "cpu"),
    "fp16 sums": ("fp16", "fp16", "sm_86"),
    "bf16": ("bf16", "bf16", "cpu"),
    "fp8 storage": ("fp8_e4m3fn", "bf16", "cpu"),
    "int8": ("int8", "int8", "cpu"),
    "fp8": ("fp8_e4m3fn", "fp8", "sm_89"),
}
DEEP_WAN = "wan of 24 blocks"
TRAINED = "hunyuan_video, trained"
LIKE = {DEEP_WAN: "wan", TRAINED: "hunyuan_video", "segmind_vega": "sdxl"}
COMMON = (*families.OVERFLOWS, *LIKE)
FAMILIES = (*COMMON, *rare_families.CLASSES)


def write(family: str, folder: Path) -> Path:
    """Write a family's clean model, as narrow as it can be; SDXL with all of its blocks."""
    path = folder / f"clean_{family.replace(' ', '_').replace(',', '')}.safetensors"
    own = {
        "sdxl": lambda: tiny_models.narrow_sdxl(path, shallow=False),
        "segmind_vega": lambda: tiny_models.segmind_vega(path),
        DEEP_WAN: lambda: tiny_models.wan(path, dim=128, ffn=256, blocks=24),
        TRAINED: lambda: Path(shutil.copy(shapes.MODEL, path)),
    }
    if family in own:
        return own[family]()
    return families.write_narrow(family, folder) if family in COMMON else rare_families.write(family, path)


def checked(comfy, family: str, path: Path, arithmetic: str, steps: int = 1):
    """Run a family's model under the check of the first and every fifth step, and return it."""
    storage, compute, profile = ARITHMETICS[arithmetic]
    with patch.dict(os.environ, HALFSAFE_DEVICE_PROFILE=profile):
        plain = families.load(comfy, path, storage, compute)
        plain = accumulation(comfy, plain, fp16_accumulation="on") if arithmetic == "fp16 sums" else plain
        model = guarded(comfy, plain, check="every 5th step")
        if family == TRAINED:
            families.sample(model, LIKE[family], steps, shapes.conditioning(path.parent), size=shapes.SIZE // 8)
        elif family in COMMON:
            families.sample(model, LIKE.get(family, family), steps)
        else:
            rare_families.sample(model, family, steps)
    return model
