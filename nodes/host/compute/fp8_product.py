"""fp8 products of ComfyUI's quantized tensors, with fast accumulation where a scope of this thread asks for it."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from comfy.quant_ops import QuantizedTensor

try:
    from comfy_kitchen import quantize_per_tensor_fp8
    from comfy_kitchen.scaled_mm_v2 import scaled_mm_v2
except ImportError:
    scaled_mm_v2 = None

from ....precision.guard.localize import stored

LAYOUT = "TensorCoreFP8E4M3Layout"
Refused = dict[tuple[int, ...], str]
"""Weight shape (outputs, K) -> why torch refused its matmul with fast accumulation."""
_refused: ContextVar[Refused | None] = ContextVar("halfsafe_fp8_fast_accumulation", default=None)


@contextlib.contextmanager
def fast_accumulation(refused: Refused) -> Iterator[None]:
    """Let this thread's :func:`fp8_product` accumulate fast; products that torch refuses run as they are, and are noted
    in ``refused``."""
    token = _refused.set(refused)
    try:
        yield
    finally:
        _refused.reset(token)


def fp8_product(
    rows: torch.Tensor, scale: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply ``rows`` (M, K), quantized to e4m3, by an fp8 ``weight`` (N, K); return it in the dtype of ``rows``.

    Args:
        rows: the activations, in 16 bit.
        scale: theirs, 0-dim fp32.
        weight: as ComfyUI holds it.
        bias: in the dtype of ``rows``.
    """
    # ComfyUI's QuantizedTensor takes longer on the host than a small product on a GPU; a graph has it for nothing.
    if scaled_mm_v2 and not torch.compiler.is_compiling():
        operands = quantize_per_tensor_fp8(rows, scale), stored(weight).t(), scale, weight.params.scale
        if (product := _fast(*operands, bias, rows.dtype)) is not None:
            return product
        with contextlib.suppress(RuntimeError, TypeError):  # what torch refuses is dequantized below, with a word
            return scaled_mm_v2(*operands, bias, rows.dtype)
    return F.linear(QuantizedTensor.from_float(rows, LAYOUT, scale=scale), weight.to(rows.dtype), bias)


def _fast(left, right, left_scale, right_scale, bias, dtype: torch.dtype) -> torch.Tensor | None:
    if (refused := _refused.get()) is None:
        return None
    scales = {"scale_a": left_scale, "scale_b": right_scale}
    try:
        return torch._scaled_mm(left, right, **scales, bias=bias, out_dtype=dtype, use_fast_accum=True)
    except RuntimeError as error:
        refused[tuple(reversed(right.shape))] = str(error).partition("\n")[0]
        return None
