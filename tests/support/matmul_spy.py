"""Which products a model really makes, by the layer that makes them.

Sees: every product that reaches a kernel of this thread (``mm``, ``addmm``, ``bmm``, convolutions, fused attentions, ``_scaled_mm``,
``_int_mm``), with its operands' dtypes, its result's, and whether fp16 sums are on at that moment; on real CPU tensors also
whether fp32 operands hold fp16's numbers alone, which is how a CPU stands in for products with fp16 operands and fp32 results.
comfy-kitchen's int8 product is one custom operator, which counts as int8 by int8: it quantizes its input itself.
Does not see: products inside of other custom operators or compiled kernels, how the library sums, a matrix's product with itself,
by which a weight is measured, and one by which comfy-kitchen rotates an int8 weight or its input. A product is its layer's where
the layer's module is called; one that model code makes with a layer's weight by itself is the calling module's. Those of a LoRA
beside a layer are of the layer's name with " beside".
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

import torch
from comfy_kitchen.backends.eager import quantization
from halfsafe.nodes.host.lora.low_rank import LowRankLayer
from halfsafe.precision.base.patching import SharedScope
from support.leaf_operations import FakeTensor, LeafOperations, overloads
from torch.nn.modules import module as hooks

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SHORT = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "int8",
    **dict.fromkeys(FP8, "fp8"),
}
OPERANDS = overloads({
    "mm.default": (0, 1), "mm.dtype": (0, 1), "addmm.default": (1, 2), "addmm_.default": (1, 2), "addmm.dtype_out": (1, 2), "bmm.default": (0, 1),
    "bmm.dtype": (0, 1), "baddbmm.default": (1, 2), "_scaled_mm.default": (0, 1), "_scaled_mm_v2.default": (0, 1),
    "_int_mm.default": (0, 1), "convolution.default": (0, 1),
    "_scaled_dot_product_flash_attention_for_cpu.default": (0, 1), "_scaled_dot_product_flash_attention.default": (0, 1),
    "_scaled_dot_product_efficient_attention.default": (0, 1),
})  # fmt: skip
INT8_LINEAR = "comfy_kitchen::int8_linear"
ROTATIONS = ("_rotate_activation", "_rotate_weight")
_rotating = threading.local()


@contextlib.contextmanager
def _telling_rotations() -> Iterator[None]:
    """Have comfy-kitchen's rotations tell that they run, in the thread that runs them."""
    with contextlib.ExitStack() as told:
        for name in ROTATIONS:
            told.enter_context(mock.patch.object(quantization, name, _told(getattr(quantization, name))))
        yield


def _told(rotate: Callable) -> Callable:
    def run(*args):
        _rotating.depth = getattr(_rotating, "depth", 0) + 1
        try:
            return rotate(*args)
        finally:
            _rotating.depth -= 1

    return run


_rotations_told = SharedScope(_telling_rotations)
"""Shared by the spies of several threads, which end in any order."""


@dataclass(frozen=True)
class Product:
    """One product. ``rounded``: its fp32 operands hold only numbers that fp16 has; False where they are fake."""

    layer: str
    op: str
    operands: tuple[str, str]
    result: str
    fp16_sums: bool
    fast_sums: bool
    rounded: bool

    @property
    def modes(self) -> set[str]:
        """The report's modes that this product can be; a CPU's with rounded operands can be several."""
        if self.operands == ("fp16", "fp16") and self.fp16_sums and self.result == "fp16":
            return {"fp16_acc16"}
        if self.operands == ("fp16", "fp16"):
            return {"fp16_wide", "fp16_scaled"} if self.result == "fp32" else {"fp16"}
        if self.operands == ("fp32", "fp32") and self.rounded:
            return {"fp32", "fp16_wide", "fp16_scaled"}
        return {self.operands[0]} if self.operands[0] == self.operands[1] else {"mixed"}


class MatmulSpy(LeafOperations):
    """Lists the products of a model's calls as ``seen``; ``names``: module -> its name in the report."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.names = {module: name for name, module in model.named_modules()}
        self.seen: list[Product] = []
        self._inside: list[str] = []
        self._depth = 0

    def __enter__(self) -> MatmulSpy:
        """Also while it is on: ``LeafOperations`` enters it again around the parts of a composite operation."""
        if not self._depth:
            before = hooks.register_module_forward_pre_hook(self._enter_module)
            after = hooks.register_module_forward_hook(self._leave_module, always_call=True)
            self._hooks = (before, after)
            _rotations_told.__enter__()
        self._depth += 1
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        self._depth -= 1
        for hook in () if self._depth else self._hooks:
            hook.remove()
        if not self._depth:
            _rotations_told.__exit__(*error)

    def _enter_module(self, module, inputs) -> None:
        if module in self.names:
            self._inside.append(self.names[module])
        elif isinstance(module, LowRankLayer):
            self._inside.append(f"{self._inside[-1]} beside")

    def _leave_module(self, module, inputs, output) -> None:
        if module in self.names or isinstance(module, LowRankLayer):
            self._inside.pop()

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if (
            func in OPERANDS
            and not getattr(_rotating, "depth", 0)
            and not _with_itself(*(args[index] for index in OPERANDS[func]))
        ):
            self.seen.append(self._product(func, args, kwargs, result))
        elif func.name() == INT8_LINEAR:
            assert args[1].dtype == torch.int8
            result_dtype = SHORT.get(result.dtype, str(result.dtype))
            self.seen.append(Product(self._layer(), INT8_LINEAR, ("int8", "int8"), result_dtype, False, False, False))
        return result

    def _layer(self) -> str:
        return self._inside[-1] if self._inside else ""

    def _product(self, func, args, kwargs, result) -> Product:
        a, b = (args[index] for index in OPERANDS[func])
        first = result[0] if isinstance(result, tuple) else result
        return Product(
            self._layer(),
            func.name().removeprefix("aten::"),
            (SHORT.get(a.dtype, str(a.dtype)), SHORT.get(b.dtype, str(b.dtype))),
            SHORT.get(first.dtype, str(first.dtype)),
            torch.backends.cuda.matmul.allow_fp16_accumulation,
            any(value is True for value in (kwargs.get("use_fast_accum"), *args[7:])),
            _rounded(a) and _rounded(b),
        )

    def by_layer(self) -> dict[str, list[Product]]:
        """Layer -> its products, in order."""
        layers: dict[str, list[Product]] = {}
        for product in self.seen:
            layers.setdefault(product.layer, []).append(product)
        return layers


def _with_itself(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _rounded(tensor: torch.Tensor) -> bool:
    """NaN, as in a call that is repeated because an operand outgrew its scale, is the same in every dtype."""
    if isinstance(tensor, FakeTensor) or tensor.dtype != torch.float32:
        return False
    return bool(((tensor == tensor.half().float()) | tensor.isnan()).all())


def differences(layers: list[dict], spy: MatmulSpy) -> list[str]:
    """Where a report's layers and the products that were made differ, a line each; none where they agree."""
    products, found = spy.by_layer(), []
    for layer in layers:
        for product in products.get(layer["name"], ()):
            if layer["mode"] not in product.modes:
                found.append(f"{layer['name']}: the report says {layer['mode']}, it was {product}")
            if layer["accumulation"] != sums_of(product):
                found.append(f"{layer['name']}: the report says {layer['accumulation']} sums, it was {product}")
    return found


def sums_of(product: Product) -> str:
    """What the flags make of a product's sums, in the report's words; PyTorch's flag acts on matrix products alone."""
    if product.operands == ("fp8", "fp8"):
        return "fp8_fast" if product.fast_sums else "fp32"
    is_half = product.operands == ("fp16", "fp16") and product.op != "convolution"
    return "fp16" if is_half and product.fp16_sums and product.result == "fp16" else "fp32"


class Products(MatmulSpy):
    """The products made inside of each of ``layers`` (name -> module), as the report names modes.

    A product that ``linear_input_act`` of ``comfy/ops.py`` makes past a layer's forward, as in the MLPs of Wan and LTX-Video
    from ComfyUI 0.30 on, is that layer's too.
    fp16_wide: both matrices are fp32 but hold only numbers that fp16 holds, which on a CPU is what ``fp16_safe`` multiplies.
    """

    def __init__(self, layers: dict[str, torch.nn.Module]):
        super().__init__(torch.nn.Module())
        self.names = {module: name for name, module in layers.items()}
        self.scaled: list[tuple[torch.dtype, torch.dtype]] = []

    def leaf(self, func, args, kwargs):
        if func.name().startswith("aten::_scaled_mm"):
            self.scaled.append((args[0].dtype, args[1].dtype))
        return super().leaf(func, args, kwargs)

    def __enter__(self) -> Products:
        if not self._depth:
            import comfy.ops

            fused = getattr(comfy.ops, "linear_input_act", None)
            self._patch = (
                mock.patch.object(comfy.ops, "linear_input_act", self._past_forward(fused))
                if fused
                else contextlib.nullcontext()
            )
            self._patch.__enter__()
        return super().__enter__()

    def __exit__(self, *error) -> None:
        super().__exit__(*error)
        if not self._depth:
            self._patch.__exit__(*error)

    def _past_forward(self, linear_input_act: Callable) -> Callable:
        def run(linear, x, *args, **kwargs):
            self._enter_module(linear, x)
            try:
                return linear_input_act(linear, x, *args, **kwargs)
            finally:
                self._leave_module(linear, x, None)

        return run

    @property
    def made(self) -> dict[str, list[str]]:
        """Layer -> the mode of each product, less the rotation of an int8 layer's input, a product of its own in comfy-kitchen."""
        found = {name: [_mode(product) for product in self.by_layer().get(name, ())] for name in self.names.values()}
        return {name: [mode for mode in modes if mode == "int8"] or modes for name, modes in found.items()}

    @property
    def beside(self) -> dict[str, list[str]]:
        """The same of the LoRAs that are added to a layer's own product."""
        return {
            name.removesuffix(" beside"): list(map(_mode, products))
            for name, products in self.by_layer().items()
            if name.endswith(" beside")
        }

    def modes(self) -> dict[str, str]:
        """Layer -> what it multiplied in; every call of a layer must have been alike."""
        assert all(len(set(made)) == 1 for made in self.made.values()), self.made
        return {name: made[0] for name, made in self.made.items()}


def _mode(product: Product) -> str:
    assert product.operands[0] == product.operands[1]
    return "fp16_wide" if product.rounded else product.operands[0]


@contextlib.contextmanager
def int8_products() -> Iterator[list[int]]:
    """The rows (tokens) of each product of int8 by int8, by the operation itself: ``torch._int_mm``, which comfy-kitchen's eager int8 product calls."""
    rows, product = [], torch._int_mm

    def counted(a: torch.Tensor, b: torch.Tensor, **options) -> torch.Tensor:
        assert (a.dtype, b.dtype) == (torch.int8, torch.int8)
        rows.append(len(a))
        return product(a, b, **options)

    with mock.patch.object(torch, "_int_mm", counted):
        yield rows
