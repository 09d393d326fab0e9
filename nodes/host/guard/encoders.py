"""Guarded VAEs and text encoders: copies whose results are checked, and made again in a higher precision if need be."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.amax import amax_value
from ....precision.base.dtypes import name_of
from ....precision.base.nested import tensors_in
from ....precision.base.patching import patched
from ....precision.guard.case import Case
from ....precision.guard.failed_call import Attempt, FailedCall
from ....precision.guard.inputs import NotFiniteInput, inputs_not_finite
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition, GuardLog
from ....precision.guard.policy import encoder_steps
from ....precision.guard.random_start import RandomStart
from ....precision.guard.verdicts import ENCODER_INPUTS, ENCODERS
from ..comfyui.attributes import CAST_DTYPE
from ..comfyui.execution import is_oom
from ..comfyui.gate import entering
from ..comfyui.page import show_progress
from ..comfyui.weights import ask_for_plain_products
from ..load.devices import current_device
from ..load.encoders import vae_in
from .causes import LoadedWeights
from .failure import notifier

ATTRIBUTE = "halfsafe_guard"
OF = {"VAE": "vae", "Text encoder": "clip"}
Make = Callable[[torch.dtype | None, Any], tuple[Any, float]]


class EncoderGuard:
    """How one VAE or text encoder, named ``kind``, is guarded, and its log."""

    def __init__(self, kind: str, on_nan: str, node_id: str | None):
        self.kind = kind
        self.log = GuardLog(on_nan, notifier(node_id, of=OF[kind]))

    def run(self, action: str, make: Make, patcher: ModelPatcher, dtype: torch.dtype, given: Any) -> Any:
        """Return ``make(None, given)``, or the result in a higher dtype where that is not finite.

        ``make``: makes (result, largest magnitude before any clamp) in a dtype, None for as it is.

        Raises:
            NonFinite: there is no finite result, or the guard is to stop.
        """
        number = self.log.begin_call()
        self.log.begin_run()
        start = RandomStart.of(patcher.load_device)
        result, largest = make(None, given)
        if math.isfinite(largest):
            return result
        call = EncoderCall(
            given,
            result,
            start,
            CallPosition(number),
            images=next(map(len, tensors_in(result)), 1),
            device=patcher.load_device,
            weights=LoadedWeights(patcher),
            wording=ENCODERS[self.kind],
            steps=encoder_steps(dtype, current_device().capabilities["bf16"]),
            in_fp32=torch.float32,
            tell=show_progress,
            is_out_of_memory=is_oom,
            present=dtype,
            locates_first=False,
            default_origin=Origin(f"{self.kind} {action}", "", "overflow", name_of(dtype), math.nan),
        )
        call.make = make
        return Case(call, self.log).resolved()


class EncoderCall(FailedCall):
    """A call of a VAE or text encoder in the dtype ``present``. Methods do what ``FailedCall`` says of them."""

    make: Make

    def run(self, given: Any) -> Attempt:
        return Attempt(*self.make(None, given))

    def watched(self, given: Any) -> tuple[Attempt, Origin | None]:
        localizer = Localizer(self.weights.model, entering)
        with localizer.watching():
            attempt = self.run(given)
        found = [localizer.origin(tensor) for tensor in tensors_in(attempt.result)]
        return attempt, next(filter(None, found), None)

    def run_at(self, step: torch.dtype, given: Any, zeroed: Sequence[str] = ()) -> Attempt:
        with patched(self.weights.zeroed(zeroed)):
            return Attempt(*self.make(None if step == self.present else step, given))

    def inputs(self, given: Any) -> list[NotFiniteInput]:
        name, advice = ENCODER_INPUTS[self.default_origin.layer]
        return inputs_not_finite([(name, given)], {name: advice})

    def modes(self, origin: Origin | None, step: torch.dtype | None = None) -> tuple[str, str]:
        return name_of(self.present), name_of(step or self.present)

    def named(self, step: torch.dtype) -> str:
        return name_of(step)


def guard_vae(vae, on_nan: str, node_id: str | None = None):
    """Return a copy of the VAE whose results are checked. The original stays as it is."""
    guarded = _as(_guarded_class(_plain_class(vae), _GuardedVAE), vae)
    guarded.patcher = vae.patcher.clone()
    setattr(guarded, ATTRIBUTE, EncoderGuard("VAE", on_nan, node_id))
    return guarded


def guard_clip(clip, on_nan: str, node_id: str | None = None):
    """Return a clone of the text encoder whose results are checked."""
    guarded = _as(_guarded_class(_plain_class(clip), _GuardedCLIP), clip.clone())
    setattr(guarded, ATTRIBUTE, EncoderGuard("Text encoder", on_nan, node_id))
    return guarded


def unguarded(guarded):
    """Return a copy of a VAE or text encoder whose results are not checked."""
    return _as(_plain_class(guarded), guarded)


def _as(kind: type, encoder):
    """Copy a VAE or text encoder as an object of a class."""
    made = object.__new__(kind)
    vars(made).update(vars(encoder))
    return made


class _Guarded:
    """Comes before ComfyUI's class in a guarded object's class."""


@functools.cache
def _guarded_class(base: type, mixin: type) -> type:
    return type(base.__name__, (mixin, base), {})


def _plain_class(encoder) -> type:
    return type(encoder).__bases__[1] if isinstance(encoder, _Guarded) else type(encoder)


def _run_vae(vae, name: str, *args, **kwargs):
    def make(dtype: torch.dtype | None, given):
        one = vae_in(unguarded(vae), dtype) if dtype else unguarded(vae)
        sizes = _watched_output(one)
        result = getattr(one, name)(*given[0], **given[1])
        return result, _worst([*sizes, *map(amax_value, tensors_in(result))])

    action = name.removesuffix("_tiled")
    return getattr(vae, ATTRIBUTE).run(action, make, vae.patcher, vae.vae_dtype, [list(args), kwargs])


def _watched_output(vae) -> list[float]:
    """Note in a list the largest magnitude that a VAE's output clamp is given at each call: after it, inf is white."""
    sizes, process = [], vae.process_output

    def watch(image):
        sizes.append(amax_value(image))
        return process(image)

    vae.process_output = watch
    return sizes


def _run_clip(clip, name: str, tokens, *args, **kwargs):
    def make(dtype: torch.dtype | None, given):
        one = unguarded(clip.clone() if dtype else clip)
        if dtype:
            one.patcher.set_model_compute_dtype(dtype)
            ask_for_plain_products(one.patcher)
        result = getattr(one, name)(given, *args, **kwargs)
        return result, _worst(map(amax_value, tensors_in(result)))

    dtype = clip.patcher.object_patches.get(CAST_DTYPE) or torch.float32
    return getattr(clip, ATTRIBUTE).run("encode", make, clip.patcher, dtype, tokens)


class _GuardedVAE(_Guarded):
    decode = functools.partialmethod(_run_vae, "decode")
    decode_tiled = functools.partialmethod(_run_vae, "decode_tiled")
    encode = functools.partialmethod(_run_vae, "encode")
    encode_tiled = functools.partialmethod(_run_vae, "encode_tiled")


class _GuardedCLIP(_Guarded):
    encode_from_tokens = functools.partialmethod(_run_clip, "encode_from_tokens")
    encode_from_tokens_scheduled = functools.partialmethod(_run_clip, "encode_from_tokens_scheduled")

    def clone(self, *args, **kwargs):
        clone = _as(type(self), super().clone(*args, **kwargs))
        setattr(clone, ATTRIBUTE, getattr(self, ATTRIBUTE))
        return clone


def _worst(sizes) -> float:
    return max(sizes, key=lambda size: size if math.isfinite(size) else math.inf, default=0.0)
