"""Guarded VAEs and text encoders: copies whose results are checked, and made again in a higher precision if need be."""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ....precision.amax import amax_value
from ....precision.dtypes import name_of
from ....precision.guard.finite import zeroed
from ....precision.guard.ladder import encoder_rungs, first_finite, random_state_kept
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition, GuardLog, encoder_sentence, event_of
from ....precision.guard.policy import ENCODER_INPUTS, encoder_not_cured
from ....precision.nested import replaced, tensors_in
from ..load.devices import current_device
from ..load.encoders import vae_in
from ..run.modules import ask_for_plain_products
from .causes import NAN_GIVEN, bad_weight
from .failure import FAILS_IN_FP32, SAME_AGAIN
from .notify import teller

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

ATTRIBUTE = "halfsafe_guard"
INPUT_MADE_FINITE = "In fp32 the result is NaN or Inf with it, and finite with a zero for each of its NaN and Inf."
WEIGHT_READ = "The first operation whose result is NaN or Inf reads it."
Attempt = Callable[[torch.dtype | None, Any], tuple[Any, float]]


class EncoderGuard:
    """How one VAE or text encoder is guarded, and its log."""

    def __init__(self, kind: str, on_nan: str, node_id: str | None):
        self.kind = kind
        self.on_nan = on_nan
        self.log = GuardLog(on_nan, teller(node_id), functools.partial(encoder_sentence, kind=kind))

    def run(self, action: str, attempt: Attempt, model: torch.nn.Module, patcher: "ModelPatcher", dtype: torch.dtype, given):
        """``attempt(None, given)``, or in a higher dtype if its result is not finite.

        Args:
            action: decode, encode ...
            attempt: makes the result in a dtype, None for as it is: (result, largest magnitude before any clamp).
            model: what ``attempt`` runs, and ``patcher`` its patcher.
            given: what went in.
        """
        self.log.calls += 1
        result, largest = attempt(None, given)
        if math.isfinite(largest):
            return result
        lost = _nan_rows(given, result)
        if lost:
            self._blame_input(action, dtype, result, lost, NAN_GIVEN)
        rest = _bad_rows(result) - lost
        return self._resolved(action, attempt, model, patcher, dtype, given, result, lost) if rest or not lost else result

    def _resolved(self, action: str, attempt: Attempt, model, patcher: "ModelPatcher", dtype: torch.dtype, given, result, lost: set[int]):
        """What to go on with where rows failed that were given no NaN; ``lost``: those that were."""
        good = replaced(given, _without_nan) if lost else given
        overflow = Origin(f"{self.kind} {action}", "", "overflow", name_of(dtype), math.nan)
        rungs = encoder_rungs(dtype, current_device().capabilities["bf16"]) if self.on_nan == "retry_higher" else []
        repeat = first_finite(rungs, lambda rung: attempt(None if rung == dtype else rung, good))
        if repeat:
            self._recovered(overflow, dtype, repeat.rung)
            return _with_nan(repeat.result, lost)
        rows = _bad_rows(result)
        if self._needs_finite_input(attempt, good, dtype):
            return self._blame_input(action, dtype, result, rows, INPUT_MADE_FINITE)
        origin = _located(model, attempt, good) or overflow
        if origin.kind == "weights":
            return self._give_up(origin, "bad_weights", bad_weight(patcher, origin.op), dtype, result, rows, WEIGHT_READ)
        verdict = encoder_not_cured(self.kind, self.on_nan)
        return self._give_up(origin, *verdict, dtype, result, rows, FAILS_IN_FP32 if rungs else "")

    def _blame_input(self, action: str, dtype: torch.dtype, result, rows: set[int], evidence: str):
        name, advice = ENCODER_INPUTS[f"{self.kind} {action}"]
        return self._give_up(Origin(name, "", "input", "", math.nan), "bad_input", advice, dtype, result, rows, evidence)

    def _needs_finite_input(self, attempt: Attempt, given, dtype: torch.dtype) -> bool:
        """Tell whether the result is finite in fp32 with a zero for each Inf of the input, and not with the input as it is."""
        if all(math.isfinite(amax_value(tensor)) for tensor in tensors_in(given)):
            return False
        higher = None if dtype == torch.float32 else torch.float32
        if self.on_nan != "retry_higher" and math.isfinite(attempt(higher, given)[1]):
            return False
        return math.isfinite(attempt(higher, replaced(given, lambda value: zeroed(value) if value.is_floating_point() else value))[1])

    def _recovered(self, origin: Origin, dtype: torch.dtype, higher: torch.dtype) -> None:
        event = event_of(CallPosition(self.log.calls), origin, name_of(dtype), name_of(higher), True)
        if higher == dtype:
            self.log.note(replace(event, evidence=SAME_AGAIN), origin, "device_fault")
        else:
            self.log.note(event, origin, "recovered", "")

    def _give_up(self, origin: Origin, verdict: str, advice: str, dtype: torch.dtype, result, rows: set[int], evidence: str):
        position = CallPosition(self.log.calls, batch_rows=sorted(rows), spoils_all=len(rows) >= _rows_of(result))
        self.log.give_up(position, origin, verdict, advice, name_of(dtype), evidence)
        return result


def guard_vae(vae, on_nan: str, node_id: str | None = None):
    """A copy of the VAE whose results are checked. The original stays as it is."""
    guarded = copy.copy(vae)
    guarded.patcher = vae.patcher.clone()
    guarded.__class__ = _guarded_class(_plain_class(type(vae)), _GuardedVAE)
    setattr(guarded, ATTRIBUTE, EncoderGuard("VAE", on_nan, node_id))
    return guarded


def guard_clip(clip, on_nan: str, node_id: str | None = None):
    """A clone of the text encoder whose results are checked."""
    guarded = clip.clone()
    guarded.__class__ = _guarded_class(_plain_class(type(clip)), _GuardedCLIP)
    setattr(guarded, ATTRIBUTE, EncoderGuard("Text encoder", on_nan, node_id))
    return guarded


def _clip_in(clip, dtype: torch.dtype):
    clone = clip.clone()
    clone.__class__ = _plain_class(type(clip))
    clone.patcher.set_model_compute_dtype(dtype)
    ask_for_plain_products(clone.patcher)
    return clone


class _Guarded:
    """Comes before ComfyUI's class in a guarded object's class."""


@functools.cache
def _guarded_class(base: type, mixin: type) -> type:
    return type(base.__name__, (mixin, base), {})


def _plain_class(kind: type) -> type:
    return kind.__bases__[1] if issubclass(kind, _Guarded) else kind


def _run_vae(vae, name: str, *args, **kwargs):
    def attempt(dtype: torch.dtype | None, given):
        one = vae_in(unguarded(vae), dtype) if dtype else unguarded(vae)
        sizes = _watched_output(one)
        result = getattr(one, name)(*given[0], **given[1])
        return result, _worst([*sizes, *map(amax_value, tensors_in(result))])

    guard: EncoderGuard = getattr(vae, ATTRIBUTE)
    action = name.removesuffix("_tiled")
    return guard.run(action, attempt, vae.first_stage_model, vae.patcher, vae.vae_dtype, [list(args), kwargs])


def _run_clip(clip, name: str, tokens, *args, **kwargs):
    def attempt(dtype: torch.dtype | None, given):
        one = _clip_in(clip, dtype) if dtype else unguarded(clip)
        result = getattr(one, name)(given, *args, **kwargs)
        return result, _worst(map(amax_value, tensors_in(result)))

    guard: EncoderGuard = getattr(clip, ATTRIBUTE)
    dtype = clip.patcher.object_patches.get("manual_cast_dtype") or torch.float32
    return guard.run("encode", attempt, clip.cond_stage_model, clip.patcher, dtype, tokens)


class _GuardedVAE(_Guarded):
    decode = functools.partialmethod(_run_vae, "decode")
    decode_tiled = functools.partialmethod(_run_vae, "decode_tiled")
    encode = functools.partialmethod(_run_vae, "encode")
    encode_tiled = functools.partialmethod(_run_vae, "encode_tiled")


class _GuardedCLIP(_Guarded):
    encode_from_tokens = functools.partialmethod(_run_clip, "encode_from_tokens")
    encode_from_tokens_scheduled = functools.partialmethod(_run_clip, "encode_from_tokens_scheduled")

    def clone(self, *args, **kwargs):
        clone = super().clone(*args, **kwargs)
        clone.__class__ = type(self)
        setattr(clone, ATTRIBUTE, getattr(self, ATTRIBUTE))
        return clone


def unguarded(guarded):
    """Return a copy of a VAE or text encoder whose results are not checked."""
    plain = copy.copy(guarded)
    plain.__class__ = _plain_class(type(guarded))
    return plain


def _watched_output(vae) -> list[float]:
    """The largest magnitude of what this VAE's output clamp was given: after it, inf is white."""
    sizes, process = [], vae.process_output

    def watch(image):
        sizes.append(amax_value(image))
        return process(image)

    vae.process_output = watch
    return sizes


def _worst(sizes) -> float:
    return max(sizes, key=lambda size: size if math.isfinite(size) else math.inf, default=0.0)


def _located(model: torch.nn.Module, attempt: Attempt, given) -> Origin | None:
    """What made the result of one more attempt non-finite."""
    localizer = Localizer(model)
    with random_state_kept(), localizer.watching():
        result, _ = attempt(None, given)
    found = [localizer.origin(tensor) for tensor in tensors_in(result)]
    return next(filter(None, found), None)


def _nan_rows(given, result) -> set[int]:
    """The rows of a result that were given NaN."""
    rows, batch = set(), _rows_of(result)
    for tensor in tensors_in(given):
        if torch.isnan(tensor).any():
            bad = torch.isnan(tensor.flatten(1)).any(1).nonzero().flatten().tolist() if tensor.dim() > 1 else []
            rows |= set(bad) if tensor.dim() > 1 and len(tensor) == batch else set(range(batch))
    return rows


def _bad_rows(result) -> set[int]:
    """The rows of a result that hold NaN or Inf; every row where a clamp has hidden what does."""
    tensors = tensors_in(result)
    rows = (~torch.isfinite(tensors[0].flatten(1))).any(1).nonzero().flatten().tolist() if tensors else []
    return set(rows) or set(range(_rows_of(result)))


def _rows_of(result) -> int:
    tensors = tensors_in(result)
    return len(tensors[0]) if tensors else 1


def _without_nan(value: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.isnan(value), torch.zeros_like(value), value) if value.is_floating_point() else value


def _with_nan(result, rows: set[int]):
    """A VAE's result with NaN in the rows that were lost."""
    if not rows:
        return result
    index = torch.tensor(sorted(rows))
    return replaced(result, lambda value: value.index_fill(0, index.to(value.device), math.nan))
