"""Tiny executed probes: what this device and this torch really do. They never raise and leave no
flag changed."""

import functools
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..base.dtypes import DTYPES, dtype_named, looked_up
from ..base.flags import flags_set, is_on
from ..base.message import Message
from ..base.oom import is_torch_oom
from ..base.surroundings import neutral
from ..formats.format import kitchen_function
from ..formats.int8 import Int8, rotated

PROBE_ERRORS = (RuntimeError, TypeError, AttributeError, ValueError, AssertionError)
GEMM_TOLERANCE = {"fp16": 1e-2, "bf16": 2e-2, "fp32": 5e-3}
INT8_TOLERANCE = 2e-2
UNSPLIT = 1024
"""Rows and columns of a product whose tiles occupy a large card: of a smaller one cuBLAS splits the
inner dimension, and the sums of its parts do not pass fp16's range."""
NOT_TRIED = "not tried while a model may run, because the flag applies to the whole process"
NO_MEMORY = "not enough free memory to try"
Check = Callable[..., tuple[bool | None, str]]
"""``check(device)`` returns whether the device is right, None where that says nothing of it, and details."""
_leaves_flags = ContextVar("halfsafe_probes_leave_flags", default=False)


@dataclass(frozen=True)
class Probe:
    """One probe's result: ``ok`` is None when it says nothing about this device."""

    name: str
    ok: bool | None
    detail: str


def run_probes(device: torch.device, fp8_format: str = "fp8_e4m3fn") -> tuple[Probe, ...]:
    """Run all probes on a real device, each once per device and process, again where the first said
    nothing."""
    formats = {"fp8_matmul": (fp8_format,)}
    return tuple(_once(name, check, device, *formats.get(name, ())) for name, check in CHECKS.items())


_kept: dict[tuple, Probe] = {}


def _once(name: str, check: Check, *args) -> Probe:
    """Try a check; the result is kept for the process unless another time may tell more."""
    key = (name, args)
    if key not in _kept or _kept[key].detail in (NO_MEMORY, NOT_TRIED):
        _kept[key] = _tried(name, check, *args)
    return _kept[key]


def canary(device: torch.device, name: str) -> tuple[bool, str]:
    """True if a small product, convolution and attention in ``fp16``, ``bf16`` or ``fp32`` are
    right on a device, and the error of the first that is not. Once per process."""
    result = _once(f"{name}_canary", _operations, device, name)
    return result.ok is not False, result.detail


def why_dtype_not_held(device: torch.device, name: str, is_cast: bool = False) -> str:
    """Return the error of a device that does not support a dtype, or "" if it does. Once per
    process.

    ``is_cast``: the device casts it too, as comfy-kitchen casts the fp8 scales of blocks.
    """
    result = _once(f"{name}_held", _held, device, name, is_cast)
    return result.detail if result.ok is False else ""


def _held(device: torch.device, name: str, is_cast: bool) -> tuple[bool, str]:
    dtype = DTYPES.get(name) or getattr(torch, name, None)  # torch 2.8 has no dtype of mxfp8's scales
    if dtype is not None:
        held = torch.empty(1, dtype=dtype).to(device)
        if is_cast:
            held.float()
    return True, ""


def _tried(name: str, check: Check, device: torch.device, *args) -> Probe:
    """Run one check of a device, whatever the caller set in torch; an error is a failed probe, a
    lack of memory says nothing."""
    try:
        with neutral(device):
            ok, detail = check(device, *args)
    except PROBE_ERRORS as error:
        if is_torch_oom(error):
            return Probe(name, None, NO_MEMORY)
        line = next(iter(str(error).splitlines()), "")
        return Probe(name, False, f"{type(error).__name__}: {line[:160]}")
    return Probe(name, ok, detail)


def _fp8_cast(device: torch.device, fmt: str) -> tuple[bool, str]:
    """Cast every finite value of a format there and back (16x16), then one value past its range,
    and NaN.

    On MPS as weights are: cast on the CPU, and back by a table.
    """
    dtype = dtype_named(fmt)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[torch.isfinite(values)]
    if not torch.equal(_round_trip(values, device, dtype), values):
        return False, Message("a cast to {0} and back changed values that {1} can represent", fmt, fmt)
    past, nan = _round_trip(torch.tensor([1e6, float("nan")]), device, dtype).tolist()
    if nan == nan:
        return False, Message("a cast to {0} turned NaN into {1}", fmt, f"{nan:g}")
    beyond = "NaN" if past != past else f"{past:g}"
    by_table = "exact up to {0}, by a table; above that {1}"
    said = by_table if device.type == "mps" else "exact up to {0}; above that {1}"
    return True, Message(said, f"{torch.finfo(dtype).max:g}", beyond)


def _round_trip(values: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if device.type == "mps":
        return looked_up(values.to(dtype).to(device), torch.float32).cpu()
    return values.to(device).to(dtype).float().cpu()


def _fp8_matmul(device: torch.device, fmt: str = "fp8_e4m3fn") -> tuple[bool, str]:
    """Try a 32x32 scaled fp8 matmul of small integers, where the right answer is exact."""
    left = (torch.arange(32 * 32).reshape(32, 32) % 5 - 2).float()
    right = (torch.arange(32 * 32).reshape(32, 32) % 7 - 3).float()
    rows, columns = (each.to(device).to(dtype_named(fmt)) for each in (left, right.t().contiguous()))
    result = _scaled_mm(rows, columns.t())
    if not torch.equal(result.float().cpu(), left @ right):
        return False, Message("{0} matmul ran and gave wrong values", fmt)
    return True, Message("{0} matmul {1}", fmt, "runs, emulated" if device.type == "cpu" else "runs, values right")


def _scaled_mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute ``left @ right`` in bf16 for fp8 operands with scale 1 by the function that
    comfy-kitchen calls: left (M, K) row-major, right (K, N) column-major."""
    one = torch.ones((), dtype=torch.float32, device=left.device)
    if left.device.type == "cpu" or not hasattr(F, "scaled_mm"):  # a CPU lacks it
        return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    tensorwise = F.ScalingType.TensorWise
    return F.scaled_mm(left, right, one, tensorwise, one, tensorwise)


def _int8_matmul(device: torch.device) -> tuple[bool, str]:
    """Try an int8 matmul of 32x256 by 256x32 over the whole range of int8."""
    codes = torch.arange(32 * 256).remainder(255).sub(127).to(torch.int8)
    left, weight = codes.reshape(32, 256), codes.flip(0).reshape(32, 256)
    error = _relative_error(_int8_product(left, weight, device).cpu(), left.double() @ weight.double().t())
    if not error < INT8_TOLERANCE:
        return False, "int8 matmul ran and gave wrong values"
    return True, "int8 matmul runs, values right"


def _int8_product(left: torch.Tensor, weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Compute ``left @ weight.T`` of int8 codes (M, 256) and (N, 256) on a device as a layer does:
    by comfy-kitchen's function, which rotates and quantizes its input, and by torch's own where
    comfy-kitchen is missing."""
    linear = kitchen_function(Int8.product)
    if linear is None:
        # cuBLASLt takes M > 16, K and N that are multiples of 8.
        return torch._int_mm(left.to(device), weight.to(device).t())
    x = rotated(left.float(), left.shape[1]).half()
    scale = torch.full((len(weight), 1), 2.0**-8, device=device)  # so that 256 * 127 * 127 is within fp16's range
    rotation = {"convrot": True, "convrot_groupsize": left.shape[1]}
    return linear(x.to(device), weight.to(device), scale, out_dtype=x.dtype, **rotation).float() / scale.t()


def _int8_kernels(device: torch.device) -> tuple[bool | None, str]:
    """True if torch's CUDA is new enough for comfy-kitchen's kernels."""
    if device.type != "cuda" or not torch.version.cuda:
        return None, "comfy-kitchen has CUDA kernels for NVIDIA only"
    built_for = Message("torch is built for CUDA {0}, comfy-kitchen's int8 kernels need 13.0", torch.version.cuda)
    return has_cuda_13(), built_for


def has_cuda_13() -> bool:
    """True if torch is built for CUDA 13 or later: below it ComfyUI turns comfy-kitchen's kernels
    off (comfy/quant_ops.py)."""
    return int((torch.version.cuda or "0").partition(".")[0]) >= 13


def _operations(device: torch.device, name: str) -> tuple[bool, str]:
    """Compare a product, then a convolution and an attention with fp64: these run other kernels,
    and MIOpen's convolution was wrong where its products were right (guinmoon/rocm7_builds#5). What
    a device lacks is left out."""
    ok, detail = _gemm(device, name)
    if not ok:
        return ok, detail
    for what, operation, shapes in OPERATIONS:
        inputs = [_drawn(shape, seed).to(dtype_named(name)) for seed, shape in enumerate(shapes)]
        try:
            result = operation(*(one.to(device) for one in inputs)).cpu()
        except (RuntimeError, NotImplementedError) as lacking:
            if is_torch_oom(lacking):
                raise
            continue
        error = _relative_error(result, operation(*(one.double() for one in inputs)))
        if not error < GEMM_TOLERANCE[name]:
            return False, Message("{0} {1} is wrong here: relative error {2}", name, what, f"{error:.2g}")
    return ok, detail


def _drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal values of size 2, at which an attention picks few of its values, from a generator of
    their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2)


OPERATIONS: tuple[tuple[str, Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]], ...] = (
    ("convolution", functools.partial(F.conv2d, padding=1), ((1, 16, 16, 16), (16, 16, 3, 3))),
    ("attention", F.scaled_dot_product_attention, ((1, 2, 64, 32),) * 3),
)
"""Name, function, and the shapes of its inputs."""


def _gemm(device: torch.device, name: str) -> tuple[bool, str]:
    """Compare a 32x256x32 matmul with fp64: this catches devices whose half precision GEMM gives
    zeros or garbage."""
    dtype = dtype_named(name)
    left = torch.arange(32 * 256, dtype=torch.float64).sin().reshape(32, 256).to(dtype)
    right = torch.arange(256 * 32, dtype=torch.float64).cos().reshape(256, 32).to(dtype)
    exact = left.double() @ right.double()
    error = _relative_error((left.to(device) @ right.to(device)).cpu(), exact)
    if not error < GEMM_TOLERANCE[name]:
        return False, Message("{0} matmul is wrong here: relative error {1}", name, f"{error:.2g}")
    if name == "fp16" and device.type not in ("cuda", "cpu"):  # CUDA adds in fp32 unless the flag for fp16 sums is on
        left, right = _accumulation_operands(device)
        if not torch.isfinite((left @ right).cpu()).all():
            return False, "fp16 matmul accumulates in fp16 here: sums overflow even if the result is small"
    return True, Message("relative error {0}", f"{error:.1e}")


def _relative_error(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the error over the norm of the exact result, both on the CPU."""
    return ((result.double() - exact).norm() / exact.norm()).item()


def _bf16_native(device: torch.device) -> tuple[bool | None, str]:
    """True if the driver and torch say bf16 runs in hardware."""
    if device.type == "cuda":
        source = "torch.cuda.is_bf16_supported(including_emulation=False)"
        with torch.cuda.device(device):
            answer = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "xpu":
        source, answer = "torch.xpu.is_bf16_supported()", torch.xpu.is_bf16_supported()
    elif device.type == "cpu":
        source, answer = "CPU instructions", cpu_bf16()
    else:
        return None, Message("torch cannot tell on {0}", device.type)
    return bool(answer), f"{source}: {'yes' if answer else 'no'}"


def cpu_bf16() -> bool:
    """True if the CPU has bf16 instructions."""
    try:
        supported = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return False
    # oneDNN alone says yes from plain AVX512, where bf16 is emulated.
    instructions = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if supported and instructions and platform.machine().lower() in ("x86_64", "amd64"):
        return bool(instructions())
    return supported


@contextmanager
def flags_left_alone() -> Iterator[None]:
    """Run no probe that switches a flag: flags are the process's, and a model may run on another
    thread."""
    token = _leaves_flags.set(True)
    try:
        yield
    finally:
        _leaves_flags.reset(token)


def _fp16_accumulation(device: torch.device) -> tuple[bool | None, str]:
    """True if ``allow_fp16_accumulation`` acts: K=4096 products, +256 in the first half and -256 in
    the second.

    The true result is 0. An fp16 sum passes 65504 on the way and becomes inf or NaN; an fp32 sum
    does not.
    """
    if device.type != "cuda" or torch.version.hip:
        return None, "the flag affects NVIDIA's cuBLAS only"
    if is_on("fp16_accumulation") is None:
        return False, Message("torch {0} has no such flag", torch.__version__)
    if _leaves_flags.get():
        return None, NOT_TRIED
    return _overflows_in_fp16(*_accumulation_operands(device, UNSPLIT))


def _accumulation_operands(device: torch.device, size: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp16 operands (size, 4096) and (4096, size) whose product is 0 and whose partial sums
    reach 524288."""
    left = torch.full((size, 4096), 16.0, dtype=torch.float16, device=device)
    right = torch.full((4096, size), 16.0, dtype=torch.float16, device=device)
    right[2048:] = -16.0
    return left, right


def _overflows_in_fp16(left: torch.Tensor, right: torch.Tensor) -> tuple[bool | None, str]:
    with flags_set({"fp16_accumulation": True}):
        if not is_on("fp16_accumulation"):
            return None, "a running model keeps the flag off"
        result = left @ right
    if torch.isfinite(result).all():
        return False, "the flag is accepted but has no effect: sums stay in fp32"
    return True, "the flag works: sums are kept in fp16"


CHECKS: dict[str, Check] = {
    "fp8_cast": functools.partial(_fp8_cast, fmt="fp8_e4m3fn"),
    "fp8_matmul": _fp8_matmul,
    "fp16_gemm": functools.partial(_gemm, name="fp16"),
    "bf16_gemm": functools.partial(_gemm, name="bf16"),
    "bf16_native": _bf16_native,
    "fp16_accumulation": _fp16_accumulation,
    "int8_matmul": _int8_matmul,
    "int8_kernels": _int8_kernels,
}
"""Name of a probe -> its check."""
