"""Compare a call with itself in fp32.

Where they differ more than the call's arithmetic explains, what adds most is found.
"""

import contextlib
import copy
import functools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import comfy.model_management
import torch

from ....precision.arithmetic.compiling import compile_disabled
from ....precision.arithmetic.linear import kind_of
from ....precision.arithmetic.patching import Patch
from ....precision.guard import drift
from ....precision.guard.drift import (
    ATTENTION,
    BETWEEN,
    NOT_ADDITIVE,
    NOT_FOUND,
    ONCE,
    OUTSIDE,
    STEP_CACHE,
    WEIGHT,
    Cause,
)
from ....precision.guard.ladder import RandomStart
from ....precision.guard.log import CallPosition, GuardLog
from ....precision.guard.policy import block_of
from ....precision.modes import FP16_ACC16, FP32
from ....precision.nested import floats_in
from ....precision.report.report_text import check_text
from ....precision.report.schema import CheckReport
from ..core import denoised
from ..facts.kernels import DEQUANTIZED
from ..facts.layers import top_level_parts
from ..run.accumulation import layer_accumulation
from ..run.attention import OVERRIDE
from ..run.call import Call
from ..run.execution import is_compiled, is_on_several_devices
from ..run.kept_state import KeptState
from ..run.layer_modes import kernels_of, observed_modes_of, stream_dtype
from ..run.model_compiler import compiler_off
from ..run.oom import is_oom
from .escalation import EscalatedLayers
from .failure import INSIDE, images_of, sigma_of, step_of
from .precise import (
    ExactParts,
    MergedWeights,
    learning_apart,
    precise_layers,
    with_rounded_guidance,
    without_step_cache,
)
from .state import Guarded

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger("halfsafe")
OTHER_DEVICES = "The model runs on several devices side by side, whose calls share torch's flags."
NO_MEMORY = "There was not enough memory for the call in fp32: take a smaller picture or batch for the check."
INTERRUPTED = "It was interrupted."
NOT_A_RESULT = "It went wrong, which the events tell of."
NOT_FINITE = "The call in fp32 is NaN or Inf itself."
NOTHING_RAN = "No layer ran in the call in fp32 either: something that keeps results stands in front of the model."
NOT_PUT_BACK = (
    "{} goes on with each call and cannot be put back, so that a call made once more would change the picture: "
    "leave its node out for the check."
)
QUANTIZED_OPS = ("fp8", "int8")


class BlockOutputs:
    """Samples of what the blocks of a model return in one call: name -> one for each time it ran.

    ``dtypes``: name -> the one dtype of all floats that it returned.
    """

    def __init__(self, model: torch.nn.Module):
        self.dtypes: dict[str, torch.dtype] = {}
        self.samples: dict[str, list[torch.Tensor]] = {}
        self._parts = top_level_parts(model)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the blocks by hooks while the context lasts: their forwards, which others look at, stay."""
        notes = ((part, functools.partial(self._note, name)) for name, part in self._parts.items())
        handles = [part.register_forward_hook(note) for part, note in notes]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _note(self, name: str, module: torch.nn.Module, args: tuple, result) -> None:
        taken = drift.sampled(result)
        if taken is not None:
            self.samples.setdefault(name, []).append(taken)
            dtypes = {value.dtype for value in floats_in(result)}
            self.dtypes |= {name: dtypes.pop()} if len(dtypes) == 1 else {}


def check_of(call: Call, number: int, guarded: Guarded, log: GuardLog, setting: str) -> "DriftCheck | None":
    """Return the check of a call about to be made, where it is of a step that ``setting`` asks for.

    ``number``: the call's among those of the log.
    """
    step = step_of(call)
    if not drift.is_checked(setting, step, log.checked):
        return None
    log.checked.add(step)
    return DriftCheck(call, number, guarded, log, step)


class DriftCheck:
    """One call, compared with itself. Enter :meth:`watching` around the call, then give its result to :meth:`compare`,
    or :meth:`leave_out` one that is not finite.
    """

    def __init__(self, call: Call, number: int, guarded: Guarded, log: GuardLog, step: int):
        self.made, self.call = call, without_step_cache(call)
        self.guarded = guarded
        self.log = log
        self.model, self.patcher = call.model, call.model.current_patcher
        self.start = RandomStart.of(call.x.device)
        self.report = CheckReport(number, step, sigma_of(call), "")
        self.blocks = BlockOutputs(self.model.diffusion_model)
        self.merged = MergedWeights(self.patcher)
        self.exact: torch.Tensor
        self.rows: list[int] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the call itself, unless torch.compile runs it."""
        if is_compiled(self.patcher):  # a module with hooks is compiled anew
            yield
            return
        with compiler_off(), self.blocks.watched():
            yield

    def compare(self, result: torch.Tensor) -> None:
        """Compare the call's result with the same call in fp32; whatever goes wrong is logged, and the run goes on."""
        self.call.kept = self.made.kept
        try:
            with KeptState(self.model, self.call.options, largest=None).apart():
                self._compare(result)
        except comfy.model_management.InterruptProcessingException:
            comfy.model_management.interrupt_current_processing()  # the user's, and the sampler's to act on
            self.report.left_out = INTERRUPTED
        except Exception as error:  # other packs' code may fail in a dtype that it never met
            self.report.left_out = NO_MEMORY if is_oom(error) else f"It failed in fp32: {error}"
        self._log_check()

    def leave_out(self, why: str) -> None:
        """Tell why this call is not compared; the next one of its step is."""
        self.log.checked.discard(self.report.step)
        self.report.left_out = why
        self._log_check()

    def _log_check(self) -> None:
        self.log.checks.append(self.report)
        logger.info("Halfsafe check: %s", check_text(asdict(self.report)))

    def _compare(self, result: torch.Tensor) -> None:
        if is_on_several_devices(self.patcher):
            self.report.left_out = OTHER_DEVICES
            return
        if lost := self.call.kept.lost():
            self.report.left_out = NOT_PUT_BACK.format(" and ".join(lost))
            return
        with learning_apart(self.patcher), compile_disabled():
            self._measure(result)
            if self.report.left_out:
                return
            self._search(result)

    def _search(self, result: torch.Tensor) -> None:
        """Log what adds most where a call drifts or has lost its LoRA; of one that drifts, a failed search too."""
        drifts, lora = self.report.snr_db < self.report.threshold_db, None
        try:
            lora = self._drowned_lora()
            if lora:
                self._log_drift(lora, self.report.lora_snr_db, drift.DROWNED_DB)
            cause = self._cause(self._error(result)) if drifts else None
        except comfy.model_management.InterruptProcessingException:
            raise
        except Exception as error:  # other packs' code may fail in a dtype that it never met
            if not drifts:
                raise
            cause = self._not_found(why=f"The search for it failed: {NO_MEMORY if is_oom(error) else error}")
        if cause and not (lora and cause.op == WEIGHT):
            self._log_drift(cause, self.report.snr_db, self.report.threshold_db)

    def _measure(self, result: torch.Tensor) -> None:
        merged = self.merged
        exact = BlockOutputs(self.model.diffusion_model)
        with exact.watched():
            self.exact = self._run_exact(merged.exact(merged.modules))
        if not exact.samples or not torch.isfinite(self.exact).all():
            self.report.left_out = NOTHING_RAN if not exact.samples else NOT_FINITE
            return
        skipped = not is_compiled(self.patcher) and exact.samples.keys() - self.blocks.samples.keys()
        self.report.arithmetic = STEP_CACHE if skipped else _arithmetic(self.patcher, self.guarded)
        self.report.threshold_db = drift.threshold_of(self.report.arithmetic, len(self.guarded.modes))
        errors, signals = drift.row_errors(result, self.exact, self._without_network())
        decibels = [drift.decibels(*row) for row in zip(errors, signals, strict=True)]
        images = images_of(self.call, result)
        self.report.snr_db = min(decibels)
        self.rows = sorted({row % images for row, snr in enumerate(decibels) if snr < self.report.threshold_db})
        self.report.blocks = drift.worst_blocks(self.blocks.samples, exact.samples)

    def _run_exact(self, patches: Sequence[Patch]) -> torch.Tensor:
        widened = self.guarded.escalation
        given = torch.float32 if widened.stream or widened.whole else stream_dtype(self.patcher)
        layers = precise_layers(self.guarded, self.model, ExactParts())
        return self._run(layers, patches, with_rounded_guidance(self.call, given))

    def _run(
        self, layers: EscalatedLayers | None, patches: Sequence[Patch] = (), call: Call | None = None
    ) -> torch.Tensor:
        """Make the call once more, with the random numbers it had."""
        self.report.repeats += 1
        self.log.extra_calls += 1
        own = self.guarded.layers and self.guarded.layers.call
        inside = own if layers is None else functools.partial(layers.call, observing=patches)
        with self.start.again():
            return copy.copy(call or self.call).again({INSIDE: inside})

    def _error(self, result: torch.Tensor) -> float:
        return sum(drift.row_errors(result, self.exact, self.exact)[0])

    def _without_network(self) -> torch.Tensor:
        """Return the call's result if the network gave zeros: what the parametrization makes of the noisy latent."""
        return denoised(self.model.model_sampling)(self.call.t, torch.zeros_like(self.exact), self.call.x)

    def _log_drift(self, cause: Cause, snr: float, threshold: float) -> None:
        position = CallPosition(self.report.call, self.report.step, self.report.sigma, self.rows)
        event = drift.drift_event(self.report, position, cause, snr, threshold)
        self.log.note_drift(event, drift.drift_sentence(event))

    def _drowned_lora(self) -> Cause | None:
        """Find the weight that loses most of LoRAs merged into 8 bits, if they are worth little more than rounding."""
        names = self.merged.in_8_bit
        if not names:
            return None
        effect, lost = self._error(self._run_exact(self.merged.unpatched(names))), self._with_merged(frozenset(names))
        self.report.lora_snr_db = drift.decibels(lost, effect) if effect else None
        if not effect or self.report.lora_snr_db >= drift.DROWNED_DB:
            return None
        name, found = drift.largest_by_halves(names, self._with_merged, lost)
        return Cause(name, WEIGHT, self.guarded.modes.get(name, ""), found / lost, "" if name else NOT_ADDITIVE)

    def _cause(self, whole: float) -> Cause:
        """Find what adds most, by making more and more of the model exact."""
        if self.report.arithmetic == STEP_CACHE:
            return Cause("", STEP_CACHE, "")
        if self._error(self._run(None)) < whole / 4:
            return Cause("", ONCE, self.guarded.stream)
        return self._merged_weight(whole) or self._outside(whole) or self._in_a_block(whole)

    def _merged_weight(self, whole: float) -> Cause | None:
        names = list(self.merged.modules)
        found = self._with_merged(frozenset(names)) if names else 0.0
        if found < whole / 2:
            return None
        name, found = drift.largest_by_halves(names, self._with_merged, found)
        return Cause(name, WEIGHT, self.guarded.modes.get(name, ""), found / whole, "" if name else NOT_ADDITIVE)

    def _with_merged(self, own: frozenset[str]) -> float:
        """Return the error in fp32 where these layers have their weights as they are, rounded with LoRAs merged."""
        return self._error(self._run_exact(self.merged.exact(self.merged.modules.keys() - own)))

    def _outside(self, whole: float) -> Cause | None:
        found = self._with_own(frozenset())
        return Cause("", OUTSIDE, self.guarded.stream, found / whole) if found >= whole / 2 else None

    def _with_own(self, own: frozenset[str], alone: Collection[str] = (), attention: bool = False) -> float:
        """Return the error where these blocks keep their arithmetic, all but the layers ``alone``; others are exact."""
        layers = precise_layers(self.guarded, self.model, ExactParts(own, alone, attention, self.blocks.dtypes))
        exact = [name for name in self.merged.modules if name in alone or not block_of(name, own)]
        return self._error(self._run(layers, self.merged.exact(exact)))

    def _in_a_block(self, whole: float) -> Cause:
        parts = list(self.blocks.samples or top_level_parts(self.model.diffusion_model))
        part, found = drift.largest_by_halves(parts, self._with_own, whole)
        if not part:
            return self._not_found()
        layers = [name for name in self.guarded.modes if block_of(name, [part])]
        if layers == [part]:
            return self._product(part, found / whole)
        if not layers:
            return Cause(part, OUTSIDE, self.guarded.stream, found / whole)
        own = frozenset([part])
        if self._with_own(own, layers, attention=True) >= found / 2:
            return Cause(part, BETWEEN, self.guarded.stream, found / whole)

        def error(units: frozenset[str]) -> float:
            return self._with_own(own, [name for name in layers if name not in units], attention=ATTENTION not in units)

        unit, found = drift.largest_by_halves([*layers, ATTENTION], error, found)
        if not unit:
            return self._not_found(part)
        if unit == ATTENTION:
            return Cause(part, self._attention(), self.guarded.stream, found / whole)
        return self._product(unit, found / whole)

    def _not_found(self, part: str = "", why: str = NOT_ADDITIVE) -> Cause:
        return Cause(part, NOT_FOUND, self.guarded.stream, why=why)

    def _attention(self) -> str:
        override = self.call.options.get(OVERRIDE)
        name = getattr(override, "__qualname__", type(override).__name__)
        return f"{ATTENTION} by {name}" if override else ATTENTION

    def _product(self, layer: str, share: float) -> Cause:
        mode = _summed_modes(self.patcher).get(layer, self.guarded.modes.get(layer, self.guarded.stream))
        kind = kind_of(self.guarded.modules[layer]) or "layer"
        return Cause(layer, f"{mode} product" if kind != "layer" else kind, mode, share)


def _summed_modes(patcher: "ModelPatcher") -> dict[str, str]:
    """Map layers to their modes, with fp16 sums as the mode of their own that they are."""
    in_fp16 = (name for name, (sums, _) in layer_accumulation(patcher).items() if sums == "fp16")
    modes = observed_modes_of(patcher)
    return modes | {name: FP16_ACC16.name for name in in_fp16 if name in modes}


def _arithmetic(patcher: "ModelPatcher", guarded: Guarded) -> str:
    """Name the arithmetic of a model, as thresholds do: the coarsest of its layers' and of the values between them."""
    if guarded.escalation.whole:
        return FP32.name
    modes = _summed_modes(patcher)
    found = {drift.arithmetic_named(mode) for mode in [guarded.stream, *(modes[name] for name in guarded.modes)]}
    kernels = kernels_of(patcher, modes).items()
    other = any(kernel != DEQUANTIZED and modes[name] not in QUANTIZED_OPS for name, kernel in kernels)
    return drift.coarsest(found | ({"4-bit products"} if other else set()))
