"""Guarded VAEs and text encoders: copies whose results are checked, and made again in a higher precision if need be."""

import copy
import functools
import logging
import math

import torch

from ....precision.amax import amax_value
from ....precision.dtypes import name_of
from ....precision.guard.localize import Localizer, Origin, tensors_in
from ....precision.guard.policy import ADVICE, NonFinite, Where, event_of, random_state_kept
from ....precision.report.schema import GuardEvent
from ..load.devices import current_device
from ..page import running_prompt_id, tell_page
from ..run.modules import ask_for_plain_products
from .causes import bad_weight

INPUTS = {
    "VAE decode": ("latent", "It was so before the VAE: see what NaN Guard on the model says, or put one there; or Check Finite behind the node that made it."),
    "VAE encode": ("image", "It was so before the VAE: put Check Finite behind the node that made it."),
    "Text encoder encode": ("tokens", "A textual inversion embedding in the prompt holds NaN or Inf: leave it out, or get it again."),
}
logger = logging.getLogger("halfsafe")
ATTRIBUTE = "halfsafe_guard"


class EncoderGuard:
    """How one VAE or text encoder is guarded, and the events so far."""

    def __init__(self, kind: str, on_nan: str, node_id: str | None):
        self.kind = kind
        self.on_nan = on_nan
        self.node_id = node_id
        self.events: list[GuardEvent] = []
        self.verdict = "clean"
        self.calls = 0

    def note(self, event: GuardEvent, message: str, verdict: str, advice: str = "") -> None:
        self.events.append(event)
        self.verdict = verdict
        logger.warning("Halfsafe guard: %s %s", message, advice)
        tell_page(self.node_id, running_prompt_id(), "event", verdict, message, advice, event)

    def run(self, action: str, attempt, model: torch.nn.Module, patcher, dtype: torch.dtype, given):
        """``attempt(None)``, or in a higher dtype if its result is not finite.

        Args:
            action: decode, encode ...
            attempt: makes the result in a dtype, None for as it is: (result, largest magnitude before any clamp).
            model: what ``attempt`` runs, and ``patcher`` its patcher.
            given: what went in.
        """
        self.calls += 1
        result, largest = attempt(None)
        if math.isfinite(largest):
            return result
        if not all(math.isfinite(amax_value(tensor)) for tensor in tensors_in(given)):
            name, advice = INPUTS[f"{self.kind} {action}"]
            return self._hopeless(Origin(name, "", "input", "", math.nan), "bad_input", advice, name_of(dtype), result)
        if self.on_nan == "retry_higher":
            for higher in [*([] if dtype == torch.float16 else [None]), *_higher(dtype)]:
                with random_state_kept():
                    again, largest = attempt(higher)
                if math.isfinite(largest):
                    return self._recovered(action, dtype, higher or dtype, again)
        return self._not_cured(_located(model, attempt) or self._overflow(action, dtype), patcher, name_of(dtype), result)

    def _overflow(self, action: str, dtype: torch.dtype) -> Origin:
        return Origin(f"{self.kind} {action}", "", "overflow", name_of(dtype), math.nan)

    def _not_cured(self, origin: Origin, patcher, mode: str, result):
        if origin.kind == "weights":
            return self._hopeless(origin, "bad_weights", bad_weight(patcher, origin.op), mode, result)
        if self.on_nan == "retry_higher":
            advice = f"No dtype cures this {self.kind}: try another file, another tile size, or its decode on the CPU."
            return self._hopeless(origin, "not_precision", advice, mode, result)
        advice = f"Set on_nan to retry_higher, or load the {self.kind} with dtype bf16 or fp32."
        return self._hopeless(origin, "stopped", advice, mode, result)

    def _recovered(self, action: str, dtype: torch.dtype, higher: torch.dtype, result):
        origin = self._overflow(action, dtype)
        event = event_of(Where(self.calls, 0, math.nan, []), origin, name_of(dtype), name_of(higher), True)
        message = f"{self.kind} {action}: the result was NaN or Inf in {name_of(dtype)}. Repeated in {name_of(higher)}: finite."
        verdict = "recovered" if higher != dtype else "device_fault"
        self.note(event, message, verdict, ADVICE[verdict] if verdict == "device_fault" else "")
        return result

    def _hopeless(self, origin: Origin, verdict: str, advice: str, mode: str, result):
        event = event_of(Where(self.calls, 0, math.nan, []), origin, mode, mode, False)
        op = f" ({origin.op})" if origin.op and origin.kind != "weights" else ""
        message = f"{self.kind}: the result is NaN or Inf, computed in {mode}, first in {origin.layer}{op}."
        self.note(event, message, verdict, advice)
        if self.on_nan == "stop" or (self.on_nan == "retry_higher" and not _good_rows(result)):
            raise NonFinite(message, verdict, advice)
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


def _higher(dtype: torch.dtype) -> list[torch.dtype]:
    """The dtypes to repeat in: bf16 only where the device has it, as it loses precision."""
    if dtype == torch.float16 and current_device().capabilities["bf16"]:
        return [torch.bfloat16, torch.float32]
    return [torch.float32] if dtype != torch.float32 else []


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
