"""Names and limits of the formats weights are stored and computed in."""

from functools import cache

import torch

from .options import QUANTIZED_NAMES

DTYPES = {
    "fp8_e4m3fn": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int8": torch.int8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FP16_MAX = 65504.0
FP8_NAMES: tuple[str, ...] = tuple(name for name in QUANTIZED_NAMES if name.startswith("fp8"))
FP8_DTYPES = frozenset(DTYPES[name] for name in DTYPES if name.startswith("fp8"))


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype of a storage or compute name such as ``fp8_e4m3fn`` or ``bf16``."""
    return DTYPES[name]


@cache
def name_of(dtype: torch.dtype) -> str:
    """Return the name used in nodes, rules and reports; torch's own name for dtypes that store no weights."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


@cache
def max_of(dtype: torch.dtype) -> float:
    """Return the largest finite value of a floating dtype (448 for e4m3fn, 240 for e4m3fnuz, 65504 for fp16)."""
    return torch.finfo(dtype).max


@cache
def _numbers_of_bytes(fp8: torch.dtype, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.arange(256, dtype=torch.uint8).view(fp8).to(dtype).to(device)


def looked_up(data: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return ``data.to(dtype) * scale.to(dtype)`` of fp8 data, without an operation on fp8: each byte
    is looked up in a table of 256 numbers.

    torch moves and views fp8 tensors on MPS, and casts none before 2.15, then e4m3fn alone (PyTorch
    #194074). Takes 4 bytes a number beyond the result.
    """
    numbers = _numbers_of_bytes(data.dtype, dtype, data.device)
    if scale is not None:
        numbers = (numbers * scale.to(dtype)).view(-1)
    return numbers.index_select(0, data.view(torch.uint8).reshape(-1).int()).view(data.shape)
