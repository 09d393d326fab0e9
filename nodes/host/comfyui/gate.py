"""The gate: the one place through which ComfyUI's call of a layer enters our code.

After ComfyUI 0.39 a linear layer is called with more than its input (Comfy-Org/ComfyUI#16816): ``layer(x, input_act,
act_weight, residual, residual_scale)`` is ``residual + residual_scale * linear(act(x))``. The gate computes the
activation and the residual as ComfyUI does, around a forward of ours that is given the plain input. The activation
therefore sees what the stream holds, fp32 in a wide stream, and the residual is added in the dtype of the stream.

    ComfyUI's call -> gate: act(x) -> forward of ours(act(x)) -> gate: residual + residual_scale * result
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator

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
_noted = threading.local()
_unfused: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
FOLDED = (ACTIVATION, *OF_ACTIVATION, RESIDUAL, OF_RESIDUAL)
"""The parameters of a layer's call that the gate computes by itself."""


def entering(module: torch.nn.Module, forward: Forward) -> Forward:
    """Return what to put on ``module.forward`` in place of ``forward``, which takes the input alone.

    ``forward`` itself if this ComfyUI folds nothing into a linear layer, or the module is none.
    """
    return _entering(module, forward, notes=True)


def measuring(module: torch.nn.Module, forward: Forward) -> Forward:
    """Return the same for a ``forward`` that measures and calls the layer's own."""
    return _entering(module, forward, notes=False)


def _entering(module: torch.nn.Module, forward: Forward, notes: bool) -> Forward:
    if kind_of(module) != "linear" or not folded_parameters(comfy.ops.manual_cast.Linear):
        return forward
    cls = type(module)
    if cls.forward.__module__ == comfy.ops.manual_cast.Linear.forward.__module__:
        return Gate(module, forward, parameters_of(cls)[1:], FOLDED, notes).__call__
    # A layer of another pack may mean something else by a name or a place: what ComfyUI gives it by name is folded.
    folds = tuple(name for name in FOLDED if name not in parameters_of(cls))
    return Gate(module, forward, (), folds, notes).__call__


def folded_parameters(cls: type) -> tuple[str, ...]:
    """Return the parameters of a class's forward after its input that are folded, in their order."""
    return tuple(name for name in parameters_of(cls)[1:] if name in FOLDED)


@contextlib.contextmanager
def products_noted() -> Iterator[None]:
    """Have gates of this thread keep ``(input, result)`` of their products for :func:`product_of`."""
    _noted.products = {}
    try:
        yield
    finally:
        _noted.products = None


def product_of(module: torch.nn.Module, args: tuple, result: torch.Tensor) -> tuple:
    """Return ``(input, result)`` of the product in a layer's call that just ended, inside :func:`products_noted`."""
    return _noted.products.pop(module, (args[:1], result))


def parameters_of(cls: type) -> tuple[str, ...]:
    """Return the parameters by name that a layer class of ComfyUI's takes in a call: those of ``forward``, or of the
    method that a ``forward`` of ``*args, **kwargs`` hands them on to."""
    return _parameters(tuple(getattr(cls, name, None) for name in FORWARDS[:2]))


@functools.cache
def _parameters(methods: tuple[Callable | None, ...]) -> tuple[str, ...]:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for method in filter(None, methods):
        parameters = list(inspect.signature(method).parameters.values())[1:]
        if names := tuple(each.name for each in parameters if each.kind not in variadic):
            return names
    return ()


def note_unfused(module: torch.nn.Module) -> None:
    """Note that the activation of a layer is computed before its product, not in ComfyUI's fused kernel."""
    if not torch.compiler.is_compiling():
        _unfused.add(module)


def is_unfused(module: torch.nn.Module) -> bool:
    """Tell whether some call computed the activation of a layer before its product."""
    return module in _unfused


class Gate:
    """Call a forward of ours with the plain input, inside of what ComfyUI folds into the layer.

    ``names``: the parameters of the layer's call after its input, by their places; none for a layer of another pack,
    whose places stay. ``folds``: those that are folded. ``notes``: note that no fused kernel runs.
    """

    __slots__ = ("folds", "forward", "module", "names", "notes")

    def __init__(
        self, module: torch.nn.Module, forward: Forward, names: tuple[str, ...], folds: tuple[str, ...], notes: bool
    ):
        self.module = module
        self.forward = forward
        self.names = names
        self.folds = folds
        self.notes = notes

    def __call__(self, input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if not args and not kwargs:
            return self.forward(input)
        if self.names:
            args, kwargs = (), self._named(args) | kwargs
        folded = {name: kwargs.pop(name) for name in self.folds if name in kwargs}
        if self.notes and folded.get(ACTIVATION) is not None:
            note_unfused(self.module)
        operand = activated(input, folded)
        result = self.forward(operand, *args, **kwargs)
        if folded and getattr(_noted, "products", None) is not None:
            _noted.products[self.module] = operand, result
        return with_residual(result, folded)

    def __repr__(self) -> str:
        return f"Gate({getattr(self.forward, '__self__', self.forward)!r})"

    def _named(self, args: tuple) -> dict:
        if len(args) > len(self.names):
            layer = type(self.module).__name__
            raise TypeError(f"{layer} takes {len(self.names)} more arguments, but got {len(args)}.")
        return dict(zip(self.names, args, strict=False))


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
        return of_core(x, name, **{each: folded[each] for each in OF_ACTIVATION if each in folded})
    if name not in comfy.ops.INPUT_ACT_EAGER:
        raise HalfsafeError(
            f"ComfyUI fuses the activation '{name}' into a layer, and Halfsafe finds no function for it in comfy.ops. "
            "Update Halfsafe, or remove its nodes from this model."
        )
    return comfy.ops.INPUT_ACT_EAGER[name](x)


def with_residual(result: torch.Tensor, folded: dict) -> torch.Tensor:
    """Return ``residual + residual_scale * result``, in the wider of their dtypes; ``result`` without a residual."""
    residual, scale = folded.get(RESIDUAL), folded.get(OF_RESIDUAL)
    if residual is None:
        return result
    if scale is None:
        return residual + result
    if isinstance(scale, torch.Tensor):
        return torch.addcmul(residual, result, scale)
    return torch.add(residual, result, alpha=scale)
