"""Models that overflow fp16, under the guard in each storage and compute: how far they are from fp32, and the verdict."""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from unittest.mock import patch

from support import rare_families
from support.families import load
from support.guarding import guarded, report_of
from support.measures import relative_error

# storage, compute, device profile
WAYS = {
    "fp16": ("fp16", "fp16", "cpu"),
    "bf16": ("as_file", "bf16", "cpu"),
    "fp16_safe": ("as_file", "fp16_safe", "cpu"),
    "fp8 storage, fp16_safe": ("fp8_e4m3fn", "fp16_safe", "cpu"),
    "fp8": ("fp8_e4m3fn", "fp8", "sm_89"),
    "int8 storage, fp16_safe": ("int8", "fp16_safe", "cpu"),
    "int8": ("int8", "int8", "cpu"),
}


def found(comfy, family: str, path: Path, ways=tuple(WAYS), steps: int = 2, texts: int = 1) -> dict[str, tuple[float, str]]:
    """Way -> (the final latent's relative error against fp32 with the weights of the file, the median of so many texts; the guard's verdict on the first)."""
    conds = [rare_families.conditioning(family, seed=seed + 1) for seed in range(texts)]
    exact = load(comfy, path, "fp32", "fp32")
    references = [rare_families.sample(exact, family, steps, cond) for cond in conds]
    return {way: _found(comfy, family, path, way, steps, conds, references) for way in ways}


def _found(comfy, family: str, path: Path, way: str, steps: int, conds: list, references: list) -> tuple[float, str]:
    storage, compute, profile = WAYS[way]
    with patch.dict(os.environ, HALFSAFE_DEVICE_PROFILE=profile):
        model = guarded(comfy, load(comfy, path, storage, compute))
        first = rare_families.sample(model, family, steps, conds[0])
        verdict = report_of(model).verdict
        results = [first, *(rare_families.sample(model, family, steps, cond) for cond in conds[1:])]
    return median(map(relative_error, references, results)), verdict
