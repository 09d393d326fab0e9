"""The gate: the one place through which ComfyUI's call of a layer enters our code.

After ComfyUI 0.39 a linear layer is called with more than its input (Comfy-Org/ComfyUI#16816): ``layer(x, input_act,
act_weight, residual, residual_scale)`` is ``residual + residual_scale * linear(act(x))``. The gate computes the
activation and the residual as ComfyUI does, around a forward of ours that is given the plain input. The activation
therefore sees what the stream holds, fp32 in a wide stream, and the residual is added in the dtype of the stream.

    ComfyUI's call -> gate: act(x) -> forward of ours(act(x)) -> gate: residual + residual_scale * result
"""

import functools
import inspect
import weakref
from collections.abc import Callable

import comfy.ops
import torch

from ....precision.arithmetic.linear import kind_of
from ....precision.base.errors import HalfsafeError
from .attributes import FORWARDS

Forward = Callable[..., torch.Tensor]
ACTIVATION = "input_act"
OF_ACTIVATION = ("act_weight", "act_eps")
RESIDUAL = "residual"
OF_RESIDUAL = "residual_scale"
_unfused: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
FOLDED = (ACTIVATION, *OF_ACTIVATION, RESIDUAL, OF_RESIDUAL)
"""The parameters of a layer's call that the gate computes by itself."""


def entering(module: torch.nn.Module, forward: Forward) -> Forward:
    """Return what to put on ``module.forward`` in place of ``forward``, which takes the input alone.

    ``forward`` itself where neither the module's class nor ComfyUI's own Linear folds anything into the layer.
    """
    folds = folded_parameters(type(module))
    if not folds and kind_of(module) == "linear":
        folds = folded_parameters(comfy.ops.manual_cast.Linear)  # a layer of another pack, which ComfyUI calls alike
    return Gate(module, forward, folds).__call__ if folds else forward


def product_of(module: torch.nn.Module, args: tuple, kwargs: dict, result: torch.Tensor) -> tuple:
    """Return ``(input, result)`` of the product in a layer's call: what the layer multiplied, and what that gave.

    Where something is folded into the layer, its forward is called again with the activated input alone.
    """
    gate = getattr(module.forward, "__self__", None)
    if not isinstance(gate, Gate) or (len(args) < 2 and not kwargs):
        return args[:1], result
    folded, others = gate.sort_arguments(args[1:], kwargs)
    operand = activated(args[0], folded)
    return operand, gate.forward(operand, **others)


def folded_parameters(cls: type) -> tuple[str, ...]:
    """Return the parameters of a class's forward after its input, by their places, if one of them is folded."""
    names = parameters_of(cls)[1:]
    return names if set(names) & set(FOLDED) else ()


def parameters_of(cls: type) -> tuple[str, ...]:
    """Return the parameters by name that a layer class of ComfyUI's takes in a call, over the methods that carry the
    call out: its ``forward`` may take ``*args, **kwargs`` and hand them on."""
    return _parameters(tuple(getattr(cls, name, None) for name in FORWARDS[:2]))


@functools.cache
def _parameters(methods: tuple[Callable | None, ...]) -> tuple[str, ...]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names: dict[str, None] = {}
    for method in filter(None, methods):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        names |= {each.name: None for each in parameters if each.kind not in variadic}
    return tuple(names)


def note_unfused(module: torch.nn.Module) -> None:
    """Note that the activation of a layer is computed before its product, not in ComfyUI's fused kernel."""
    if not torch.compiler.is_compiling():
        _unfused.add(module)


def is_unfused(module: torch.nn.Module) -> bool:
    """Tell whether some call computed the activation of a layer before its product."""
    return module in _unfused


class Gate:
    """Call a forward of ours with the plain input, inside of what ComfyUI folds into the layer.

    ``names``: the parameters of the layer's call after its input, by their places.
    """

    __slots__ = ("forward", "module", "names")

    def __init__(self, module: torch.nn.Module, forward: Forward, names: tuple[str, ...]):
        self.module = module
        self.forward = forward
        self.names = names

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if not args and not kwargs:
            return self.forward(input)
        folded, others = self.sort_arguments(args, kwargs)
        if folded.get(ACTIVATION) is not None:
            note_unfused(self.module)
        result = self.forward(activated(input, folded), **others)
        return with_residual(result, folded)

    def __repr__(self) -> str:
        return f"Gate({getattr(self.forward, '__self__', self.forward)!r})"

    def sort_arguments(self, args: tuple, kwargs: dict) -> tuple[dict, dict]:
        """Sort the arguments of a call after its input into what the gate computes, and what the forward is given."""
        if len(args) > len(self.names):
            layer = type(self.module).__name__
            raise TypeError(f"{layer} takes {len(self.names)} arguments more, and got {len(args)}.")
        given = dict(zip(self.names, args, strict=False)) | kwargs
        folded = {name: given.pop(name) for name in FOLDED if name in given}
        return folded, given


def activated(x: torch.Tensor, folded: dict) -> torch.Tensor:
    """Return the input that a layer multiplies: ComfyUI's own activation of ``x``, in the dtype of ``x``.

    Raises:
        HalfsafeError: for an activation that this ComfyUI gives no function for.
    """
    name = folded.get(ACTIVATION)
    if name is None:
        return x
    of_core = getattr(comfy.ops, "_eager_input_act", None)
    if of_core is not None:
        return of_core(x, name, *(folded[each] for each in OF_ACTIVATION if each in folded))
    if name not in comfy.ops.INPUT_ACT_EAGER:
        raise HalfsafeError(
            f"ComfyUI folds the activation '{name}' into a layer, and Halfsafe finds no function for it in comfy.ops. "
            f"Update Halfsafe, or take its nodes out of this model."
        )
    return comfy.ops.INPUT_ACT_EAGER[name](x)


def with_residual(result: torch.Tensor, folded: dict) -> torch.Tensor:
    """Return ``residual + residual_scale * result``, in the wider of their dtypes; ``result`` without a residual."""
    residual, scale = folded.get(RESIDUAL), folded.get(OF_RESIDUAL)
    if residual is None:
        return result
    if scale is None:
        return residual + result
    return torch.addcmul(residual, result, scale) if isinstance(scale, torch.Tensor) else residual + result * scale
