"""GGUF files as ComfyUI-GGUF's tools write them, by the library's own writer, and blocks of every type it unpacks."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import load_file, save_file

ASKED_FOR = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""The types that diffusion models come in."""

MINIMUM = {"Q4_1": -7.5, "Q5_1": -15.5, "Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
"""The second fp16 number of a block, in units of the first, that gives random numbers a mean of about 0."""


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
    """Rows of bytes of a quantized weight of random numbers, about 0 and of a standard deviation where the type has fp16 numbers.

    The library cannot quantize to every type that it unpacks.
    """
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (int(np.prod(shape)) // block, size), dtype=np.uint8)
    if kind == "MXFP4":
        data[:, 0] = 120
    if kind == "IQ1_M":
        # The upper halves of four bytes make one fp16 number, here 0x1400.
        data[:, 49:56:2] = data[:, 49:56:2] & 15 | np.array([0x00, 0x00, 0x40, 0x10], dtype=np.uint8)
    scale = random.uniform(0.5, 1.0, (len(data), 1))
    _set_halves(data, kind, scale / 64)
    _set_halves(data, kind, scale / 64 * std / values(data, kind).std().item())
    return data.reshape(*shape[:-1], -1)


def _set_halves(data: np.ndarray, kind: str, scale: np.ndarray) -> None:
    for at, factor in zip(halves_of(kind), (1.0, MINIMUM.get(kind, 0.0)), strict=False):
        data[:, at : at + 2] = (factor * scale).astype(np.float16).view(np.uint8)


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


def of_model(
    source: Path, target: Path, kinds: Sequence[str], reference: Path | None = None, reshape: bool = False, **options
) -> Path:
    """Write the model of a safetensors file, its weights in one type after another, and what they unpack to in fp32 to ``reference``.

    As ComfyUI-GGUF's converter does, vectors, small tensors, modulations and rows of no whole blocks are F32; with
    ``reshape`` the latter become rows of 256. Types that the library cannot quantize to get random numbers of the weight's
    standard deviation.
    """
    written, shapes, turn = {}, {}, cycle(kinds)
    for name, weight in load_file(source).items():
        if reshape and weight.dim() > 1 and weight.numel() % 256 == 0 and weight.shape[-1] % 256:
            shapes[name] = tuple(weight.shape)
            weight = weight.reshape(-1, 256)
        whole = weight.dim() < 2 or weight.numel() <= 1024 or "modulation" in name or weight.shape[-1] % 256
        written[name] = in_type(weight.float(), "F32" if whole else next(turn), len(written))
    if reference:
        save_file({name: values(data, kind).contiguous() for name, (kind, data) in written.items()}, reference)

    def add_shapes(writer: gguf.GGUFWriter) -> None:
        for name, shape in shapes.items():
            writer.add_array(f"comfy.gguf.orig_shape.{name}", shape)

    return write(target, written, fields=add_shapes, **options)


def in_type(weight: torch.Tensor, kind: str, seed: int = 0) -> tuple[str, np.ndarray]:
    """A weight in a type, for :func:`write`; random numbers of its standard deviation where the library cannot quantize to it."""
    try:
        return kind, quantized(weight, kind)
    except NotImplementedError:
        return kind, blocks(kind, tuple(weight.shape), seed, weight.std().item())
