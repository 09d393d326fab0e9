"""fp8 products with fast accumulation, for as long as a scope is open: a handler in comfy-kitchen's layout registry.

comfy-kitchen passes ``use_fast_accum=False``. The handlers here stand in front of its own for ComfyUI's two fp8 layouts
and hand every call on to them, unless this thread is inside a scope. They are there only while a scope is open
somewhere.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import comfy.quant_ops
import torch

try:
    from comfy_kitchen.tensor.base import _LAYOUT_DISPATCH_TABLE as TABLE
except ImportError:
    TABLE = None

from ....precision.arithmetic.patching import SharedScope
from ....precision.guard.localize import stored

ATEN = torch.ops.aten
LAYOUTS = ("TensorCoreFP8E4M3Layout", "TensorCoreFP8E5M2Layout")
Refused = dict[tuple[int, ...], str]
"""Weight shape (outputs, K) -> why torch refused its matmul with fast accumulation."""
active: ContextVar[Refused | None] = ContextVar("halfsafe_fp8_fast_accumulation", default=None)


def why_unavailable() -> str:
    """Say why fast accumulation cannot be reached in this ComfyUI; "" where it can."""
    if TABLE is None or not all(op in TABLE and _original(op) for op in OPERANDS):
        return "this comfy-kitchen has no registry of fp8 products that Halfsafe knows"
    return ""


def _linear(args):
    return args[0], args[1].t(), args[2] if len(args) > 2 else None


OPERANDS = {
    ATEN.linear.default: _linear,
    ATEN.mm.default: lambda args: (args[0], args[1], None),
    ATEN.addmm.default: lambda args: (args[1], args[2], args[0]),
}


def _layouts() -> list[type]:
    return [getattr(comfy.quant_ops, name) for name in LAYOUTS]


def _original(op, layout: type | None = None):
    """Return the handler that a layout has or inherits: comfy-kitchen's own, unless somebody has put theirs in front of
    it."""
    parents = (layout or _layouts()[0]).__mro__
    return next((TABLE[op][parent] for parent in parents if parent in TABLE[op]), None)


def _handler(op, layout: type):
    original, operands = _original(op, layout), OPERANDS[op]

    def handle(qt, args, kwargs):
        left, right, bias = operands(args)
        if not all(isinstance(tensor, comfy.quant_ops.QuantizedTensor) for tensor in (left, right)):
            return original(qt, args, kwargs)
        scales, dtype = (left.params.scale, right.params.scale), kwargs.get("out_dtype", left.params.orig_dtype)
        result = fast_product(stored(left).contiguous(), stored(right), *scales, bias, dtype)
        return original(qt, args, kwargs) if result is None else result

    return handle


def fast_product(
    left: torch.Tensor,
    right: torch.Tensor,
    left_scale: torch.Tensor,
    right_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor | None:
    """Multiply fp8 matrices (M, K) and (K, N) with fast accumulation; None outside of a scope on this thread, and where
    torch refuses."""
    refused = active.get()
    if refused is None:
        return None
    scales = {"scale_a": left_scale, "scale_b": right_scale}
    try:
        result = torch._scaled_mm(left, right, **scales, bias=bias, out_dtype=out_dtype, use_fast_accum=True)
    except RuntimeError as error:
        refused[tuple(reversed(right.shape))] = str(error).partition("\n")[0]
        return None
    return result[0] if isinstance(result, tuple) else result


@contextlib.contextmanager
def _handlers_registered() -> Iterator[None]:
    places = [(op, layout) for op in OPERANDS for layout in _layouts()]
    before = {(op, layout): TABLE[op].get(layout) for op, layout in places}
    for (op, layout), handler in {place: _handler(*place) for place in places}.items():
        comfy.quant_ops.register_layout_op(op, layout)(handler)
    try:
        yield
    finally:
        for (op, layout), handler in before.items():
            TABLE[op].pop(layout)
            if handler is not None:
                TABLE[op][layout] = handler


_registered = SharedScope(_handlers_registered)


@contextlib.contextmanager
def fast_accumulation(refused: Refused) -> Iterator[None]:
    """Run this thread's fp8 matmuls with fast accumulation; those torch refuses run as they are and are noted in
    ``refused``."""
    with _registered:
        token = active.set(refused)
        try:
            yield
        finally:
            active.reset(token)
