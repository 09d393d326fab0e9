"""Tell how far a finite call is from the same call in fp32, whether that is more than its arithmetic explains,
and which blocks are the farthest.

Nothing here runs a model. Errors are powers, sums of squares: those of independent roundings add up.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Final

import torch

from ..base import amax
from ..base.modes import FP16_ACC16, FP16_SCALED, FP16_WIDE
from ..base.nested import floats_in
from ..report.schema import BlockDrift, CheckReport, GuardEvent

CHECKS = ("off", "first step", "every 5th step")
EVERY = {"first step": 0, "every 5th step": 5}
SAMPLES = 4096
WORST_BLOCKS = 3
KIND: Final = "drift"
THRESHOLDS: dict[str, float] = {
    "fp32": 50.0,
    "fp16_safe": 50.0,
    "fp16": 48.0,
    "fp16 sums": 36.0,
    "bf16": 33.0,
    "int8": 30.0,
    "fp8": 20.0,
    "4-bit products": 10.0,
    "step cache": 8.0,
}
"""Arithmetic, finest first -> SNR in dB below which a model of ``USUAL_LAYERS`` is said to drift: about 7 below the
worst of clean runs (docs/internals/drift.md). An fp32 model may multiply in TF32. 4-bit products are not measured."""
USUAL_LAYERS = 32
LOWEST_DB = -300.0
STEP_CACHE = "step cache"
ARITHMETIC_OF: dict[str, str] = {
    FP16_WIDE.name: "fp16_safe", FP16_SCALED.name: "fp16_safe", FP16_ACC16.name: "fp16 sums",
}  # fmt: skip
ADVICE = {
    STEP_CACHE: (
        "The layers did not run at this step: lower the threshold of the step cache, let it start later, "
        "or leave it out."
    ),
    "fp8": (
        "Compute Dtype with fp8 scales activations as they come and clips none; "
        "else the rule {block}* compute=bf16."
    ),
    "int8": (
        "The rule {block}* compute=bf16 (or fp16) dequantizes it; if every int8 layer is wrong, "
        "it is the device's kernel: set compute to bf16, fp16 or fp16_safe."
    ),
    "fp16 sums": "Set fp16_accumulation to auto or off in Accumulation, or the rule {block}* accumulation=fp32.",
}  # fmt: skip
OTHERWISE = (
    "Compute Dtype with fp32 tells whether it is precision, then fp16_safe or the rule {block}* compute=fp32 cures it. "
    "Else leave out what other nodes put on the model, attention kernels and LoRAs in 8-bit weights first; "
    "what is left is a kernel that is wrong on this device: update comfy-kitchen."
)


def may_be_checked(setting: str, seen: Collection[int]) -> bool:
    """Tell whether a call that is still to come may be checked, which its step would tell. ``seen``: as for
    :func:`is_checked`."""
    return EVERY[setting] > 0 or not seen


def is_checked(setting: str, step: int, seen: Collection[int]) -> bool:
    """Tell whether to check a call of a step. ``seen``: the steps that were checked in this run of the sampler."""
    if step in seen:
        return False
    every = EVERY[setting]
    return step % every == 0 if every else step == 0


def coarsest(arithmetics: Iterable[str]) -> str:
    """Return the arithmetic of a model: the one among its layers' that is expected to be the farthest from fp32."""
    finest_first = list(THRESHOLDS)
    return max((name for name in arithmetics if name in THRESHOLDS), key=finest_first.index, default="fp32")


def threshold_of(arithmetic: str, layers: int) -> float:
    """Return the least SNR in dB of a clean model with so many layers: the powers of their roundings add up."""
    depth = 0.0 if arithmetic == STEP_CACHE else 10 * math.log10(max(1.0, layers / USUAL_LAYERS))
    return round(THRESHOLDS[arithmetic] - depth, 1)


def sampled(values) -> torch.Tensor | None:
    """Take at most ``SAMPLES`` evenly spread numbers of each floating tensor, in fp32; None where there is none."""
    floats = [tensor.detach().flatten() for tensor in floats_in(values) if tensor.numel()]
    taken = [flat[:: -(-flat.numel() // SAMPLES)].float() for flat in floats]
    return torch.cat([part.clone() for part in taken]) if taken else None


def row_errors(
    result: torch.Tensor, reference: torch.Tensor, without: torch.Tensor
) -> tuple[list[float], list[float]]:
    """Compute (power of the error, power of the signal) of each row of a batch, against a reference.

    The signal is what the network adds to the result: its difference from the result ``without``, that of a network
    which gives zeros. A sampler's parametrization is linear in what the network gives (EDM, v, noise, flow, x0), so
    that the ratio of both is the network's own, however much of the noisy latent the result holds.
    """
    return _powers(result.float() - reference), _powers(reference - without)


def _powers(tensor: torch.Tensor) -> list[float]:
    return torch.linalg.vector_norm(tensor.float().flatten(1), dim=1).square().tolist()


def finite_decibels(error: float, signal: float) -> float:
    """Compute the SNR of two powers: inf without an error, and never below ``LOWEST_DB``, as JSON has no -inf."""
    return max(LOWEST_DB, amax.decibels(error, signal))


def worst_blocks(
    samples: Mapping[str, list[torch.Tensor]], reference: Mapping[str, list[torch.Tensor]]
) -> list[BlockDrift]:
    """Find the blocks whose results are the farthest from the reference's, the worst first."""
    found: dict[str, float] = {}
    for name, taken in samples.items():
        exact = reference.get(name, [])
        if [part.shape for part in taken] == [part.shape for part in exact]:
            error, signal = torch.cat(taken) - torch.cat(exact), torch.cat(exact)
            found[name] = finite_decibels(error.square().sum().item(), signal.square().sum().item())
    return [BlockDrift(name, found[name]) for name in sorted(found, key=lambda name: found[name])[:WORST_BLOCKS]]


def drift_event(check: CheckReport, snr_db: float, threshold_db: float, batch_rows: list[int]) -> GuardEvent:
    """Build the report's entry for a call that is farther from fp32 than its arithmetic explains."""
    skipped = check.arithmetic == STEP_CACHE
    worst = "" if skipped or not check.blocks else check.blocks[0].name
    evidence = (
        f"{snr_db:.1f} dB from the same call in fp32, "
        f"where {check.arithmetic} gives at least {threshold_db:.0f}."
    )
    if worst:
        blocks = ", ".join(f"{block.name} {block.snr_db:.1f} dB" for block in check.blocks)
        evidence += f" Farthest: {blocks}."
    advice = ADVICE.get(check.arithmetic, OTHERWISE).format(block=f"{worst}." if worst else "")
    return GuardEvent(
        check.call, check.step, check.sigma, worst, STEP_CACHE if skipped else "", KIND, batch_rows, check.arithmetic,
        "fp32", False, evidence, snr_db, threshold_db, advice,
    )  # fmt: skip


def drift_sentence(event: GuardEvent) -> str:
    """Describe a drift event in one line."""
    return f"Step {event.step}, sigma {event.sigma:.4g}: finite, but off ({event.from_mode}). {event.evidence}"
