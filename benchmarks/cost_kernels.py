"""The kernels of a call on fake CUDA tensors, each with its operations, its bytes and the layer it belongs to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from unittest import mock

import torch
from support.fake_cuda import NO_KERNEL
from support.leaf_operations import LeafOperations, aten
from torch.utils._pytree import tree_leaves

from .cost_cards import Kernel

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
PRODUCTS = {
    aten.mm.default: 0,
    aten.mm.dtype: 0,
    aten.addmm.default: 1,
    aten.bmm.default: 0,
    aten.convolution.default: 0,
}
ATTENTIONS = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default}
_layers: list[str] = []


@contextlib.contextmanager
def inside(layer: str) -> Iterator[None]:
    """What runs here belongs to ``layer``."""
    _layers.append(layer)
    try:
        yield
    finally:
        _layers.pop()


@contextlib.contextmanager
def rope_in_one_kernel() -> Iterator[None]:
    """ComfyUI's rope is one kernel inside, as comfy-kitchen's is on CUDA."""
    import comfy.quant_ops

    ck = comfy.quant_ops.ck
    both = (
        mock.patch.object(ck, "apply_rope", lambda q, k, _: (q.neg(), k.neg())),
        mock.patch.object(ck, "apply_rope1", lambda x, _: x.neg()),
    )
    with both[0], both[1]:
        yield


def _left(*_) -> None:
    _layers.pop()


class Costs(LeafOperations):
    """Lists the kernels of a model's call as ``seen``, by layer."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.seen: list[Kernel] = []
        self._names = {
            module: name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | torch.nn.modules.conv._ConvNd)
        }

    @contextlib.contextmanager
    def watching(self) -> Iterator[Costs]:
        """List what runs here. The hooks are not this mode's own ``__enter__``: a composite operation enters the mode again."""
        hooks = []
        for module, name in self._names.items():
            hooks.append(module.register_forward_pre_hook(lambda *_, name=name: _layers.append(name)))
            hooks.append(module.register_forward_hook(_left))
        try:
            with self:
                yield self
        finally:
            for hook in hooks:
                hook.remove()

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if not func.is_view and func not in NO_KERNEL and not func.name().startswith("prim::"):
            self.seen.append(_kernel(func, args, kwargs, result))
        return result


def _kernel(func, args, kwargs, result) -> Kernel:
    first = args[PRODUCTS.get(func, 0)] if args else None
    dtype = NAMES.get(getattr(first, "dtype", None), "")
    kind = _kind(func, args, first, result)
    read, written = _bytes([args, {name: value for name, value in kwargs.items() if name != "out"}]), _bytes(result)
    launches = 2 if _reduces_all(func, result) else 1
    return Kernel(_layers[-1] if _layers else "", kind, dtype, _flops(func, args, result), read, written, launches)


def _kind(func, args, first, result) -> str:
    if func in ATTENTIONS:
        return "attention"
    if func in PRODUCTS:
        return "wide" if result.dtype != first.dtype else "product"
    dtypes = {leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor) and leaf.dtype in NAMES}
    return "mixed" if len(dtypes) > 1 else "other"


def _reduces_all(func, result) -> bool:
    return (
        func.overloadpacket in (aten.linalg_vector_norm, aten.amax)
        and isinstance(result, torch.Tensor)
        and result.dim() == 0
    )


def _flops(func, args, result) -> int:
    if func in ATTENTIONS:
        q, k = args[:2]
        return 4 * q.numel() * k.shape[-2]
    if func is aten.convolution.default:
        return 2 * result.numel() * math.prod(args[1].shape[1:])
    return 2 * result.numel() * args[PRODUCTS[func]].shape[-1] if func in PRODUCTS else 0


def _bytes(values) -> int:
    """The bytes that are there: of a broadcast tensor, those it is broadcast from."""
    return sum(
        _stored(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor) and leaf.device.type == "cuda"
    )


def _stored(tensor: torch.Tensor) -> int:
    return (
        math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) * tensor.itemsize
    )
