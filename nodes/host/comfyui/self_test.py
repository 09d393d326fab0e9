"""The self-test at first use: one tiny layer of each class, called through the gate and by ComfyUI itself."""

import math
from collections.abc import Iterator

import comfy.ops
import comfy.quant_ops
import torch
import torch.nn.functional as F

from ....precision.arithmetic.linear import lent
from ....precision.base.patching import patched
from ....precision.base.surroundings import neutral
from .attributes import casting, set_quantization_format
from .gate import ACTIVATION, OF_RESIDUAL, RESIDUAL, activated, folded_parameters
from .weights import core_weights, exchanged

SIZE = 32
LAYOUTS = {"float8_e4m3fn": "TensorCoreFP8E4M3Layout", "int8_tensorwise": "TensorWiseINT8Layout"}
"""ComfyUI's quantization formats that are tested -> the layout of their weights."""
MOST_ERROR = 0.05
"""Relative error: int8 and fp8 layers round their input to 8 bits, of which ours knows nothing. A dropped argument is
off by 0.27 and more."""


def unequal_layer() -> str:
    """Return the layer and the argument that ComfyUI computes otherwise than the gate does, or that raise; empty if all
    are equal."""
    with neutral(torch.device("cpu")):
        for name, layer in _layers():
            for argument, arguments in _calls(layer):
                try:
                    error = _error(layer, arguments)
                except Exception as raised:  # whatever it is, the feature is off and the prompt goes on
                    return f"{name}, {argument}: {type(raised).__name__}"
                if not error <= MOST_ERROR:
                    return f"{name}, {argument}"
    return ""


def _layers() -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield a layer without a format, and one of each format that this ComfyUI and its kernels have."""
    yield "plain", _with_weight(comfy.ops.manual_cast.Linear, _numbers(SIZE, SIZE))
    quantized = comfy.ops.mixed_precision_ops({}, torch.float32).Linear
    for name, layout in LAYOUTS.items():
        if name in comfy.quant_ops.QUANT_ALGOS and hasattr(comfy.quant_ops.QuantizedTensor, "from_float"):
            weight = comfy.quant_ops.QuantizedTensor.from_float(_numbers(SIZE, SIZE), layout)
            layer = _with_weight(quantized, weight)
            set_quantization_format(layer, name, layout)
            yield name, layer


def _with_weight(cls: type, weight: torch.Tensor) -> torch.nn.Module:
    layer = cls(SIZE, SIZE, dtype=torch.float32, device="cpu")
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.bias = torch.nn.Parameter(_numbers(SIZE), requires_grad=False)
    return layer


def _numbers(*shape: int) -> torch.Tensor:
    """Return numbers of both signs around 1, without a draw from any generator."""
    count = math.prod(shape)
    return (torch.arange(1, count + 1, dtype=torch.float32) * 2.399963).sin().mul_(2.0).view(shape)


def _calls(layer: torch.nn.Module) -> Iterator[tuple[str, dict]]:
    """Yield the arguments of a call besides its input, each that the class names, with a word for them."""
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
    """Return how many inputs a layer takes of which the activation makes ``SIZE``."""
    made = activated(torch.zeros(1, SIZE), arguments)
    return SIZE * SIZE // made.shape[-1]


def _error(layer: torch.nn.Module, arguments: dict) -> float:
    """Return the relative error of the layer through the gate to the layer as ComfyUI runs it."""
    x = _numbers(2, _width(arguments))

    def product(x: torch.Tensor) -> torch.Tensor:
        with lent(core_weights(layer, x, torch.float32)) as (weight, bias):
            return F.linear(x, weight, bias)

    expected = layer(x, **arguments)
    with patched([*exchanged(layer, product), *casting(layer)]):
        found = layer(x, **arguments)
    return ((found - expected).norm() / expected.norm()).item()
