"""Compare a guarded call with the same call in fp32, and name the blocks with the largest error if
it drifts."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.casting import CastsToFp32
from ....precision.base.message import Message, joined
from ....precision.base.modes import FP16_ACC16, FP32
from ....precision.base.patching import compile_disabled
from ....precision.check import drift
from ....precision.devices.random_start import RandomStart
from ....precision.guard.inputs import rows_not_finite
from ....precision.guard.ladder import Ladder
from ....precision.guard.log import GuardLog
from ....precision.guard.verdicts import FINITE_HERE
from ....precision.plan.in_use import PlanInUse
from ....precision.report.report_text import check_text
from ....precision.report.schema import CheckReport, GuardEvent
from ..accumulation.accumulation_report import layer_accumulation
from ..comfyui.attributes import DENOISED
from ..comfyui.execution import is_compiled, is_on_several_devices, is_oom
from ..comfyui.kernels import general_operations
from ..comfyui.layers import top_level_parts
from ..compute.attention import how_to_choose_another
from ..compute.executor import quantized_attention
from ..compute.layer_modes import states_of, stream_dtype
from ..guard.escalation import Guarded, WiderModel, hooked
from ..guard.failure import ModelCall
from ..guard.notices import WATCHED
from ..replay.call import Call
from ..replay.core_state import CoreState
from ..replay.interceptor import Run
from ..replay.model_compiler import compiler_off
from .attention import UnaskedChecks

logger = logging.getLogger("halfsafe")
OTHER_DEVICES = "The model runs on several devices in parallel, and their calls share torch's flags."
NO_MEMORY = "Not enough memory for the fp32 call: use a smaller picture or batch for the check."
INTERRUPTED = "The comparison was interrupted."
NOT_A_RESULT = "The call itself failed; see the events."
NOT_FINITE = "In fp32 the call is NaN or Inf; see the events."
NOTHING_RAN = "No layer ran in the fp32 call either: another node returns cached results instead of running the model."
MAY_KEEP_STATE = (
    "{0} has code on this model that may keep state between calls, so an extra call could change the picture: remove "
    "its node to use the check."
)
QUANTIZED_OPS = ("fp8", "int8")
GUIDANCE_FACTOR = 1000.0
STEP_CACHE_KEY = "easycache"


def checking(setting: str, patcher: ModelPatcher, node_id: str | None) -> Callable:
    """Return the factory of checks for a node's ``check`` input. With it off, attentions of
    quantized operands are compared alone: each for a guard of *Guard every run*, which has no such
    input, else on AMD and with many tokens.

    Kernels that the model's file requests are not compared alone: *Guard every run* compares the
    first step with them.
    """
    watched = bool(node_id and node_id.startswith(WATCHED))
    options = patcher.model_options.get("transformer_options", {})
    if (
        setting == "off"
        and watched
        and UnaskedChecks.are_of_file(patcher.model, options)
        and quantized_attention(patcher)
    ):
        setting = "first step"
    return UnaskedChecks(watched) if setting == "off" else functools.partial(_check_of, setting)


def _check_of(setting: str, call: Call, number: int, guarded: Guarded, log: GuardLog) -> _DriftCheck | None:
    """Return the check of the next call, if its step is to be checked and an extra call has no side
    effects; else None.

    ``number``: index of the call among those of the log.
    """
    if not drift.is_checked(setting, None, log.checked):
        return None
    step = call.step()
    if not drift.is_checked(setting, step, log.checked):
        return None
    check, told = _DriftCheck(call, number, guarded, log, step), bool(log.checked)
    log.checked.add(step)
    if packs := call.packs():
        if not told:
            check.tell(Message(MAY_KEEP_STATE, joined(packs, " and ")))
        return None
    return check


class _BlockOutputs:
    """Samples of the results of a model's blocks in a call: name -> one sample per run of the
    block."""

    def __init__(self, model: torch.nn.Module):
        self.samples: dict[str, list[torch.Tensor]] = {}
        self._parts = top_level_parts(model)

    def watched(self) -> contextlib.AbstractContextManager:
        """Context in which the results of the blocks are sampled."""
        return hooked((name, part, self._note) for name, part in self._parts.items())

    def _note(self, name: str, module: torch.nn.Module, args: tuple, result) -> None:
        taken = drift.sampled(result)
        if taken is not None:
            self.samples.setdefault(name, []).append(taken)


class _DriftCheck:
    """Comparison of one call with the same call in fp32. Enter :meth:`watching` around the call,
    then pass its result to :meth:`compare`, or call :meth:`leave_out` for a result that is not
    finite."""

    def __init__(self, call: Call, number: int, guarded: Guarded, log: GuardLog, step: int):
        self.call = call
        self.guarded = guarded
        self.log = log
        self.model, self.patcher = call.model, call.model.current_patcher
        self.latent = call.x.clone()
        self.start = RandomStart.of(call.x.device)
        self.report = CheckReport(number, step, call.sigma(), "")
        self.blocks = _BlockOutputs(self.model.diffusion_model)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Sample the blocks of the call itself, unless torch.compile runs it."""
        blocks = contextlib.nullcontext() if is_compiled(self.patcher) else self.blocks.watched()
        with compiler_off, blocks:  # torch.compile compiles a module with hooks anew
            yield

    def compare(self, run: Run, result: torch.Tensor) -> None:
        """Compare the call's result with the same call in fp32. Errors are logged, and the run
        continues."""
        after, left_out = CoreState(self.call.options), ""
        try:
            with compile_disabled():
                left_out = self._compare(run, result)
        except comfy.model_management.InterruptProcessingException:
            comfy.model_management.interrupt_current_processing()  # the user's, and the sampler's to act on
            left_out = INTERRUPTED
        except Exception as error:  # model code may fail in a dtype that it never met
            left_out = NO_MEMORY if is_oom(error) else Message("It failed in fp32: {0}", error)
        finally:
            after.put_back()
        self.tell(left_out)

    def leave_out(self) -> None:
        """Log that a call failed and is not compared; the next call of its step is checked
        instead."""
        self.log.checked.discard(self.report.step)
        self.tell(NOT_A_RESULT)

    def tell(self, left_out: str) -> None:
        """Log the check, or the reason for which the call was not compared."""
        self.report.left_out = left_out
        self.log.checks.append(self.report)
        logger.info("Halfsafe check: %s", check_text(asdict(self.report)))

    def _compare(self, run: Run, result: torch.Tensor) -> str:
        """Compare the call with fp32. Returns the reason if that was not possible, else ""."""
        if is_on_several_devices(self.patcher):
            return OTHER_DEVICES
        blocks = _BlockOutputs(self.model.diffusion_model)
        with blocks.watched():
            exact = self._in_fp32(run)
        if not blocks.samples:
            return NOTHING_RAN
        self.report.arithmetic = _arithmetic(self.patcher, self.guarded.plan)
        if not torch.isfinite(exact).all():
            self._tell_hidden(run, result, exact, blocks)
            return NOT_FINITE
        skipped = not is_compiled(self.patcher) and blocks.samples.keys() - self.blocks.samples.keys()
        self.report.arithmetic = drift.STEP_CACHE if skipped else self.report.arithmetic
        self.report.blocks = drift.worst_blocks(self.blocks.samples, blocks.samples)
        self._judge(result, exact)
        return ""

    def _tell_hidden(self, run: Run, result: torch.Tensor, exact: torch.Tensor, blocks: _BlockOutputs) -> None:
        """Log an event for a finite result that is NaN or Inf in fp32: the input or weight that
        explains it, else the first block whose result is NaN or Inf there."""
        call = ModelCall(
            run, self._uncached(), self.report.call, self.start, result, self.guarded, sites=frozenset([FINITE_HERE])
        )
        again = self._in_fp32(run)
        extra = self.log.extra_calls
        if not Ladder(call, self.log).tell_hidden(exact, again):
            first = next((name for name, taken in blocks.samples.items() if not torch.cat(taken).isfinite().all()), "")
            rows = sorted({row % call.images for row in rows_not_finite(exact)})
            given = self.report
            event = GuardEvent(
                given.call, given.step, given.sigma, first, "", "drift", rows, given.arithmetic, "fp32", False,
                FINITE_HERE, advice=drift.RUN_IN_FP32,
            )  # fmt: skip
            self.log.note_drift(event)
        self.report.repeats += self.log.extra_calls - extra

    def _judge(self, result: torch.Tensor, exact: torch.Tensor) -> None:
        """Compare each row with the same row of the fp32 call, and log an event if the SNR of a row
        is below the threshold."""
        # What the parametrization makes of the noisy latent where the network gives zeros.
        zeros = torch.zeros_like(exact)
        without_network = getattr(self.model.model_sampling, DENOISED)(self.call.t, zeros, self.latent)
        decibels = drift.row_decibels(result, exact, without_network)
        threshold = drift.threshold_of(self.report.arithmetic, len(self.guarded.plan.modes))
        self.report.snr_db, self.report.threshold_db = min(decibels), threshold
        if min(decibels) < threshold:
            images = self.call.images(result)
            rows = {row % images for row, snr in enumerate(decibels) if snr < threshold}
            attention = quantized_attention(self.patcher)
            instead = how_to_choose_another(attention, self.call.options) if attention else ""
            event = drift.drift_event(self.report, min(decibels), threshold, sorted(rows), attention, instead)
            self.log.note_drift(event)

    def _in_fp32(self, run: Run) -> torch.Tensor:
        """Run the call again in fp32, in and between its layers, with the same random numbers."""
        call = self._uncached()
        call.rung = WiderModel(self.guarded.plan.fp32(), self.model)
        given = torch.float32 if self.guarded.plan.everywhere else stream_dtype(self.patcher)
        call.extra = _with_rounded_guidance(call.extra, given)
        self.report.repeats += 1
        self.log.extra_calls += 1
        # comfy-kitchen has no kernels of its own for MPS, and its general operations cast fp8 there (``metal.py``).
        general = contextlib.nullcontext() if self.latent.device.type == "mps" else general_operations()
        with self.start.again(), general, CastsToFp32():
            return run(call)

    def _uncached(self) -> Call:
        """Return a copy of the call in which no step cache skips the model."""
        call = self.call.again(None)
        call.options, call.x = _without_step_cache(call.options), self.latent.clone()
        return call


def _arithmetic(patcher: ModelPatcher, plan: PlanInUse) -> str:
    """Return the arithmetic of a model, by the names of the thresholds: the coarsest of its layers
    and of the values between them."""
    if plan.whole:
        return FP32.name
    states, sums = states_of(patcher), layer_accumulation(patcher)
    # As planned: fp16_safe is one arithmetic, though some of its results are fp16.
    modes = {name: state.planned for name, state in states.items()}
    modes |= {name: FP16_ACC16.name for name, (kind, _) in sums.items() if kind == "fp16" and name in modes}
    found = {drift.ARITHMETIC_OF.get(mode, mode) for mode in [plan.dtype, *(modes[name] for name in plan.modes)]}
    as_stored = (name for name, state in states.items() if state.as_stored)
    other = any(modes[name] not in QUANTIZED_OPS for name in as_stored)
    return drift.coarsest(found | ({"4-bit products"} if other else set()))


def _without_step_cache(options: dict) -> dict:
    """Copy ``transformer_options`` without the wrapper of ComfyUI's EasyCache, which reuses results
    of earlier steps."""
    wrappers = dict(options.get("wrappers", {}))
    inner = wrappers.get(WrappersMP.DIFFUSION_MODEL, {})
    wrappers[WrappersMP.DIFFUSION_MODEL] = {key: group for key, group in inner.items() if key != STEP_CACHE_KEY}
    return {**options, "wrappers": wrappers}


def _with_rounded_guidance(arguments: dict, dtype: torch.dtype) -> dict:
    """Copy a call's arguments with the embedded guidance rounded as in the model's own code."""
    # Flux and Hunyuan Video multiply it by 1000 in the dtype of the values between layers
    # (``timestep_embedding`` in comfy/ldm/flux/layers.py): 6.0 becomes 6016 in bf16.
    guidance = arguments.get("guidance")
    if not isinstance(guidance, torch.Tensor) or not guidance.is_floating_point():
        return arguments
    return {**arguments, "guidance": (guidance.to(dtype) * GUIDANCE_FACTOR).float() / GUIDANCE_FACTOR}
