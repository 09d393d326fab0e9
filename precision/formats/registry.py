"""The quantization formats of ComfyUI, by their names and storages."""

from dataclasses import replace
from functools import cache
from math import prod

import torch

from ..base.message import Message
from .blocks import Mxfp8, Nvfp4
from .format import Format
from .fp8 import E4M3, E5M2
from .int8 import Int8
from .read_only import Awq4, Int4
from .stored_weight import StoredWeight, Tensors
from .w4a8 import W4a8

_ALL: tuple[Format, ...] = (
    E4M3,
    E5M2,
    Nvfp4(),
    Mxfp8(),
    Int8(),
    Int4(),
    W4a8("w4a8", 4, "0.31.0", (198, 226, 140)),
    W4a8("w6a8", 6, "0.38.0", (150, 196, 110), asks="bits"),
    Awq4(),
)
FORMATS = {format.name: format for format in reversed(_ALL)}
FORMAT_OF_STORAGE = {format.storage: format for format in _ALL}


def fp8_dtypes(storage: str) -> tuple[str, ...]:
    """List the fp8 dtypes, by torch's names, that a device has to hold for weights in a storage."""
    format = FORMAT_OF_STORAGE.get(storage)  # the fnuz dtypes are no format of ComfyUI
    own = (storage.replace("fp8", "float8"),) if storage.startswith("fp8") else ()
    return own + (format.byte_scale[1:] if format and format.byte_scale else ())


def format_of(name: str, size: int, count: int) -> Format:
    """Return the format that ComfyUI calls ``name``, of a weight of ``count`` values whose data
    take ``size`` bytes."""
    return next(format for format in _ALL if format.name == name and format.bits in (0, 8 * size // count))


@cache
def stored_shapes(name: str, rows: int, columns: int) -> list[tuple[int, int]]:
    """List the shapes that ``<layer>.weight`` may have in a format that ComfyUI calls ``name``."""
    return [format.stored_shape(rows, columns) for format in _ALL if format.name == name]


def weight_in_format(
    name: str, data: torch.Tensor, tensors: Tensors, settings: dict, outputs: int | None = None
) -> StoredWeight:
    """Make the weight of ``data``, the tensors beside ``data`` in a file, and ``comfy_quant``.

    Raises:
        ValueError: a tensor is missing or does not fit the format; the message says why.
    """
    format = FORMATS[settings["format"]]
    missing = next((leaf for leaf in format.needs if leaf not in tensors), None)
    if missing:
        raise ValueError(Message("without its {0}", missing))
    typed = {leaf: _typed(tensor, format, leaf) for leaf, tensor in tensors.items()}
    weight = StoredWeight(name, data, format=format, tensors=typed, settings=settings, outputs=outputs)
    weight.check()
    weight = weight if weight.experts else format.read(weight)
    return replace(weight, format=format_of(format.name, data.nbytes, prod(weight.shape))) if format.bits else weight


def _typed(tensor: torch.Tensor, format: Format, leaf: str) -> torch.Tensor:
    """Return a scale in the dtype that its kernels take."""
    if leaf in format.in_fp32 and tensor.dtype in (torch.float16, torch.bfloat16, torch.float64):
        return tensor.float()
    name, dtype = format.byte_scale or ("", "")
    if leaf != name or tensor.dtype != torch.uint8:
        return tensor
    if not hasattr(torch, dtype):
        raise ValueError(Message("torch {0} has no {1}", torch.__version__, dtype))
    return tensor.view(getattr(torch, dtype))
