"""Compare attentions of quantized operands with fp32 unasked: once for a model, a kernel and a
size."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict

import comfy.ldm.modules.attention
import torch

from ....precision.base.message import Message
from ....precision.check import attention as checked
from ....precision.guard.log import GuardLog
from ....precision.report.report_text import check_text
from ....precision.report.schema import CheckReport, GuardEvent
from ..comfyui.attributes import OVERRIDE, kernel_of_file
from ..comfyui.execution import is_compiled, is_oom
from ..comfyui.layers import modules_of
from ..compute.attention import (
    ATTENTIONS,
    QUANTIZED,
    function_name,
    how_to_choose_another,
    kernels_of,
)
from ..guard.escalation import Guarded
from ..load.devices import current_device
from ..replay.call import Call
from ..replay.interceptor import Run
from ..replay.model_compiler import compiler_off

logger = logging.getLogger("halfsafe")
ARITHMETIC = "{0} attention"
OFF = "{0} attention is {1} dB from the same attention in fp32, with {2} tokens: an error of {3} % of its result."
BRIEF = "Step {0}: finite, but off. {1}"
IN_4_BITS = "attention3_sage"
"""ComfyUI's function of SageAttention 3, which multiplies in fp4."""
NO_MEMORY = "Not enough memory to compare the attention with fp32."


class UnaskedChecks:
    """The checks of a guard whose ``check`` is off: of attentions of quantized operands, on AMD, or
    with many tokens.

    ``always``: on each device and for any number of tokens.
    """

    def __init__(self, always: bool):
        self._always = always
        self._seen: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, bool | None]] = weakref.WeakKeyDictionary()

    @staticmethod
    def are_of_file(model: torch.nn.Module, options: dict) -> bool:
        """True if attentions of a model run the kernels that its file requests, which they do only
        without an override (``wrap_attn`` in comfy/ldm/modules/attention.py, ComfyUI 0.38)."""
        return OVERRIDE not in options and any(map(kernel_of_file, modules_of(model).values()))

    def __call__(self, call: Call, number: int, guarded: Guarded, log: GuardLog) -> _AttentionCheck | None:
        """Return the check of the next call; None if its attention quantizes nothing, or was
        checked."""
        chosen = call.options.get(OVERRIDE)
        attention = chosen or comfy.ldm.modules.attention.optimized_attention
        kernel = function_name(attention, overrides=bool(chosen))
        if kernel not in QUANTIZED:
            return None
        seen, setting = self._seen.setdefault(call.model, {}), (kernel, tuple(call.x.shape))
        is_right = seen.get(setting)
        if is_right or (is_right is False and log.checked):  # what is wrong is told in each run
            return None
        seen[setting] = True
        if self.are_of_file(call.model, call.options) or is_compiled(call.model.current_patcher):
            return None
        least = 0 if self._always or current_device().profile.vendor == "amd" else checked.MANY_TOKENS
        log.checked.add(call.step())
        return _AttentionCheck(call, number, log, kernel, least, functools.partial(seen.__setitem__, setting))


class _AttentionCheck:
    """Comparison of the attentions of one call, each with itself in fp32; used as ``_DriftCheck``
    is."""

    def __init__(
        self, call: Call, number: int, log: GuardLog, kernel: str, least: int, found: Callable[[bool | None], None]
    ):
        self.call = call
        self.log = log
        self.name = ATTENTIONS[kernel]
        self.instead = how_to_choose_another(self.name, call.options)
        self.least = least
        self.found = found
        arithmetic = Message(ARITHMETIC, self.name)
        self.least_db = checked.LEAST_DB_OF_4_BITS if kernel == IN_4_BITS else checked.LEAST_DB
        self.report = CheckReport(number, call.step(), call.sigma(), arithmetic, threshold_db=self.least_db)
        self.powers: list[torch.Tensor] = []
        self.tokens: list[int] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Compare the attentions that run."""
        options = self.call.options
        previous = options.get(OVERRIDE)

        def override(function, *args, **kwargs):
            attention = function if previous is None else functools.partial(previous, function)
            return self._compared(function, attention, *args, **kwargs)

        if previous is not None:
            vars(override)["__wrapped__"] = previous  # whose code it is (``compute/borders.py``)
        self.call.options = {**options, OVERRIDE: override}
        try:
            with compiler_off:  # it may record the call in a CUDA graph
                yield
        except BaseException:  # an error of the call or an interrupt: nothing is compared
            self.leave_out()
            raise
        finally:
            self.call.options = options

    def compare(self, run: Run, result: torch.Tensor) -> None:
        """Log the attention that is farthest from fp32, and an event if it is too far."""
        found = checked.farthest(torch.stack(self.powers).tolist(), self.tokens) if self.powers else None
        if found:
            self.report.snr_db, self.report.left_out = found[0], ""
        elif self.report.left_out:
            self.found(None)  # it failed for lack of memory, which another run may have
        else:
            return  # none ran: there are fewer tokens, or Halfsafe computes the attention in fp32
        self.log.checks.append(self.report)
        logger.info("Halfsafe check: %s", check_text(asdict(self.report)))
        if found and found[0] < self.least_db:
            event = self._event(*found)
            self.log.note_drift(event)
            self.found(False)

    def _event(self, snr_db: float, tokens: int) -> GuardEvent:
        share = f"{100 * 10 ** (-snr_db / 20):.0f}"
        evidence = Message(OFF, self.name, f"{snr_db:.1f}", f"{tokens:,}", share)
        given, brief = self.report, Message(BRIEF, self.report.step, evidence)
        return GuardEvent(
            given.call, given.step, given.sigma, "", "attention", "drift", [], given.arithmetic, "fp32", False,
            evidence, snr_db, self.least_db, self.instead, brief=brief,
        )  # fmt: skip

    def leave_out(self) -> None:
        """Have the next call compared: this one has no result, or one that is not finite."""
        self.found(None)

    def _compared(self, function: Callable, attention: Callable, q, k, v, heads: int, *args, **kwargs) -> torch.Tensor:
        try:
            rows = None if args else self._rows(function, q, k, v, heads, **kwargs)
        except RuntimeError as error:  # the model's own call may need all of the device's memory
            rows = None
            self.report.left_out = NO_MEMORY if is_oom(error) else Message("It failed in fp32: {0}", error)
        result = attention(q, k, v, heads, *args, **kwargs)
        if rows is not None:
            self.powers.append(rows(_by_heads(result, heads, kwargs.get("skip_output_reshape"))))
            self.tokens.append(max(q.shape[-2], k.shape[-2]))
        return result

    def _rows(self, function: Callable, q, k, v, heads: int, **kwargs) -> Callable | None:
        """Compute rows of an attention in fp32; None for one that is not to be checked, or has an
        argument whose meaning is not known."""
        if max(q.shape[-2], k.shape[-2]) <= self.least or kernels_of(function, function, (), kwargs).unbounded:
            return None
        mask, reshaped = kwargs.get("mask"), kwargs.get("skip_reshape")
        q = _by_heads(q, heads, reshaped)
        k = _by_heads(k, k.shape[-1] // q.shape[-1], reshaped)
        v = _by_heads(v, k.shape[1], reshaped)
        if mask is not None and mask.dim() < 4:
            if mask.dim() < 2 or mask.shape[-2] not in (1, q.shape[2]):
                return None
            mask = (mask[None] if mask.dim() == 2 else mask)[:, None]
        return checked.beside_fp32(q, k, v, mask, kwargs.get("scale") or q.shape[-1] ** -0.5)


def _by_heads(tensor: torch.Tensor, heads: int, reshaped: bool | None) -> torch.Tensor:
    """View a tensor as (batch, heads, tokens, d), its shape already if it was ``reshaped``."""
    return tensor if reshaped else tensor.unflatten(-1, (heads, -1)).transpose(1, 2)
