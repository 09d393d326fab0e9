"""Tell how far a finite call is from the same call in fp32, whether that is more than its arithmetic explains,
and what adds most.

Nothing here runs a model. Errors are powers, sums of squares: those of independent roundings add up.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.overrides import TorchFunctionMode

from .. import snr
from ..modes import FP16_ACC16, FP16_SCALED, FP16_WIDE
from ..nested import PLAIN, floats_in
from ..report.schema import BlockDrift, CheckReport, GuardEvent
from .log import CallPosition

CHECKS = ("off", "first step", "every 5th step")
EVERY = {"first step": 0, "every 5th step": 5}
SAMPLES = 4096
WORST_BLOCKS = 3
KIND = "drift"
THRESHOLDS = {
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
worst of clean runs (docs/drift.md). An fp32 model may multiply in TF32. 4-bit products are not measured."""
USUAL_LAYERS = 32
LOWEST_DB = -300.0
DROWNED_DB = 6.0
"""What LoRAs merged into 8-bit weights change is at least so much larger than what the rounding
of those weights changes."""
ARITHMETIC_OF = {FP16_WIDE.name: "fp16_safe", FP16_SCALED.name: "fp16_safe", FP16_ACC16.name: "fp16 sums"}
CAST_METHODS = (torch.Tensor.half, torch.Tensor.bfloat16)
NARROW = (torch.float16, torch.bfloat16)

ATTENTION, BETWEEN, OUTSIDE, WEIGHT, STEP_CACHE, ONCE, NOT_FOUND = (
    "attention", "values between layers", "positions, timesteps and values between blocks",
    "weight quantized anew with its LoRA", "step cache", "not the same when repeated", "cause not found",
)  # fmt: skip
NOT_ADDITIVE = "What its parts add one by one is not what they add together."
ADDITIVE = 4
"""Errors add up where a unit alone makes at least one in so many parts of what was left for it."""
ADVICE = {
    ATTENTION: (
        "Leave that attention out (the override of another node, or --use-sage-attention and the like), "
        "or give Compute Dtype the rule {layer} attention=fp32."
    ),
    BETWEEN: (
        "Norms, positions or what is added between the layers lose it: Compute Dtype with fp16_safe or fp32, "
        "or the rule {layer}.* stream=fp32."
    ),
    OUTSIDE: (
        "Positions (rope), timesteps or the values handed from block to block are rounded: "
        "Compute Dtype with fp16_safe or fp32 keeps them in fp32."
    ),
    WEIGHT: (
        "The LoRA is lost where the weight is rounded to 8 bits again: "
        "load the model with Load Diffusion Model (Halfsafe), which adds it beside the weight, or with storage bf16."
    ),
    STEP_CACHE: (
        "The layers did not run at this step: lower the threshold of the step cache, let it start later, "
        "or leave it out."
    ),
    NOT_FOUND: (
        "Compute Dtype with fp32 tells whether it is precision; "
        "leave out what other nodes patch into the model, one by one."
    ),
    ONCE: (
        "The same call in the same arithmetic is closer when it is repeated: leave torch.compile out, "
        "or look at the device, its driver and overclocking."
    ),
    "fp8": (
        "Compute Dtype with fp8 scales activations as they come and clips none; "
        "else the rule {layer} compute=bf16."
    ),
    "int8": (
        "The rule {layer} compute=bf16 (or fp16) dequantizes it; if every int8 layer is wrong, "
        "it is the device's kernel: set compute to bf16, fp16 or fp16_safe."
    ),
    "fp16 sums": (
        "Set fp16_accumulation to auto or off in Accumulation, or the rule {layer} accumulation=fp32."
    ),
}  # fmt: skip
OTHERWISE = "Compute Dtype with fp16_safe or fp32, or the rule {layer} compute=fp32."


@dataclass(frozen=True)
class Cause:
    """What adds most to a call's error.

    Args:
        layer: the layer, or the block where it is between layers; empty where it is outside of all blocks.
        op: what in it: attention, a product, a weight ...
        mode: what it runs in.
        share: of the call's error, which it makes alone.
        why: it was not found.
    """

    layer: str
    op: str
    mode: str
    share: float = 1.0
    why: str = ""

    @property
    def advice(self) -> str:
        """What to do."""
        known = next((text for name, text in ADVICE.items() if self.op.startswith(name)), None)
        return (known or ADVICE.get(arithmetic_named(self.mode), OTHERWISE)).format(layer=self.layer)


class CastsToFp32(TorchFunctionMode):
    """While it is on, what model code casts to fp16 or bf16, or makes in them, is fp32: positions, timesteps, masks.

    Tensor classes of others, as of quantized weights, are left alone, and so is ``view``, which reads bits anew.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.view or any(kind not in PLAIN for kind in types):
            return func(*args, **kwargs)
        if func in CAST_METHODS:
            return args[0].float()
        return func(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value):
    return torch.float32 if isinstance(value, torch.dtype) and value in NARROW else value


def is_checked(check: str, step: int, seen: Collection[int]) -> bool:
    """Tell whether to check a call of a step. ``seen``: the steps that were checked in this run of the sampler."""
    if step in seen:
        return False
    every = EVERY[check]
    return step % every == 0 if every else step == 0


def arithmetic_named(mode: str) -> str:
    """Name the arithmetic of a layer's mode, as ``THRESHOLDS`` does."""
    return ARITHMETIC_OF.get(mode, mode)


def coarsest(arithmetics: Iterable[str]) -> str:
    """Return the arithmetic of a model: the one among its layers' that is expected to be the farthest from fp32."""
    finest_first = list(THRESHOLDS)
    return max((name for name in arithmetics if name in THRESHOLDS), key=finest_first.index, default="fp32")


def threshold_of(arithmetic: str, layers: int) -> float:
    """Return the SNR in dB that a clean model with so many layers has at least:
    the powers of their roundings add up."""
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


def decibels(error: float, signal: float) -> float:
    """Compute the SNR of two powers: inf without an error, and never below ``LOWEST_DB``, as JSON has no -inf."""
    return max(LOWEST_DB, snr.decibels(error, signal))


def worst_blocks(
    samples: Mapping[str, list[torch.Tensor]], reference: Mapping[str, list[torch.Tensor]]
) -> list[BlockDrift]:
    """Find the blocks whose results are the farthest from the reference's, the worst first."""
    found = [
        BlockDrift(name, _sample_db(taken, reference[name])) for name, taken in samples.items() if name in reference
    ]
    return sorted((block for block in found if block.snr_db is not None), key=lambda block: block.snr_db)[:WORST_BLOCKS]


def _sample_db(taken: list[torch.Tensor], reference: list[torch.Tensor]) -> float | None:
    if [part.shape for part in taken] != [part.shape for part in reference]:
        return None
    result, exact = torch.cat(taken), torch.cat(reference)
    return decibels((result - exact).square().sum().item(), exact.square().sum().item())


def largest_by_halves(
    units: Sequence[str], error: Callable[[frozenset[str]], float], whole: float
) -> tuple[str, float]:
    """Find the unit that adds most to an error, in log2 calls of ``error``: (unit, the error it makes alone).

    The unit is empty where errors do not add up: where what was left for the last one is not what it makes alone.

    Args:
        error: the error where only these units keep their own arithmetic and all others are exact.
        whole: the error where all of them do.
    """
    measured = True
    while len(units) > 1:
        first, second = units[: len(units) // 2], units[len(units) // 2 :]
        found = error(frozenset(first))
        measured = found >= whole / 2
        units, whole = (first, found) if measured else (second, whole - found)
    alone = whole if measured else error(frozenset(units))
    return units[0] if alone >= whole / ADDITIVE else "", alone


def drift_event(check: CheckReport, position: CallPosition, cause: Cause, snr: float, threshold: float) -> GuardEvent:
    """Build the report's entry for a call that is farther from fp32 than its arithmetic explains,
    or that lost its LoRA."""
    if cause.op == WEIGHT and threshold == DROWNED_DB:
        evidence = (
            f"What the LoRAs change is {snr:.1f} dB above what the rounding of their weights changes, "
            f"at least {threshold:.0f} expected."
        )
    else:
        evidence = f"{snr:.1f} dB from the same call in fp32, where {check.arithmetic} gives at least {threshold:.0f}."
    share = f" {cause.why}" if cause.why else f" Alone it makes {min(cause.share, 1.0):.0%} of the error."
    share = "" if cause.op in (STEP_CACHE, ONCE) else share
    return GuardEvent(
        position.call, position.step, position.sigma, cause.layer, cause.op, KIND, position.batch_rows, cause.mode,
        "fp32", False, evidence + share, snr, threshold, cause.advice,
    )  # fmt: skip


def drift_sentence(event: GuardEvent) -> str:
    """Describe a drift event in one line."""
    where = " in ".join(filter(None, [event.op, event.layer]))
    mode = f" ({event.from_mode})" if event.from_mode else ""
    return f"Step {event.step}, sigma {event.sigma:.4g}: finite, but off: {where}{mode} adds most. {event.evidence}"
