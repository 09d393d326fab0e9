"""The self-test at start-up: a tiny layer of each class, a norm and an attention, called through
our code and alone. A quantized layer is called through each product that calls bind to it.

What runs otherwise through our code is left to ComfyUI's own from then on.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import comfy.ldm.modules.attention
import comfy.ops
import comfy.quant_ops
import torch
import torch.nn.functional as F

from ....precision.arithmetic.linear import lent
from ....precision.base.message import Message
from ....precision.base.patching import Patch, patched
from ....precision.base.surroundings import neutral
from ....precision.version import VERSION
from .attributes import OVERRIDE, casting, set_quantization_format
from .gate import ACTIVATION, NORM, OF_RESIDUAL, RESIDUAL, UNEQUAL, activated, folded_parameters
from .layer_forward import LayerForward
from .weights import Bound, core_weights, exchanged, uncast_norm

SIZE = 32
ATTENTION = "attention"
LAYOUTS = {"float8_e4m3fn": "TensorCoreFP8E4M3Layout", "int8_tensorwise": "TensorWiseINT8Layout"}
"""ComfyUI's quantization formats that are tested -> the layout of their weights."""
MOST_ERROR = 0.05
"""Relative error: int8 and fp8 layers round their input to 8 bits, of which ours knows nothing. A
dropped argument is off by 0.27 and more."""
OTHERWISE = (
    "A layer of this ComfyUI ({0}) returns another result through Halfsafe {1} than alone, so all layers of its kind "
    "run ComfyUI's own code. Update Halfsafe."
)
UNASKED = (
    "The attention of this ComfyUI does not ask Halfsafe {0}, so settings of attention have no effect. Update Halfsafe."
)
logger = logging.getLogger("halfsafe")


def check_core(as_stored: Mapping[str, type[Bound]]) -> None:
    """Note in ``UNEQUAL``, and log, what runs otherwise through our code than alone.

    ``as_stored``: ComfyUI's name of a format -> what multiplies by such a weight as it is stored.
    """
    UNEQUAL.clear()
    with neutral(torch.device("cpu")), torch.inference_mode():
        for kind, layer, patches in _layers(as_stored):
            if kind not in UNEQUAL and (unequal := _unequal(kind, layer, patches)):
                UNEQUAL[kind] = Message(OTHERWISE, unequal, VERSION)
        if not _asks_for_attention():
            UNEQUAL[ATTENTION] = Message(UNASKED, VERSION)
    for sentence in UNEQUAL.values():
        logger.warning("Halfsafe: %s", sentence)


def _layers(
    as_stored: Mapping[str, type[Bound]],
) -> Iterator[tuple[str, torch.nn.Module, Callable[[torch.nn.Module], list[Patch]]]]:
    """Yield (kind, layer, function that returns the patches of our code): a layer without a format;
    a layer of each format that this ComfyUI and its kernels have, with each product that is bound
    to it; a norm."""
    yield "", _with_weight(comfy.ops.manual_cast.Linear, _numbers(SIZE, SIZE)), _multiplied
    quantized = comfy.ops.mixed_precision_ops({}, torch.float32).Linear
    for name, layout in LAYOUTS.items():
        if name in comfy.quant_ops.QUANT_ALGOS and hasattr(comfy.quant_ops.QuantizedTensor, "from_float"):
            weight = comfy.quant_ops.QuantizedTensor.from_float(_numbers(SIZE, SIZE), layout)
            layer = _with_weight(quantized, weight)
            set_quantization_format(layer, name, layout)
            for product in (Bound, as_stored[name]):
                yield name, layer, partial(_bound, product)
    norm = comfy.ops.manual_cast.LayerNorm(SIZE, dtype=torch.float32, device="cpu")
    yield NORM, _filled(norm, _numbers(SIZE)), uncast_norm


def _with_weight(cls: type, weight: torch.Tensor) -> torch.nn.Module:
    return _filled(cls(SIZE, SIZE, dtype=torch.float32, device="cpu"), weight)


def _filled(layer: torch.nn.Module, weight: torch.Tensor) -> torch.nn.Module:
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(_numbers(SIZE), requires_grad=False)
    return layer


def _numbers(*shape: int) -> torch.Tensor:
    """Return numbers of both signs around 1, without a draw from any generator."""
    count = math.prod(shape)
    return (torch.arange(1, count + 1, dtype=torch.float32) * 2.399963).sin().mul_(2.0).view(shape)


def _multiplied(layer: torch.nn.Module) -> list[Patch]:
    def product(x: torch.Tensor) -> torch.Tensor:
        with lent(core_weights(layer, x, torch.float32)) as (weight, bias):
            return F.linear(x, weight, bias)

    return [*exchanged(LayerForward(layer, product, otherwise=LayerForward.on(layer))), *casting(layer)]


def _bound(product: type[Bound], layer: torch.nn.Module) -> list[Patch]:
    forward = LayerForward(layer, product(layer).__call__, otherwise=LayerForward.on(layer))
    return [*exchanged(forward), *casting(layer)]


def _unequal(kind: str, layer: torch.nn.Module, patches: Callable) -> str:
    """Return the kind and the argument that ComfyUI computes otherwise than our code does, or that
    raises; empty if all are equal."""
    for argument, arguments in _calls(layer):
        try:
            error = _error(layer, arguments, patches(layer))
        except Exception as raised:  # whatever it is, such layers run ComfyUI's own code and the prompt goes on
            return f"{kind or 'plain'}, {argument}: {type(raised).__name__}"
        if not error <= MOST_ERROR:
            return f"{kind or 'plain'}, {argument}"
    return ""


def _calls(layer: torch.nn.Module) -> Iterator[tuple[str, dict]]:
    """Yield the arguments of a call besides its input, each that the class names, with a word for
    them."""
    names = folded_parameters(type(layer))
    yield "no argument", {}
    if ACTIVATION in names:
        for activation in comfy.ops.INPUT_ACT_EAGER:
            yield activation, {ACTIVATION: activation}
    if RESIDUAL in names:
        residual = {RESIDUAL: _numbers(2, SIZE)}
        yield RESIDUAL, residual
        yield OF_RESIDUAL, {**residual, OF_RESIDUAL: _numbers(SIZE)}


def _width(arguments: dict) -> int:
    """Return the number of inputs from which the activation makes ``SIZE``."""
    made = activated(torch.zeros(1, SIZE), arguments)
    return SIZE * SIZE // made.shape[-1]


def _error(layer: torch.nn.Module, arguments: dict, patches: list[Patch]) -> float:
    """Return the relative error of the layer through our code to the layer as ComfyUI runs it."""
    x = _numbers(2, _width(arguments))
    expected = layer(x, **arguments)
    with patched(patches):
        result = layer(x, **arguments)
    return ((result - expected).norm() / expected.norm()).item()


def _asks_for_attention() -> bool:
    """True if ComfyUI's attention runs as an override in the options has it."""
    attention, x = comfy.ldm.modules.attention.attention_pytorch, _numbers(1, 2, SIZE)

    def override(function: Callable, *args, **kwargs) -> torch.Tensor:
        return 2 * function(*args, **kwargs)

    try:
        alone = attention(x, x, x, 1)
        return torch.equal(attention(x, x, x, 1, transformer_options={OVERRIDE: override}), 2 * alone)
    except Exception:  # whatever it is, the prompt goes on
        return False
