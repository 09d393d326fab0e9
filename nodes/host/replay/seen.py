"""What ComfyUI's own code multiplied in, of the layers that it runs itself: seen in a call, not
read from its rules."""

import contextlib
import weakref
from collections.abc import Iterator
from functools import partial

import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from torch.overrides import TorchFunctionMode

from ....precision.base.dtypes import name_of
from ....precision.base.patching import patched
from ..comfyui.attributes import CAST_DTYPE, PRODUCT, quantization_format
from ..comfyui.execution import is_compiled, trains
from ..comfyui.layer_forward import STANDING
from ..comfyui.layers import is_quantized, matrix_layers
from ..comfyui.weights import multiplies_in_fp8

Products = dict[str, tuple[str, bool]]
"""Layer -> the dtype of its input, and True if its quantized weight was multiplied as stored."""
_seen: weakref.WeakKeyDictionary[torch.nn.Module, tuple[tuple, Products]] = weakref.WeakKeyDictionary()


def own_products(patcher: ModelPatcher, plan: object) -> Products:
    """Return layer -> product, for the layers that ComfyUI's own code ran in the first call of the
    last run of a patcher under a plan; empty before that call. A product that bypasses the layer's
    forward is not seen."""
    state, products = _seen.get(patcher.model, ((), {}))
    return products if state == _state(patcher, plan) else {}


def forget(model: torch.nn.Module) -> None:
    """Look again in the next call of a model: what is merged into its weights may have changed."""
    _seen.pop(model, None)


@contextlib.contextmanager
def seeing(model: torch.nn.Module, plan: object) -> Iterator[None]:
    """See what ComfyUI's own code multiplies in a call of a model, if no call in its present state
    has shown it."""
    patcher = model.current_patcher
    state = _state(patcher, plan)
    if model in _seen and _seen[model][0] == state:
        yield
        return
    products: Products = {}
    with contextlib.nullcontext() if trains() or is_compiled(patcher) else _watching(model, products):
        yield
    _seen[model] = state, products


def _state(patcher: ModelPatcher, plan: object) -> tuple:
    return patcher.patches_uuid, plan and weakref.ref(plan), patcher.object_patches.get(CAST_DTYPE)


@contextlib.contextmanager
def _watching(model: torch.nn.Module, products: Products) -> Iterator[None]:
    layers, made = [*matrix_layers(model)], _Linear()
    with contextlib.ExitStack() as watched:
        if any(multiplies_in_fp8(module) for _, module in layers):
            watched.enter_context(made)
        for name, module in layers:
            if not is_quantized(module):
                handle = module.register_forward_pre_hook(partial(_note_input, products, name), with_kwargs=True)
                watched.callback(handle.remove)
                if multiplies_in_fp8(module):
                    watched.callback(module.register_forward_hook(partial(_note_operands, products, name, made)).remove)
            elif hasattr(module, PRODUCT):
                product = partial(_noted, products, name, quantization_format(module), getattr(module, PRODUCT))
                watched.enter_context(patched([(module, PRODUCT, product)]))
        yield


def _note_input(products: Products, name: str, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
    given = args[0] if args else kwargs.get("input")  # as torch's and ComfyUI's matrix layers name it
    if STANDING not in vars(module) and isinstance(given, torch.Tensor):
        products[name] = name_of(given.dtype), False


def _note_operands(products: Products, name: str, made: "_Linear", module: torch.nn.Module, *_) -> None:
    if STANDING not in vars(module) and name in products:
        products[name] = products[name][0], made.operands == (True, True)


def _noted(products: Products, name: str, format: str, product, x: torch.Tensor, weight: torch.Tensor, *args, **kwargs):
    quantizes_input = QUANT_ALGOS.get(format, {}).get("quantize_input", True)
    with _Linear() as made:
        result = product(x, weight, *args, **kwargs)
    if made.operands:
        as_stored = made.operands[1] and (made.operands[0] or not quantizes_input)
        products[name] = name_of(x.dtype), as_stored
    return result


class _Linear(TorchFunctionMode):
    """Note of the last ``linear`` whether its input, and whether its weight, is quantized."""

    operands: tuple[bool, ...] = ()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            self.operands = tuple(isinstance(each, QuantizedTensor) for each in args[:2])
        return func(*args, **(kwargs or {}))
