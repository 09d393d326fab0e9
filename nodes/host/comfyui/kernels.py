"""comfy-kitchen: the kernel that multiplies or unpacks a quantized weight, and its warnings once each.

A kernel is the device's own for a format, torch's general operations, or neither where the weight is dequantized.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from comfy.quant_ops import QuantizedTensor
from torch._subclasses.fake_tensor import FakeTensorMode

try:
    from comfy_kitchen.registry import registry
    from comfy_kitchen.tensor.fp8 import TensorCoreFP8Layout
except ImportError:
    registry = None

from ....precision.base.modes import FP8
from ....precision.formats.registry import FORMAT_OF_STORAGE, Format

NATIVE, EAGER, DEQUANTIZED = "native", "eager", "dequantized"
ROWS = 32
_warned: set[str] = set()
_unpacking: dict[tuple[torch.device, torch.dtype, torch.dtype], Callable] = {}
LOGGERS = ("comfy_kitchen.tensor.fp8", "comfy_kitchen.tensor.mxfp8", "comfy_kitchen.tensor.nvfp4")


def general_operations() -> AbstractContextManager:
    """Run comfy-kitchen's operations as torch's general ones while the context lasts, where it has them as such.

    A kernel of a device may be finite and wrong, as its RoPE is on Blackwell (``comfy/ldm/sensenova/model.py``).
    """
    return registry.use_backend(EAGER) if registry else nullcontext()


def kernel_of_product(row: Format | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Name the kernel that multiplies a weight as it is stored: ``native`` or ``eager``.

    An fp8 product is torch's own ``_scaled_mm``, which a CPU emulates. The others are comfy-kitchen's, in the first of
    its backends that takes the call: CUDA, HIP, Triton, or eager, which is made of torch's general operations. ComfyUI
    turns backends off (``comfy/quant_ops.py``).

    ``row``: the weight's format; None for a weight without a row. ``shape``: of the weight, (outputs, inputs).
    ``dtype``: of the layer's input and result.
    """
    if device.type == "cpu" or row is None or registry is None:
        return EAGER
    if row.mode is FP8:
        return NATIVE
    # Its int8 product alone depends on a call's arguments.
    arguments = _int8_call(shape, dtype, device) if row.product == FORMAT_OF_STORAGE["int8"].product else None
    try:
        return EAGER if registry.get_capable_backend(row.product, arguments) == "eager" else NATIVE
    except RuntimeError:
        return EAGER


def _int8_call(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> dict:
    with FakeTensorMode():
        return {
            "x": torch.empty(ROWS, shape[-1], dtype=dtype, device=device),
            "weight": torch.empty(shape, dtype=torch.int8, device=device),
            "weight_scale": torch.empty(shape[0], 1, device=device),
            "bias": None,
            "out_dtype": dtype,
            "convrot": True,
            "convrot_groupsize": 256,
            "input_act": None,
        }


def is_plain_fp8(weight: QuantizedTensor) -> bool:
    """True if a quantized weight is fp8 with a scale for all of the weight, and no graph is being compiled."""
    plain = registry is not None and issubclass(weight.layout_cls, TensorCoreFP8Layout)
    return plain and not torch.compiler.is_compiling()


def unpacked_fp8(weight: QuantizedTensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an fp8 weight in a dtype, by the kernel that comfy-kitchen's registry names for its device and dtypes.

    The registry is asked once: comfy-kitchen's operator asks it at each call, which takes longer on the host than the
    kernel does on a GPU.
    """
    data, scale = weight.layout_cls.get_plain_tensors(weight)
    key = data.device, data.dtype, dtype
    if key not in _unpacking:
        arguments = {"x": data, "scale": scale, "output_type": dtype}
        _unpacking[key] = registry.get_implementation("dequantize_per_tensor_fp8", kwargs=arguments)
    return _unpacking[key](data, scale, dtype)


def is_new(record: logging.LogRecord) -> bool:
    """Let each message through the first time."""
    text = record.getMessage()
    new = text not in _warned
    _warned.add(text)
    return new


def warn_once() -> None:
    """Pass on the warnings of comfy-kitchen's ``scaled_mm`` fallbacks (``tensor/fp8.py`` and others) once each.

    It warns at every product: some hundred times a step where a profile of another device is simulated.
    """
    for name in LOGGERS:
        logging.getLogger(name).addFilter(is_new)
