"""ComfyUI's ``float8_e4m3fn`` and ``float8_e5m2``, written with one power-of-two scale per tensor.

A power of two is as accurate as any other scale (about 2.65 % relative error for a normal weight,
whatever its spread), and it multiplies and divides without rounding: the dequantized weight is
exact in bf16 and fp16, and a weight that is already on an fp8 grid survives being scaled again."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache, lru_cache
from threading import get_ident

import torch
import torch.nn.functional as F

from ..base.amax import amax, floats
from ..base.dtypes import dtype_named, max_of
from ..base.modes import FP8
from ..base.oom import is_torch_oom
from .format import Find, Format, Unpacker, kitchen_function
from .plain import OF_FNUZ
from .stored_weight import StoredWeight, Tensors

PART = 1 << 22
MIN_SCALE_EXPONENT = -24
SMALLEST_SCALE = 2.0**-126
SMALLEST_ACTIVATION_SCALE = {torch.float16: 2.0**-15}
BELOW_TWO = 2.0 - 2.0**-15
"""Rounds up to a power of two where what is multiplied by it is then rounded down to one: by less
than the step from an fp16 or bf16 number to the next, and more than fp32 rounds by."""
FP32_EXPONENT = 0x7F800000
"""The bits of fp32's exponent: with those alone a number is the power of two at or below it, and
NaN is inf."""
FP8_RESULT = "bf16"
"""Dtype of fp8 products in an fp32 stream: torch has none with an fp32 result and a bias."""
RESULT = dtype_named(FP8_RESULT)
OF_INPUTS = torch.float8_e4m3fn
Refused = dict[tuple[int, ...], str]
"""Weight shape (outputs, K) -> torch's reason for refusing its matmul with fast accumulation."""
_refused: ContextVar[Refused | None] = ContextVar("halfsafe_fp8_fast_accumulation", default=None)
logger = logging.getLogger("halfsafe")


@contextlib.contextmanager
def fast_accumulation(refused: Refused) -> Iterator[None]:
    """Context in which this thread's fp8 products use fast accumulation. Products that torch
    refuses run without it, and are listed in ``refused``."""
    token = _refused.set(refused)
    try:
        yield
    finally:
        _refused.reset(token)


def _divides_in_fp32(kernel: Callable) -> bool:
    """True if a kernel that quantizes to fp8 divides by the scale in fp32, whatever the dtype of
    its input."""
    # ``static_cast<float>(_src_ptr[j]) / *scale_f``, in quantize_fp8_tensor_kernel of comfy-kitchen's
    # backends/cuda/ops/per_tensor_quantize.cu; its eager kernel multiplies by the inverse in the input's dtype.
    return kernel.__module__.startswith("comfy_kitchen.backends.cuda")


@cache
def _tell_once(problem: str) -> None:
    logger.warning("Halfsafe: an fp8 weight is unpacked, because torch refuses its product: %s", problem)


@lru_cache(1)
def _kept(thread: int, size: int) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8)


def room(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a scratch buffer of ``count`` elements; on a CPU, one of 8 or 16 MB per thread is
    reused.

    Tensors that come and go leave holes in the heap, in every second load to int8 half as large as
    the codes, and where they are given back to the system their page faults take as long as the
    product."""
    if device.type != "cpu":
        return torch.empty(count, dtype=dtype, device=device)
    return _kept(get_ident(), max(2 * PART, count * dtype.itemsize)).view(dtype)[:count]


def _power_of_two_scale(largest: float, dtype: torch.dtype) -> float:
    """Return the smallest power of two that brings a finite ``largest`` into the range of an fp8
    dtype; 1.0 for zeros.

    Never below 2^-24, the smallest fp16 number.
    """
    if largest == 0:
        return 1.0
    mantissa, exponent = math.frexp(largest / max_of(dtype))
    # ComfyUI casts the scale to the compute dtype before it multiplies: in fp16 a smaller one would be 0.
    return math.ldexp(1.0, max(exponent - 1 if mantissa == 0.5 else exponent, MIN_SCALE_EXPONENT))


def quantize(tensor: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a finite tensor of amax ``largest``: fp8 data, and the 0-dim fp32 power of two that
    multiplies them.

    Beyond the result it needs 32 MB at most. The scale keeps every value in range, so that no clamp
    is needed."""
    scale = _power_of_two_scale(largest, dtype)
    return _divided(tensor, dtype, scale), torch.tensor(scale)


def _rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Cast to fp8; values on MPS on the CPU, because torch casts no fp8 there before 2.15."""
    return values.cpu().to(dtype).to(values.device) if values.device.type == "mps" else values.to(dtype)


@torch.no_grad()
def _divided(tensor: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    if tensor.device.type == "mps":
        return _divided(tensor.cpu(), dtype, scale).to(tensor.device)
    data = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
    source = tensor.contiguous().view(-1)
    target = data.view(-1)
    grows = tensor.dtype == torch.bfloat16 and scale <= 1
    scaled = room(min(PART, len(source)), torch.int16 if grows else torch.float32, tensor.device)
    for part, out in zip(source.split(PART), target.split(PART), strict=True):
        own = scaled[: len(part)]
        if grows:
            # Half of a product's time, and exact: what has no exponent stays below 2^-101, which fp8 rounds to zero.
            out.copy_(torch.add(part.view(torch.int16), (1 - math.frexp(scale)[1]) << 7, out=own).view(torch.bfloat16))
        else:  # in fp32, which casts to fp8 in half of the time that fp16 takes
            out.copy_(torch.mul(part if part.dtype == torch.float32 else own.copy_(part), 1.0 / scale, out=own))
    return data


def activation_scale(tensor: torch.Tensor, dtype: torch.dtype, divided_in_fp32: bool = False) -> torch.Tensor:
    """Return the 0-dim fp32 scale that brings a tensor into the range of an fp8 dtype, computed on
    its device.

    ``divided_in_fp32``: the kernel that quantizes divides by the scale in fp32 and clamps. The
    scale is then amax / 448, in two launches; else a power of two, in four.

    The smallest power of two that does. A kernel that multiplies by its inverse in the tensor's
    dtype, as comfy-kitchen's eager one (``quantize_per_tensor_fp8``), rounds nothing: that of amax
    / 448 is off by up to 2^-9 in bf16, all of a layer one way. Never so small that ``1 / scale``
    passes the range of the tensor's own dtype, as inf times 0 is NaN: 2^15 is the largest power of
    two that fp16 holds. A scale is raised to that only where amax is below 448 * 2^-15 = 0.0137;
    the largest value is a normal number of e4m3fn for every amax from 2^-21 on.

    Inf or NaN where the tensor holds NaN or inf, so that the product shows it: an fp8 cast would
    turn inf into the largest number."""
    if divided_in_fp32:  # of zeros by more than 0
        return torch.rsub(amax(tensor), SMALLEST_SCALE, alpha=-1 / max_of(dtype))
    scale = amax(tensor) * (BELOW_TWO / max_of(dtype))
    scale = scale.clamp_(min=SMALLEST_ACTIVATION_SCALE.get(tensor.dtype, SMALLEST_SCALE))
    return (scale.view(torch.int32) & FP32_EXPONENT).view(torch.float32)


class Fp8(Format):
    """fp8 numbers, written with one scale. A bank of experts has a scale for each expert, or for
    each of its rows.

    A product computes the scale of its input from the input, whatever scale the file states for it.
    Inputs are e4m3fn for weights in either format: CUDA does not multiply e5m2 by e5m2
    ("Multiplication of two Float8_e5m2 matrices is not supported",
    ``aten/src/ATen/native/cuda/ScaledBlas.cpp``). fp32 inputs are rounded to bf16 first: torch has
    no product with an fp32 result and a bias. A product that torch refuses unpacks the weight, and
    is logged once."""

    mode = FP8
    writes = calibrates = by_largest = True
    dtypes = (torch.float8_e4m3fn, torch.float8_e5m2)

    def __init__(self, name: str, storage: str, since: str, colour: tuple[int, int, int], dtype: torch.dtype):
        self.name = name
        self.storage = storage
        self.since = since
        self.colour = colour
        self.dtype = dtype

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        return floats(weight.data[part]).mul_(weight.row_scales(part))

    def kernels_for(self, find: Find, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, group: int) -> tuple:
        rows = x.reshape(-1, x.shape[-1]).to(x.dtype if x.dtype.itemsize == 2 else RESULT)
        quantize = find("quantize_per_tensor_fp8", x=rows, scale=scale.float(), output_type=OF_INPUTS)
        # For AMD comfy-kitchen has a kernel of its own.
        of_amd = kitchen_function("scaled_mm_v2.scaled_mm_v2") if torch.version.hip else None
        return quantize, _divides_in_fp32(quantize), of_amd, find

    def apply(
        self, bound: tuple, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        quantize, in_fp32, of_amd, find = bound
        dtype = x.dtype if x.dtype.itemsize == 2 else RESULT
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        of_rows = activation_scale(rows, OF_INPUTS, in_fp32)
        left, refused = quantize(rows, of_rows, OF_INPUTS), _refused.get()
        how = {"bias": None if bias is None else bias.to(dtype), "out_dtype": dtype}
        ways: list[dict] = [{}] if refused is None else [{"use_fast_accum": True}, {}]
        for more in ways:
            multiply = torch._scaled_mm if more or of_amd is None else of_amd
            try:
                result = multiply(left, data.t(), scale_a=of_rows, scale_b=scale, **how, **more)
                return result.view(*x.shape[:-1], len(data)).to(x.dtype)
            except (RuntimeError, TypeError) as error:
                if is_torch_oom(error):
                    raise
                problem = str(error).partition("\n")[0]
            if more and refused is not None:
                refused[tuple(data.shape)] = problem
        _tell_once(problem)
        unpacked = self.numbers(self.unpacking(find, data, scale, x.dtype, 0), data, scale)
        return F.linear(x, unpacked, None if bias is None else bias.to(x.dtype))

    def unpacking(
        self, find: Find, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, group: int
    ) -> Unpacker:
        return find("dequantize_per_tensor_fp8", x=data, scale=scale, output_type=dtype), (dtype,)

    def holds(self, weight: StoredWeight) -> bool:
        return (
            OF_FNUZ.get(weight.storage, weight.storage) == self.storage and weight.format.one_scale(weight) is not None
        )

    def taken_over(self, weight: StoredWeight) -> Tensors:
        # The values of an fnuz format fit its sibling with the same scale; only its last subnormal bit is lost.
        scale = weight.format.one_scale(weight)
        assert scale is not None, "a weight is taken over with one scale"
        return {"weight": weight.data.to(self.dtype), "weight_scale": scale}

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight": ((rows, columns), self.dtype), "weight_scale": ((), torch.float32)}

    def scale_for(self, largest: float) -> Tensors:
        """Make the scale of a weight by its largest magnitude."""
        return {"weight_scale": torch.tensor(_power_of_two_scale(largest, self.dtype))}

    def encode(self, rows: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Tensors:
        return {"weight": _divided(rows, self.dtype, params["weight_scale"].item())}

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> torch.Tensor:
        # Columns that were corrected for earlier ones may exceed the range, which the cast would make NaN of.
        largest = torch.finfo(self.dtype).max
        scale = params["weight_scale"].to(values.device)
        return floats(_rounded((values / scale).clamp(-largest, largest), self.dtype)) * scale

    def codes(self, numbers: torch.Tensor, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return _rounded(numbers / params["weight_scale"].to(numbers.device), self.dtype)


E4M3 = Fp8("float8_e4m3fn", "fp8_e4m3fn", "0.4.0", FP8.colour, torch.float8_e4m3fn)
E5M2 = Fp8("float8_e5m2", "fp8_e5m2", "0.8.0", (220, 104, 46), torch.float8_e5m2)
