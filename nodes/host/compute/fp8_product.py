"""fp8 products of ComfyUI's quantized tensors, with fast accumulation if a scope of this thread requests it."""

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

from ....precision.base.layers import stored
from ....precision.base.oom import is_torch_oom

LAYOUT = "TensorCoreFP8E4M3Layout"
Refused = dict[tuple[int, ...], str]
"""Weight shape (outputs, K) -> torch's reason for refusing its matmul with fast accumulation."""
_refused: ContextVar[Refused | None] = ContextVar("halfsafe_fp8_fast_accumulation", default=None)


@contextlib.contextmanager
def fast_accumulation(refused: Refused) -> Iterator[None]:
    """Context in which this thread's :func:`fp8_product` uses fast accumulation. Products that torch refuses run
    without it, and are listed in ``refused``."""
    token = _refused.set(refused)
    try:
        yield
    finally:
        _refused.reset(token)


def fp8_product(
    rows: torch.Tensor, scale: torch.Tensor, weight: QuantizedTensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply 16-bit ``rows`` (M, K), quantized to e4m3 with a 0-dim fp32 ``scale``, by an fp8 ``weight`` (N, K).
    Returns (M, N) in the dtype of ``rows`` and of the bias."""
    # ComfyUI's QuantizedTensor takes longer on the host than a small product on a GPU; a graph has it for nothing.
    if scaled_mm_v2 and not torch.compiler.is_compiling():
        left = quantize_per_tensor_fp8(rows, scale)
        right = stored(weight).t()
        other = weight.params.scale
        refused = _refused.get()
        if refused is not None:
            try:
                return torch._scaled_mm(
                    left, right, scale_a=scale, scale_b=other, bias=bias, out_dtype=rows.dtype, use_fast_accum=True
                )
            except RuntimeError as error:
                if is_torch_oom(error):
                    raise
                refused[tuple(weight.shape)] = str(error).partition("\n")[0]
        try:
            return scaled_mm_v2(left, right, scale, other, bias, rows.dtype)
        except (RuntimeError, TypeError) as error:  # products that torch refuses are dequantized below
            if is_torch_oom(error):
                raise
    return F.linear(QuantizedTensor.from_float(rows, LAYOUT, scale=scale), weight.to(rows.dtype), bias)
