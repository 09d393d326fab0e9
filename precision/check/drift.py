"""Compute the SNR of a finite call against the same call in fp32, compare it with the threshold of its arithmetic, and
find the blocks with the largest error.

Nothing here runs a model. Errors are powers (sums of squares), because the powers of independent rounding errors add
up.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..base import amax
from ..base.message import Message, joined
from ..base.modes import FP16_ACC16, FP16_SCALED, FP16_WIDE, label_of
from ..base.nested import floats_in
from ..report.schema import CheckReport, GuardEvent

CHECKS = ("off", "first step", "every 5th step")
EVERY = {"first step": 0, "every 5th step": 5}
SAMPLES = 4096
WORST_BLOCKS = 3
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
"""Arithmetic, finest first -> SNR in dB below which a model of ``USUAL_LAYERS`` layers is reported as drift: about 7 dB
below the worst clean run (docs/internals/drift.md). An fp32 model may multiply in TF32. 4-bit products are not
measured."""
USUAL_LAYERS = 32
LOWEST_DB = -300.0
STEP_CACHE = "step cache"
ARITHMETIC_OF: dict[str, str] = {
    FP16_WIDE.name: "fp16_safe", FP16_SCALED.name: "fp16_safe", FP16_ACC16.name: "fp16 sums",
}  # fmt: skip
ADVICE = {
    STEP_CACHE: (
        "The layers did not run at this step: lower the threshold of the step cache, start it later, or remove it."
    ),
    "fp8": (
        "Set compute to fp8 in Compute Dtype: it computes the scale of activations that do not fit the file's scale. "
        "Or add the rule {block}* compute=bf16."
    ),
    "int8": "Add the rule {block}* compute=bf16 (or fp16), which dequantizes this block.",
    "fp16 sums": "Set fp16_accumulation to auto or off in Accumulation, or the rule {block}* accumulation=fp32.",
}  # fmt: skip
IF_ALL_INT8 = (
    "If every int8 layer is wrong, the device's int8 kernel is at fault: set compute to bf16, fp16 or fp16_safe."
)
MAY_BE_ATTENTION = "{0} attention quantizes its operands and may be the cause: compare a run without it."
OTHERWISE = (
    "Compute Dtype with fp32 shows whether precision is the cause; then fp16_safe or the rule {block}* compute=fp32 "
    "cures it. Otherwise remove patches of other nodes from the model, attention kernels and LoRAs on 8-bit weights "
    "first. If it remains, a kernel is wrong on this device: update comfy-kitchen."
)

LINES = dict.fromkeys((ADVICE[STEP_CACHE], ADVICE["fp8"], OTHERWISE), "")
"""As ``LINES`` of ``precision/guard/verdicts.py``."""
RUN_IN_FP32 = "Set compute to fp32 in Compute Dtype for one run: NaN Guard then names the layer and the cause."


def is_checked(setting: str, step: int | None, seen: Collection[int]) -> bool:
    """True if a call of this step is to be checked; of step None, which is not known yet, if it may be.

    ``seen``: steps already checked in this sampler run.
    """
    every = EVERY[setting]
    if step is None:
        return every > 0 or not seen
    if step in seen:
        return False
    return step % every == 0 if every else step == 0


def coarsest(arithmetics: Iterable[str]) -> str:
    """Return the arithmetic of a model: of its layers' arithmetics, the one with the lowest threshold."""
    finest_first = list(THRESHOLDS)
    return max((name for name in arithmetics if name in THRESHOLDS), key=finest_first.index, default="fp32")


def threshold_of(arithmetic: str, layers: int) -> float:
    """Return the lowest SNR in dB of a clean model with this number of layers; the powers of rounding errors add up."""
    depth = 0.0 if arithmetic == STEP_CACHE else 10 * math.log10(max(1.0, layers / USUAL_LAYERS))
    return round(THRESHOLDS[arithmetic] - depth, 1)


def sampled(values) -> torch.Tensor | None:
    """Take at most ``SAMPLES`` evenly spaced numbers of each floating tensor, in fp32; None without floating
    tensors."""
    flats = [amax.floats(tensor.detach()).flatten() for tensor in floats_in(values) if tensor.numel()]
    taken = [flat[:: -(-flat.numel() // SAMPLES)].float() for flat in flats]
    return torch.cat(taken) if taken else None


def row_decibels(result: torch.Tensor, reference: torch.Tensor, without: torch.Tensor) -> list[float]:
    """Compute the SNR in dB of each row of a batch against a reference, at least ``LOWEST_DB``.

    The signal is the network's contribution to the result: the difference from the result ``without``, computed from a
    network output of zeros. A sampler's parametrization is linear in the network output (EDM, v, noise, flow, x0), so
    the ratio of both powers is the network's own, however much of the noisy latent the result contains.
    """
    wide = torch.promote_types(result.dtype, torch.float32)
    errors, signals = _powers(result.to(wide) - reference), _powers(reference - without)
    return [_finite_decibels(*row) for row in zip(errors, signals, strict=True)]


def _powers(tensor: torch.Tensor) -> list[float]:
    return torch.linalg.vector_norm(tensor.float().flatten(1), dim=1).square().tolist()


def _finite_decibels(error: float, signal: float) -> float:
    """Compute the SNR in dB of two powers: inf without an error, and at least ``LOWEST_DB``, because JSON has no
    -inf."""
    return max(LOWEST_DB, amax.decibels(error, signal))


def worst_blocks(
    samples: Mapping[str, list[torch.Tensor]], reference: Mapping[str, list[torch.Tensor]]
) -> list[dict[str, Any]]:
    """Find the blocks with the lowest SNR against the reference, worst first: ``name`` and ``snr_db`` of each."""
    found: dict[str, float] = {}
    for name, taken in samples.items():
        exact = reference.get(name, [])
        if [part.shape for part in taken] == [part.shape for part in exact]:
            error, signal = torch.cat(taken) - torch.cat(exact), torch.cat(exact)
            found[name] = _finite_decibels(error.square().sum().item(), signal.square().sum().item())
    return [{"name": name, "snr_db": found[name]} for name in sorted(found, key=found.__getitem__)[:WORST_BLOCKS]]


def drift_event(
    check: CheckReport,
    snr_db: float,
    threshold_db: float,
    batch_rows: list[int],
    attention: str = "",
    instead: str = "",
) -> GuardEvent:
    """Build the report's entry for a call whose SNR is below the threshold of its arithmetic.

    ``attention``: the quantized attention that was chosen for the model, a candidate for the cause; ``instead``: how to
    choose another.
    """
    skipped = check.arithmetic == STEP_CACHE
    worst = "" if skipped or not check.blocks else check.blocks[0]["name"]
    figures = f"{snr_db:.1f}", check.arithmetic, f"{threshold_db:.0f}"
    evidence: str = Message("{0} dB from the same call in fp32; {1} gives at least {2}.", *figures)
    if worst:
        blocks = ", ".join(f"{block['name']} {block['snr_db']:.1f} dB" for block in check.blocks)
        evidence = joined([evidence, Message("Farthest: {0}.", blocks)])
    if attention:
        evidence = joined([evidence, Message(MAY_BE_ATTENTION, attention), instead])
    own = Message(ADVICE.get(check.arithmetic, OTHERWISE), block=f"{worst}." if worst else "")
    advice = joined([own, IF_ALL_INT8 if check.arithmetic == "int8" else ""])
    brief = Message("Step {0}: finite, but off ({1}). {2}", check.step, label_of(check.arithmetic), evidence)
    return GuardEvent(
        check.call, check.step, check.sigma, worst, STEP_CACHE if skipped else "", "drift", batch_rows,
        check.arithmetic, "fp32", False, evidence, snr_db, threshold_db, advice, brief=brief,
    )  # fmt: skip
