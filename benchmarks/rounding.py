"""Linear layers with a weight in a storage and a product in a format, emulated in fp32, and their signal to noise ratio.

A weight is made by the pack's own conversion and read back by its own reader. The operand of a quantized product is
rounded in the same way, then multiplied in fp32: real kernels sum exactly (int8) or in fp32.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.base.amax import decibels
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.comfy_format import tensors_of
from halfsafe.precision.formats.format import comfy_quant_tensor
from halfsafe.precision.formats.stored_weight import StoredWeight
from halfsafe.precision.study.candidates import with_fp16_sums
from support.plain_weights import plain_weights

LAYER = "layer"
WEIGHT = f"{LAYER}.weight"
PADDED = 32
"""A number of rows that each storage holds."""
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Function of an input (..., K), an fp32 weight (N, K) and a bias; returns fp32."""


def in_storage(weight: torch.Tensor, storage: str) -> torch.Tensor:
    """Round an fp32 weight (N, K) to a storage of the pack, or of ``FOREIGN``; returns fp32."""
    if storage == "Q8_0":
        return _in_q8_0(weight)
    if storage in FOREIGN:
        tensors = FOREIGN[storage](weight)
    else:
        tensors = tensors_of(StoredWeight(WEIGHT, weight), storage, "benchmark")
    read = read_checkpoint(tensors, None, "benchmark").weights[WEIGHT]
    return read.rows(slice(0, len(weight))).float()


def _without_rotation(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True).clamp_(min=1e-30) / 127
    codes = (weight / scale).round_().to(torch.int8)
    settings = comfy_quant_tensor({"format": "int8_tensorwise"})
    return {WEIGHT: codes, f"{WEIGHT}_scale": scale, f"{LAYER}.comfy_quant": settings}


FOREIGN: dict[str, Callable[[torch.Tensor], dict[str, torch.Tensor]]] = {
    "int8, not rotated": _without_rotation,
    "fp8_e4m3fn, no scale": lambda weight: {WEIGHT: weight.to(torch.float8_e4m3fn)},
}
"""Storages that the pack reads and does not write: int8 of other tools, and the cast of ComfyUI's loader."""


def _in_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """Round as GGUF does: 32 weights to int8 codes with a scale in fp16."""
    blocks = weight.reshape(-1, 32)
    scale = blocks.abs().amax(1, keepdim=True) / 127
    return ((blocks / scale.clamp(min=1e-30)).round() * scale.half().float()).view_as(weight)


def unpacked(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply in fp32."""
    return F.linear(x, weight, bias)


def quantized(storage: str) -> Product:
    """Return the product of an input that is rounded to a storage, as a weight of as many rows."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % PADDED))
        return F.linear(in_storage(padded, storage)[: len(rows)].view(x.shape), weight, bias)

    return multiply


def in_dtype(dtype: torch.dtype) -> Product:
    """Return the product of operands in a 16-bit dtype with fp32 sums, and its result in that dtype."""

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x.to(dtype).float(), weight.to(dtype).float(), bias).to(dtype).float()

    return multiply


def fp16_safe(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply as ``fp16_safe`` does: operands in fp16, scaled where needed, with an fp32 result."""
    linear = torch.nn.Linear(weight.shape[1], len(weight), bias=bias is not None, device="meta")
    linear.weight, linear.bias = (None if each is None else torch.nn.Parameter(each, False) for each in (weight, bias))
    calibration = Calibration()
    operation = SafeOperation(linear, calibration.scale(LAYER), calibration, plain_weights)
    return calibration.run(lambda: operation(x))


def fp16_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply in fp16 with sums in fp16, as Analyze Layers emulates them."""
    return with_fp16_sums(x.half(), weight.half(), bias).float()


PRODUCTS: dict[str, Product] = {
    "unpacked": unpacked,
    "fp16": in_dtype(torch.float16),
    "fp16_safe": fp16_safe,
    "fp16 sums": fp16_sums,
    "bf16": in_dtype(torch.bfloat16),
    **{name: quantized(name) for name in ("fp8_e4m3fn", "int8", "int8, not rotated", "nvfp4", "mxfp8")},
}


@dataclass(frozen=True)
class Rounding:
    """A storage of a weight, and its product, a key of ``PRODUCTS``."""

    storage: str
    product: str = "unpacked"

    def forward(self, linear: torch.nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the forward of a Linear with this rounding."""
        weight, bias, product = in_storage(linear.weight.detach(), self.storage), linear.bias, PRODUCTS[self.product]
        return lambda x: product(x, weight, bias)


def snr(exact: torch.Tensor, given: torch.Tensor) -> float:
    """Compute ``10 log10(sum exact^2 / sum (given - exact)^2)``, in fp64."""
    exact = exact.double()
    return decibels((given.double() - exact).square().sum().item(), exact.square().sum().item())


@contextlib.contextmanager
def forwards(linears: Mapping[str, torch.nn.Linear], made: Mapping[str, Callable]) -> Iterator[None]:
    """Context in which Linear layers run other forwards, by name."""
    for name, forward in made.items():
        linears[name].forward = forward
    try:
        yield
    finally:
        for name in made:
            del linears[name].forward


def inputs_of(linears: Mapping[str, torch.nn.Linear], call: Callable[[], object]) -> dict[str, torch.Tensor]:
    """Return the inputs of Linear layers in one call as rows ``(n, K)``; layers that do not run are left out."""
    seen: dict[str, list[torch.Tensor]] = {}

    def record(name: str) -> Callable:
        return lambda _, args: seen.setdefault(name, []).append(args[0].reshape(-1, args[0].shape[-1]).clone())

    hooks = [linear.register_forward_pre_hook(record(name)) for name, linear in linears.items()]
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(rows) for name, rows in seen.items()}


def measured(
    linears: Mapping[str, torch.nn.Linear],
    calls: Mapping[str, Callable[[], torch.Tensor]],
    roundings: Mapping[str, Rounding],
    inputs: Mapping[str, torch.Tensor],
    progress: Callable[[str, dict], None] = lambda title, figures: None,
) -> dict[str, dict]:
    """Return figures in dB for each rounding, by its name: of each call's whole output, and of each layer's; None for
    an overflow.

    ``linears``: the layers that are rounded; ``inputs``: of each of them, in the exact call.
    """
    exact = {name: call() for name, call in calls.items()}
    results = {name: linears[name](rows) for name, rows in inputs.items()}
    found = {}
    for title, rounding in roundings.items():
        made = {name: rounding.forward(linears[name]) for name in inputs}
        by_layer = {name: snr(results[name], forward(inputs[name])) for name, forward in made.items()}
        with forwards(linears, made):
            whole = {name: snr(exact[name], call()) for name, call in calls.items()}
        worst = min(by_layer, key=lambda name: by_layer[name])
        mean = math.fsum(by_layer.values()) / len(by_layer)
        error = math.fsum(10 ** (-value / 20) for value in by_layer.values()) / len(by_layer)
        figures = {**whole, "layers_mean": mean, "layers_worst": by_layer[worst], "layers_mean_relative_error": error}
        finite = {name: round(value, 5) if math.isfinite(value) else None for name, value in figures.items()}
        found[title] = finite | {"worst_layer": worst}
        progress(title, found[title])
    return found
