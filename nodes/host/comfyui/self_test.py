"""The self-test at first use: one tiny layer of each class, called through the gate and by ComfyUI itself."""

from collections.abc import Iterator

import comfy.ops
import torch
import torch.nn.functional as F

from ....precision.arithmetic.linear import lent
from ....precision.base.patching import patched
from .attributes import casting
from .gate import ACTIVATION, OF_RESIDUAL, RESIDUAL, folded_parameters
from .weights import core_weights, exchanged

SIZE = 32
FORMATS = {"plain": None, "fp8": "TensorCoreFP8E4M3Layout", "int8": "TensorWiseINT8Layout"}
MOST_ERROR = 0.05
"""Relative error: int8 layers round their input to 8 bits, of which ours knows nothing. A dropped argument is off by
0.3 and more."""


def unequal_layer() -> str:
    """Return the layer and the argument that ComfyUI computes otherwise than the gate does; empty if all are equal."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for name, layer in _layers():
            for argument, arguments in _calls(layer):
                if _error(layer, arguments) > MOST_ERROR:
                    return f"{name}, {argument}"
    return ""


def _layers() -> Iterator[tuple[str, torch.nn.Module]]:
    quantized = comfy.ops.mixed_precision_ops({}, torch.float32).Linear
    for name, layout in FORMATS.items():
        layer = (quantized if layout else comfy.ops.manual_cast.Linear)(SIZE, SIZE, dtype=torch.float32, device="cpu")
        weight = torch.randn(SIZE, SIZE)
        held = comfy.quant_ops.QuantizedTensor.from_float(weight, layout) if layout else weight
        layer.weight = torch.nn.Parameter(held, requires_grad=False)
        layer.bias = torch.nn.Parameter(torch.randn(SIZE), requires_grad=False)
        yield name, layer


def _calls(layer: torch.nn.Module) -> Iterator[tuple[str, dict]]:
    """Yield the arguments of a call besides its input, each that the class names, with a word for them."""
    names = folded_parameters(type(layer))
    yield "no argument", {}
    if ACTIVATION in names:
        for activation in comfy.ops.INPUT_ACT_EAGER:
            yield activation, {ACTIVATION: activation}
    if RESIDUAL in names:
        residual = {RESIDUAL: torch.randn(2, SIZE)}
        yield RESIDUAL, residual
        yield OF_RESIDUAL, {**residual, OF_RESIDUAL: torch.randn(SIZE)}


def _error(layer: torch.nn.Module, arguments: dict) -> float:
    """Return the relative error of the layer through the gate to the layer as ComfyUI runs it."""
    x = torch.randn(2, 2 * SIZE if arguments.get(ACTIVATION) == "swiglu" else SIZE)

    def product(x: torch.Tensor) -> torch.Tensor:
        with lent(core_weights(layer, x, torch.float32)) as (weight, bias):
            return F.linear(x, weight, bias)

    expected = layer(x, **arguments)
    with patched([*exchanged(layer, product), *casting(layer)]):
        found = layer(x, **arguments)
    return ((found - expected).norm() / expected.norm()).item()
