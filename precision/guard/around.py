"""Blame what stands around a model's calls: what a sampler's run was given, what it returned, the device it runs on."""

import math
from collections.abc import Sequence

import torch

from ..base.nested import tensors_in
from .inputs import NotFiniteInput, is_finite, rows_not_finite
from .localize import Origin
from .log import CallPosition, GuardLog, event_of
from .verdicts import ADVICE, DEVICE_FAULT, NOT_PRECISION, RECOVERED, STOPPED
from .wording import BETWEEN_CALLS, MODEL, NAN_GIVEN


def blame_inputs(log: GuardLog, inputs: Sequence[NotFiniteInput], batch: int) -> None:
    """Blame the inputs with NaN of a sampler's run of ``batch`` images.

    Raises:
        NonFinite: no image is left, or the guard is to stop.
    """
    for one in inputs:
        rows = one.nan_rows(batch)
        position = CallPosition(0, batch_rows=sorted(rows), spoils_all=len(rows | log.lost) >= batch)
        log.give_up(position, one.origin, one.verdict, one.advice, evidence=NAN_GIVEN)


def blame_between_calls(log: GuardLog, result: torch.Tensor, sigmas: torch.Tensor) -> None:
    """Blame the code between a model's calls for images with NaN or Inf of which no call failed.

    Raises:
        NonFinite: no image is left, or the guard is to stop.
    """
    bad = [] if log.given_up else [tensor for tensor in tensors_in(result) if not is_finite(tensor)]
    rows = sorted(set(rows_not_finite(bad[0])) - log.lost) if bad else []
    if rows:
        position = CallPosition(
            log.calls, len(sigmas) - 1, float(sigmas[-1]), rows, len(log.lost.union(rows)) >= len(bad[0])
        )
        origin = Origin("sampler", "", "nan", "fp32", math.nan)
        log.give_up(position, origin, NOT_PRECISION, mode="fp32", evidence=BETWEEN_CALLS)


def blame_device(log: GuardLog, position: CallPosition, device: torch.device, mode: str, detail: str) -> bool:
    """Blame a device whose test product in ``mode`` is wrong, as ``detail`` says.
    Returns whether to run all in fp32 from now on.

    Raises:
        NonFinite: the guard is to stop.
    """
    cured = log.on_nan == "retry_higher"
    origin = Origin("", "matmul", "canary", mode, math.nan)
    event = event_of(position, origin, mode, "fp32" if cured else mode, cured)
    message, advice = f"A test product on {device} is wrong.", f"{detail}. {ADVICE[DEVICE_FAULT]}"
    error = log.note(event, origin, DEVICE_FAULT, advice, message)
    if log.on_nan == "stop":
        raise error
    return cured


def blame_memory(log: GuardLog) -> None:
    """Take back that a run was cured whose sampling found no memory to run in a higher precision."""
    if log.verdict == RECOVERED:
        log.note(event_of(CallPosition(log.calls), None, "", "", False), None, STOPPED, MODEL.no_memory)
