"""Guarded VAEs and text encoders: copies whose results are checked, and made again in a higher precision if need be."""

import copy
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ....precision.amax import amax_value
from ....precision.dtypes import name_of
from ....precision.guard.ladder import encoder_rungs, first_finite, random_state_kept
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition, GuardLog, encoder_sentence, event_of
from ....precision.guard.policy import ENCODER_INPUTS, encoder_not_cured
from ....precision.nested import tensors_in
from ..load.devices import current_device
from ..run.modules import ask_for_plain_products
from .causes import bad_weight
from .notify import teller

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

ATTRIBUTE = "halfsafe_guard"
Attempt = Callable[[torch.dtype | None], tuple[Any, float]]


class EncoderGuard:
    """How one VAE or text encoder is guarded, and its log."""

    def __init__(self, kind: str, on_nan: str, node_id: str | None):
        self.kind = kind
        self.on_nan = on_nan
        self.log = GuardLog(on_nan, teller(node_id), functools.partial(encoder_sentence, kind=kind))

    def run(self, action: str, attempt: Attempt, model: torch.nn.Module, patcher: "ModelPatcher", dtype: torch.dtype, given):
        """``attempt(None)``, or in a higher dtype if its result is not finite.

        Args:
            action: decode, encode ...
            attempt: makes the result in a dtype, None for as it is: (result, largest magnitude before any clamp).
            model: what ``attempt`` runs, and ``patcher`` its patcher.
            given: what went in.
        """
        self.log.calls += 1
        result, largest = attempt(None)
        if math.isfinite(largest):
            return result
        name, advice = ENCODER_INPUTS[f"{self.kind} {action}"]
        if not all(math.isfinite(amax_value(tensor)) for tensor in tensors_in(given)):
            return self._give_up(Origin(name, "", "input", "", math.nan), "bad_input", advice, dtype, result)
        overflow = Origin(f"{self.kind} {action}", "", "overflow", name_of(dtype), math.nan)
        rungs = encoder_rungs(dtype, current_device().capabilities["bf16"]) if self.on_nan == "retry_higher" else []
        repeat = first_finite(rungs, lambda rung: attempt(None if rung == dtype else rung))
        if repeat:
            self._recovered(overflow, dtype, repeat.rung)
            return repeat.result
        origin = _located(model, attempt) or overflow
        if origin.kind == "weights":
            return self._give_up(origin, "bad_weights", bad_weight(patcher, origin.op), dtype, result)
        return self._give_up(origin, *encoder_not_cured(self.kind, self.on_nan), dtype, result)

    def _recovered(self, origin: Origin, dtype: torch.dtype, higher: torch.dtype) -> None:
        event = event_of(CallPosition(self.log.calls), origin, name_of(dtype), name_of(higher), True)
        if higher == dtype:
            self.log.note(event, origin, "device_fault")
        else:
            self.log.note(event, origin, "recovered", "")

    def _give_up(self, origin: Origin, verdict: str, advice: str, dtype: torch.dtype, result):
        position = CallPosition(self.log.calls, spoils_all=not _good_rows(result))
        self.log.give_up(position, origin, verdict, advice, name_of(dtype))
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


def vae_in(vae, dtype: torch.dtype):
    """A copy of the VAE, not guarded, that computes in ``dtype``. Its weights stay as they are and are cast at use."""
    clone = _unguarded(vae)
    clone.patcher = vae.patcher.clone()
    clone.patcher.set_model_compute_dtype(dtype)
    clone.vae_dtype = dtype
    return clone


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
    def attempt(dtype: torch.dtype | None):
        one = vae_in(vae, dtype) if dtype else _unguarded(vae)
        sizes = _watched_output(one)
        result = getattr(one, name)(*args, **kwargs)
        return result, _worst([*sizes, *map(amax_value, tensors_in(result))])

    guard: EncoderGuard = getattr(vae, ATTRIBUTE)
    action = name.removesuffix("_tiled")
    return guard.run(action, attempt, vae.first_stage_model, vae.patcher, vae.vae_dtype, [args, kwargs])


def _run_clip(clip, name: str, tokens, *args, **kwargs):
    def attempt(dtype: torch.dtype | None):
        one = _clip_in(clip, dtype) if dtype else _unguarded(clip)
        result = getattr(one, name)(tokens, *args, **kwargs)
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


def _unguarded(guarded):
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


def _located(model: torch.nn.Module, attempt) -> Origin | None:
    """What made the result of one more attempt non-finite."""
    localizer = Localizer(model)
    with random_state_kept(), localizer.watching():
        result, _ = attempt(None)
    found = [localizer.origin(tensor) for tensor in tensors_in(result)]
    return next(filter(None, found), None)


def _good_rows(result) -> int:
    tensors = tensors_in(result)
    return int(torch.isfinite(tensors[0].flatten(1)).all(1).sum()) if tensors else 0
