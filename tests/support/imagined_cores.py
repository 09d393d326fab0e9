"""Versions of ComfyUI that may come, imagined: the pinned core with a parameter more on one of the callables that the pack stands in for, with parameters
that are gone or have another name, with layers that are multiplied past their forward, and with classes in another module.

Each is a context manager. Where a parameter is passed it does something, so that dropping it gives another picture: it multiplies the result.
"""

# ruff: noqa: B006  ComfyUI's own default of transformer_options

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch

GAIN = "gain"
"""The parameter that no ComfyUI has. It multiplies a result; None changes nothing."""
LINEAR, MIXED = "Linear", "mixed Linear"
LAYERS = (
    LINEAR,
    MIXED,
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "LayerNorm",
    "GroupNorm",
    "RMSNorm",
)
FORMS = ("keyword", "placed", "required")
"""How a parameter is added: by its name alone, in a place, without a default."""


@contextlib.contextmanager
def changed(owner, name: str, value) -> Iterator[None]:
    """Set an attribute while the context lasts."""
    kept = owner.__dict__.get(name) if isinstance(owner, type) else getattr(owner, name, None)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if kept is None else setattr(owner, name, kept)


def multiplied(result, gain):
    return result if gain is None else result * gain


def taking(plain: Callable, form: str) -> Callable:
    """A forward that takes the parameter besides what ``plain`` takes."""
    if form == "keyword":

        def forward(self, input, *args, gain=None, **kwargs):
            return multiplied(plain(self, input, *args, **kwargs), gain)

    elif form == "placed":

        def forward(self, input, gain=None, *args, **kwargs):
            return multiplied(plain(self, input, *args, **kwargs), gain)

    else:

        def forward(self, input, gain, *args, **kwargs):
            return multiplied(plain(self, input, *args, **kwargs), gain)

    forward.__module__ = "comfy.ops"
    return forward


@contextlib.contextmanager
def layers_take(kind: str, form: str = "keyword", passed: tuple = ()) -> Iterator[None]:
    """Layers of a kind take the parameter. ``passed``: what each call of such a layer passes, nothing or one value."""
    import comfy.ops

    def call(self, *args, **kwargs):
        given = {} if "gain" in kwargs or len(args) > 1 else dict(zip((GAIN,), passed, strict=False))
        if form == "placed" and given:
            return torch.nn.Module.__call__(self, *args, given[GAIN], **kwargs)
        return torch.nn.Module.__call__(self, *args, **{**kwargs, **given})

    with contextlib.ExitStack() as held:

        def change(cls: type) -> None:
            held.enter_context(changed(cls, "forward", taking(cls.forward, form)))
            if passed:
                held.enter_context(changed(cls, "__call__", call))

        if kind != MIXED:
            change(getattr(comfy.ops.disable_weight_init, kind))
        if kind in (LINEAR, MIXED):
            make = comfy.ops.mixed_precision_ops

            def made(*args, **kwargs):
                operations = make(*args, **kwargs)
                change(operations.Linear)
                return operations

            held.enter_context(changed(comfy.ops, "mixed_precision_ops", made))
        yield


@contextlib.contextmanager
def layers_renamed() -> Iterator[None]:
    """A Linear's input has another name, and the layer is called by it."""
    import comfy.ops

    def forward(self, activations):
        return plain(self, activations)

    forward.__module__ = "comfy.ops"
    plain = comfy.ops.disable_weight_init.Linear.forward

    def call(self, *args, **kwargs):
        return torch.nn.Module.__call__(self, **dict(zip(("activations",), args, strict=False)), **kwargs)

    linear = comfy.ops.disable_weight_init.Linear
    with changed(linear, "forward", forward), changed(linear, "__call__", call):
        yield


@contextlib.contextmanager
def attention_takes(form: str = "keyword", passed: tuple = ()) -> Iterator[None]:
    """ComfyUI's attention takes the parameter, which Wan passes."""
    from comfy.ldm.modules import attention
    from comfy.ldm.wan import model

    plain = attention.attention_pytorch.__wrapped__
    if form == "keyword":

        def attention_pytorch(
            q,
            k,
            v,
            heads,
            mask=None,
            attn_precision=None,
            skip_reshape=False,
            skip_output_reshape=False,
            gain=None,
            **kwargs,
        ):
            return multiplied(
                plain(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs), gain
            )

    else:

        def attention_pytorch(
            q,
            k,
            v,
            heads,
            gain=None,
            mask=None,
            attn_precision=None,
            skip_reshape=False,
            skip_output_reshape=False,
            **kwargs,
        ):
            return multiplied(
                plain(q, k, v, heads, mask, attn_precision, skip_reshape, skip_output_reshape, **kwargs), gain
            )

    if form == "renamed":

        def attention_pytorch(q, k, v, heads, attn_mask=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
            return plain(q, k, v, heads, attn_mask, None, skip_reshape, skip_output_reshape, **kwargs)

    function = attention.wrap_attn(attention_pytorch)
    by_place = form == "placed"

    def of_model(q, k, v, *args, heads=None, **kwargs):
        args = (heads, *args) if heads is not None else args
        return function(
            q,
            k,
            v,
            *args,
            *(passed if by_place else ()),
            **kwargs,
            **({} if by_place else dict(zip((GAIN,), passed, strict=False))),
        )

    with (
        changed(attention, "attention_pytorch", function),
        changed(attention, "optimized_attention", function),
        changed(model, "optimized_attention", of_model),
    ):
        yield


@contextlib.contextmanager
def model_takes(form: str = "keyword") -> Iterator[None]:
    """``BaseModel.apply_model`` takes the parameter, in a place before the options, or has lost or renamed others."""
    import comfy.model_base
    import comfy.patcher_extension as extension

    plain = comfy.model_base.BaseModel._apply_model

    def around(self, options):
        wrappers = extension.get_all_wrappers(extension.WrappersMP.APPLY_MODEL, options)
        return extension.WrapperExecutor.new_class_executor(self._apply_model, self, wrappers)

    if form == "keyword":

        def inner(
            self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, gain=None, **kwargs
        ):
            return multiplied(plain(self, x, t, c_concat, c_crossattn, control, transformer_options, **kwargs), gain)

        def outer(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):
            return around(self, transformer_options).execute(
                x, t, c_concat, c_crossattn, control, transformer_options, **kwargs
            )

    elif form == "placed":

        def inner(
            self, x, t, c_concat=None, c_crossattn=None, control=None, gain=None, transformer_options={}, **kwargs
        ):
            return multiplied(plain(self, x, t, c_concat, c_crossattn, control, transformer_options, **kwargs), gain)

        def outer(
            self, x, t, c_concat=None, c_crossattn=None, control=None, gain=None, transformer_options={}, **kwargs
        ):
            return around(self, transformer_options).execute(
                x, t, c_concat, c_crossattn, control, gain, transformer_options, **kwargs
            )

    elif form == "removed":

        def inner(self, x, t, c_crossattn=None, transformer_options={}, **kwargs):
            return plain(self, x, t, None, c_crossattn, None, transformer_options, **kwargs)

        def outer(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):
            return around(self, transformer_options).execute(x, t, c_crossattn, transformer_options, **kwargs)

    else:

        def inner(self, x, t, concat=None, context=None, control=None, transformer_options={}, **kwargs):
            return plain(self, x, t, concat, context, control, transformer_options, **kwargs)

        def outer(self, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options={}, **kwargs):
            return around(self, transformer_options).execute(
                x, t, c_concat, c_crossattn, control, transformer_options, **kwargs
            )

    base = comfy.model_base.BaseModel
    with changed(base, "_apply_model", inner), changed(base, "apply_model", outer):
        yield


@contextlib.contextmanager
def sampling_takes(passed: tuple = (), own: bool = False) -> Iterator[None]:
    """``calculate_input`` of Wan's model sampling takes the parameter. ``own``: of a class that no version has had."""
    import comfy.model_base
    import comfy.model_sampling

    sampling, base = comfy.model_sampling.CONST, comfy.model_base.BaseModel
    plain, apply = sampling.calculate_input, base._apply_model

    def takes(self, sigma, noise, gain=None):
        return multiplied(plain(self, sigma, noise), gain)

    def inner(self, *args, **kwargs):
        place = self.model_sampling.__dict__
        before = place.get("calculate_input")
        place["calculate_input"] = functools.partial(
            self.model_sampling.calculate_input, **dict(zip((GAIN,), passed, strict=False))
        )
        try:
            return apply(self, *args, **kwargs)
        finally:
            place.pop("calculate_input") if before is None else place.update(calculate_input=before)

    with contextlib.ExitStack() as held:
        if own:
            cls = type("ModelSamplingImagined", (sampling,), {"calculate_input": takes})
            held.enter_context(changed(comfy.model_sampling, "CONST", cls))
        else:
            held.enter_context(changed(sampling, "calculate_input", takes))
        held.enter_context(changed(base, "_apply_model", inner))
        yield


PATCHER_METHODS = ("inject_model", "get_combined_hook_patches", "model_patches_models", "model_state_dict")


@contextlib.contextmanager
def patcher_takes(name: str, seen: list) -> Iterator[None]:
    """A method of ComfyUI's patchers takes the parameter; what it got is added to ``seen``."""
    from comfy.model_patcher import ModelPatcher

    plain = getattr(ModelPatcher, name)

    def method(self, *args, gain=None, **kwargs):
        seen.append(gain)
        return plain(self, *args, **kwargs)

    with changed(ModelPatcher, name, method):
        yield


def combined(layers, x: torch.Tensor) -> list[torch.Tensor]:
    """The results of layers with one input, by one product of all their weights, as ComfyUI 0.45 multiplies (#17361)."""
    import comfy.ops
    from comfy.quant_ops import QuantizedTensor

    lent = [comfy.ops.cast_bias_weight(layer, x, offloadable=True) for layer in layers]
    weights = [weight.dequantize() if isinstance(weight, QuantizedTensor) else weight for weight, _, _ in lent]
    biases = [
        torch.zeros_like(weight[:, 0]) if bias is None else bias
        for weight, (_, bias, _) in zip(weights, lent, strict=True)
    ]
    results = torch.nn.functional.linear(x, torch.cat(weights), torch.cat(biases)).split(
        [len(weight) for weight in weights], -1
    )
    for layer, (weight, bias, stream) in zip(layers, lent, strict=True):
        comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return list(results)


@contextlib.contextmanager
def never_called(cls: type, *names: str) -> Iterator[None]:
    """Layers of a module, by their names in it, are multiplied together past their forwards."""
    plain = cls.forward

    def forward(self, *args, **kwargs):
        layers, made = [getattr(self, name) for name in names], {}

        def part(place: int, x: torch.Tensor) -> torch.Tensor:
            if id(x) not in made:
                made[id(x)] = x, combined(layers, x)
            return made[id(x)][1][place]

        # What an instance has of its own comes before its modules.
        self.__dict__.update({name: functools.partial(part, place) for place, name in enumerate(names)})
        try:
            return plain(self, *args, **kwargs)
        finally:
            for name in names:
                del self.__dict__[name]

    with changed(cls, "forward", forward):
        yield


@contextlib.contextmanager
def moved() -> Iterator[None]:
    """ComfyUI's operations are in a module of another name, from which ``comfy.ops`` takes them."""
    import comfy.ops

    with contextlib.ExitStack() as held:
        operations = comfy.ops.disable_weight_init
        for cls in (each for each in vars(operations).values() if isinstance(each, type)):
            for name in ("forward", "forward_comfy_cast_weights"):
                if name in vars(cls):
                    held.enter_context(changed(vars(cls)[name], "__module__", "comfy.operations"))
        yield


@contextlib.contextmanager
def function_takes(owner, name: str) -> Iterator[list]:
    """A function of a module takes the parameter; yields what it was given."""
    plain, given = getattr(owner, name), []

    def run(*args, gain=None, **kwargs):
        given.append(gain)
        return plain(*args, **kwargs)

    with changed(owner, name, run):
        yield given
