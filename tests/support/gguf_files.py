"""GGUF files as ComfyUI-GGUF's tools write them, by the library's own writer, and blocks of every type it unpacks."""

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

ASKED_FOR = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""The types that diffusion models come in."""


def unpacked_types() -> list[str]:
    """Every type that the library unpacks."""
    return [kind.name for kind in GGMLQuantizationType if _unpacks(kind)]


def _unpacks(kind: GGMLQuantizationType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def blocks(kind: str, shape: tuple[int, ...], seed: int = 0, std: float = 0.02) -> np.ndarray:
    """Rows of bytes of a quantized weight with random numbers and finite scales; the library cannot quantize to every type."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    count = int(np.prod(shape)) // block
    data = random.integers(0, 256, (count, size), dtype=np.uint8)
    for offset in halves_of(kind):
        data[:, offset : offset + 2] = (random.random((count, 1)) * std / 50).astype(np.float16).view(np.uint8)
    if kind == "MXFP4":
        data[:, 0] = 120
    if kind == "IQ1_M":
        # The upper halves of four bytes make one fp16 number, here 0x1400.
        data[:, 49:56:2] = data[:, 49:56:2] & 15 | np.array([0x00, 0x00, 0x40, 0x10], dtype=np.uint8)
    return data.reshape(*shape[:-1], -1)


def halves_of(kind: str) -> list[int]:
    """Where the fp16 numbers of a block lie, by ``ggml-common.h``."""
    ends = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "TQ1_0": (52,), "TQ2_0": (64,), "MXFP4": (), "NVFP4": (), "IQ1_M": ()}
    two = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    return list(ends.get(kind, (0, 2) if kind in two else (0,)))


def quantized(weight: torch.Tensor, kind: str) -> np.ndarray:
    """A weight in a type that the library can quantize to; plain types too."""
    return gguf.quants.quantize(weight.float().numpy(), GGMLQuantizationType[kind])


def values(data: np.ndarray, kind: str) -> torch.Tensor:
    """What the library unpacks of all of a tensor's bytes at once."""
    with np.errstate(all="ignore"):
        return torch.from_numpy(gguf.quants.dequantize(data, GGMLQuantizationType[kind]).copy())


def write(
    path: Path,
    tensors: Mapping[str, tuple[str, np.ndarray]],
    arch: str | None = "wan",
    fields: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    **options,
) -> Path:
    """Write ``name -> (type, data)``; quantized data are rows of bytes. ``arch`` None: as old stable-diffusion.cpp."""
    writer = gguf.GGUFWriter(str(path), arch or "", **options)
    if arch is None:
        writer.kv_data[0].pop(gguf.Keys.General.ARCHITECTURE, None)
    fields(writer)
    for name, (kind, data) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
