"""Guarded VAEs and text encoders: copies whose results are checked and, if not finite, computed again in higher
precision."""

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.sd import VAE
from torch.overrides import TorchFunctionMode

from ....precision.base.amax import amax_value
from ....precision.base.dtypes import name_of
from ....precision.base.message import Message
from ....precision.base.nested import floats_in, tensors_in
from ....precision.base.patching import Patch, SharedScope, patched
from ....precision.base.surroundings import autocasts, own_dtypes
from ....precision.devices.random_start import RandomStart
from ....precision.guard.failed_call import Attempt, FailedCall
from ....precision.guard.inputs import NotFiniteInput, inputs_not_finite
from ....precision.guard.ladder import Ladder
from ....precision.guard.localize import Localizer, Origin
from ....precision.guard.log import CallPosition
from ....precision.guard.policy import OnNan
from ....precision.guard.rungs import EncoderStep, Rung, encoder_rungs
from ....precision.guard.verdicts import ENCODER_INPUTS, ENCODERS, NO_CHOICE, NonFinite
from ..comfyui.attributes import CAST_DTYPE, caches_in_int8
from ..comfyui.code_owner import code_owner
from ..comfyui.execution import is_oom
from ..comfyui.layer_forward import with_frame
from ..comfyui.layers import is_quantized
from ..comfyui.page import show_progress
from ..comfyui.weights import HALF, ask_for_plain_products
from ..load.devices import current_device
from ..load.encoders import vae_in
from ..replay.interceptor import in_calls
from ..replay.model_compiler import repeating
from .causes import LoadedWeights
from .notices import guard_log

ATTRIBUTE = "halfsafe_guard"
OF = {"VAE": "vae", "Text encoder": "clip"}
SETTING = {"VAE": "dtype", "Text encoder": "storage"}
VAE_METHODS = tuple(
    f"{action}{how}" for action in ("decode", "encode") for how in ("", "_tiled", "_tiled_", "_tiled_1d", "_tiled_3d")
)
CLIP_METHODS = ("encode_from_tokens", "encode_from_tokens_scheduled", "generate")
INT8_CACHE = "int8 KV cache"
CHOICES = ("argmax", "topk", "multinomial")
MISSING = (
    "The loaded file contains no {0} that ComfyUI recognises, so none is guarded; the rest is. Load a {0} from a file "
    "of its own."
)
_without_bf16 = SharedScope(
    lambda: patched([(comfy.model_management, "should_use_bf16", lambda *args, **kwargs: False)])
)
logger = logging.getLogger("halfsafe")
Make = Callable[[EncoderStep | None, Any, Sequence[str]], Attempt]


class EncoderGuard:
    """The guard of one VAE or text encoder, named ``kind``, with its log."""

    def __init__(self, kind: str, on_nan: OnNan, node_id: str | None):
        self.kind = kind
        self.log = guard_log(on_nan, node_id, of=OF[kind])

    def run(self, action: str, make: Make, patcher: ModelPatcher, dtype: torch.dtype, given: Any) -> Any:
        """Return ``make(None, given, ())``, or the result of a wider step if that is not finite.

        ``make``: makes an attempt at a step; None for the encoder's own dtype. Its last argument are names of weights
        that get a zero for each NaN and Inf.

        Raises:
            NonFinite: there is no finite result, or the guard is set to stop.
        """
        with in_calls.of(patcher.model):
            return self._run(action, make, patcher, dtype, given)

    def _run(self, action: str, make: Make, patcher: ModelPatcher, dtype: torch.dtype, given: Any) -> Any:
        number = self.log.begin_call()
        self.log.begin_run()
        start = RandomStart.of(patcher.load_device)
        attempt = make(None, given, ())
        if attempt.finite:
            self.log.notify_calls(1)
            return attempt.result
        quantized = any(map(is_quantized, patcher.model.modules()))
        casts = bool(autocasts(patcher.load_device))
        rungs = encoder_rungs(dtype, current_device().capabilities["bf16"], quantized, casts)
        call = _EncoderCall(
            given,
            attempt.result,
            start,
            CallPosition(number),
            images=next(map(len, floats_in(attempt.result)), 1),
            device=patcher.load_device,
            weights=LoadedWeights(patcher, SETTING[self.kind]),
            wording=ENCODERS[self.kind],
            rungs=rungs,
            fp32=rungs[-1],
            is_out_of_memory=is_oom,
            locates_first=False,
            default_origin=Origin(
                f"{self.kind} {action}", _cache(action, patcher), "overflow", name_of(dtype), math.nan
            ),
        )
        call.make, call.dtype = make, dtype
        result = Ladder(call, self.log).resolved()
        if attempt.error and result is attempt.result:
            raise attempt.error
        return result


def _cache(action: str, patcher: ModelPatcher) -> str:
    """Name the cache of quantized keys and values that a text encoder generates with; "" for none. A repeat in fp32
    has none."""
    if action != "generate":
        return ""
    is_int8 = any(caches_in_int8(module, patcher.load_device) for module in patcher.model.modules())
    return INT8_CACHE if is_int8 else ""


class _EncoderCall(FailedCall):
    """A call of a VAE or text encoder that ran in ``dtype``. Methods do what ``FailedCall`` says of them."""

    make: Make
    dtype: torch.dtype

    def repeat(
        self, rung: Rung[EncoderStep], given: Any, why: str, zeroed: Sequence[str] = (), watched: bool = False
    ) -> Attempt:
        show_progress(Message("Repeating {0} {1}", self.default_origin.layer, why))
        localizer = Localizer(self.weights.model, with_frame) if watched else None
        watching = localizer.watching() if localizer else contextlib.nullcontext()
        dtypes = own_dtypes(self.device) if rung.arithmetic else contextlib.nullcontext()
        with repeating(), watching, dtypes:
            attempt = self.make(rung.arithmetic, given, zeroed)
        if localizer is None:
            return attempt
        found = [localizer.origin(tensor) for tensor in attempt.judged or floats_in(attempt.result)]
        return replace(attempt, origin=next(filter(None, found), None))

    def maker(self, layer: str) -> str:
        return code_owner(self.weights.model.get_submodule(layer).forward)

    def inputs(self) -> list[NotFiniteInput]:
        name, advice = ENCODER_INPUTS[self.default_origin.layer]
        return inputs_not_finite([(name, self.given)], {name: advice})

    def mode(self, origin: Origin | None) -> str:
        return name_of(self.dtype)

    def keep(self, rung: Rung[EncoderStep], origin: Origin | None, place: Origin | None) -> tuple[str, str]:
        """Keep nothing: the next call begins in the dtype that the encoder was loaded in."""
        return name_of(self.dtype), name_of(rung.arithmetic.dtype)


class TokenChoice(TorchFunctionMode):
    """Check the logits of a text encoder before it samples the next token from them. With NaN logits torch returns the
    first token, raises an error, or fails an assertion that makes the CUDA device unusable.

    ``goes_on``: sample nevertheless. ``failed``: the first logits that are not finite.
    """

    def __init__(self, goes_on: bool):
        super().__init__()
        self.goes_on = goes_on
        self.failed: torch.Tensor | None = None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if self.failed is None and getattr(func, "__name__", "") in CHOICES:
            self._look(next(iter(tensors_in((args, kwargs)))))
        return func(*args, **(kwargs or {}))

    def _look(self, numbers: torch.Tensor) -> None:
        if numbers.is_cuda and torch.cuda.is_current_stream_capturing():
            return  # MiniMax Music chooses codes inside of a CUDA graph (``ar.py``, 0.33), which allows no read
        largest = numbers.amax()  # a token that may not be chosen has -inf
        if not math.isfinite(largest.item()):
            self.failed = largest
            if not self.goes_on:
                raise NonFinite(NO_CHOICE)


def is_missing(encoder) -> bool:
    """Return whether a loader found no VAE or text encoder in its file: ComfyUI returns None, or a VAE without a
    module."""
    return encoder is None or (isinstance(encoder, VAE) and encoder.first_stage_model is None)


def guard_vae(vae, on_nan: OnNan, node_id: str | None = None):
    """Return a copy of the VAE whose results are checked; the original is not changed. A missing VAE is returned."""
    if is_missing(vae):
        return _passed_on(vae, "VAE")
    guarded = _as(_guarded_class(_plain_class(vae), _GuardedVAE), vae)
    guarded.patcher = vae.patcher.clone()
    setattr(guarded, ATTRIBUTE, EncoderGuard("VAE", on_nan, node_id))
    return guarded


def guard_clip(clip, on_nan: OnNan, node_id: str | None = None):
    """Return a clone of the text encoder whose results are checked. A missing one is returned."""
    if is_missing(clip):
        return _passed_on(clip, "text encoder")
    guarded = _as(_guarded_class(_plain_class(clip), _GuardedCLIP), clip.clone())
    setattr(guarded, ATTRIBUTE, EncoderGuard("Text encoder", on_nan, node_id))
    return guarded


def _passed_on(encoder, kind: str):
    logger.warning("Halfsafe guard: %s", Message(MISSING, kind))
    return encoder


def unguarded(guarded):
    """Return a copy of a VAE or text encoder whose results are not checked."""
    return _as(_plain_class(guarded), guarded)


def _as(kind: type, encoder):
    """Copy a VAE or text encoder as an object of a class."""
    made = object.__new__(kind)
    vars(made).update(vars(encoder))
    return made


class _Guarded:
    """Base of the mixins that precede ComfyUI's class in a guarded object's class."""


@functools.cache
def _guarded_class(base: type, mixin: type) -> type:
    return type(base.__name__, (mixin, base), {})


def _plain_class(encoder) -> type:
    return type(encoder).__bases__[1] if isinstance(encoder, _Guarded) else type(encoder)


def _run_vae(vae, name: str, *args, **kwargs):
    def make(step: EncoderStep | None, given, zeroed: Sequence[str]) -> Attempt:
        one = vae_in(unguarded(vae), step.dtype) if step else unguarded(vae)
        sizes = _watched_output(one)
        with patched(_prepared(one, step, zeroed)):
            result = getattr(one, name)(*given[0], **given[1])
        return Attempt(result, _worst([*sizes, *map(amax_value, floats_in(result))]))

    action = name.partition("_")[0]
    return getattr(vae, ATTRIBUTE).run(action, make, vae.patcher, vae.vae_dtype, [list(args), kwargs])


def _watched_output(vae) -> list[float]:
    """Return a list that receives the amax before a VAE's output clamp at each call: the clamp turns Inf into white."""
    sizes, process = [], vae.process_output

    def watch(image):
        sizes.append(amax_value(image))
        return process(image)

    vae.process_output = watch
    return sizes


def _run_clip(clip, name: str, tokens, *args, **kwargs):
    guard, action = getattr(clip, ATTRIBUTE), name.partition("_")[0]

    def make(step: EncoderStep | None, given, zeroed: Sequence[str]) -> Attempt:
        one = unguarded(clip.clone() if step else clip)
        if step:
            one.patcher.set_model_compute_dtype(step.dtype)
        patches = [*_prepared(one, step, zeroed), *_own_dtypes(one.cond_stage_model, step)]
        choice = TokenChoice(goes_on=guard.log.on_nan == "report")
        try:
            with choice, _generating_in(step), patched(patches):
                result = getattr(one, name)(given, *args, **kwargs)
        except Exception as error:
            if choice.failed is None:
                raise
            return Attempt(None, math.nan, [choice.failed], error)
        if choice.failed is not None:
            return Attempt(result, math.nan, [choice.failed])
        return Attempt(result, _worst(map(amax_value, floats_in(result))))

    device = clip.patcher.load_device
    bf16 = action == "generate" and comfy.model_management.should_use_bf16(device)
    dtype = torch.bfloat16 if bf16 else clip.patcher.object_patches.get(CAST_DTYPE) or torch.float32
    return guard.run(action, make, clip.patcher, dtype, tokens)


def _prepared(one, step: EncoderStep | None, zeroed: Sequence[str]) -> list[Patch]:
    """Prepare the copy of an encoder for a repeat. Returns patches for its length."""
    if step and step.unpacked:
        ask_for_plain_products(one.patcher)
    if not zeroed:
        return []
    one.patcher = one.patcher.clone()
    return LoadedWeights(one.patcher).zeroed(zeroed, one.patcher)


def _generating_in(step: EncoderStep | None) -> contextlib.AbstractContextManager:
    """Generate in fp32 at that step: ``BaseGenerate`` in comfy/text_encoders/llama.py takes its dtype from the device
    alone."""
    return _without_bf16 if step and step.dtype == torch.float32 else contextlib.nullcontext()


def _own_dtypes(model: torch.nn.Module, step: EncoderStep | None) -> list[Patch]:
    """Return patches of the ``dtype`` attributes in modules of a text encoder: gpt-oss computes in its own
    (``GptOssModel`` in comfy/text_encoders/gpt_oss.py)."""
    keeping = [module for module in model.modules() if vars(module).get("dtype") in HALF] if step else []
    return [(module, "dtype", step.dtype) for module in keeping]


class _GuardedVAE(_Guarded):
    """A VAE whose encode and decode methods are guarded."""


for _name in VAE_METHODS:
    setattr(_GuardedVAE, _name, functools.partialmethod(_run_vae, _name))


class _GuardedCLIP(_Guarded):
    def clone(self, *args, **kwargs):
        clone = _as(type(self), super().clone(*args, **kwargs))
        setattr(clone, ATTRIBUTE, getattr(self, ATTRIBUTE))
        return clone


for _name in CLIP_METHODS:
    setattr(_GuardedCLIP, _name, functools.partialmethod(_run_clip, _name))


def _worst(sizes) -> float:
    return max(sizes, key=lambda size: size if math.isfinite(size) else math.inf, default=0.0)
