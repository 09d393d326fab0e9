"""comfy-kitchen: the kernel that multiplies or unpacks a quantized weight.

A kernel is the device's own for a format, torch's general operations, or neither where the weight
is dequantized."""

from __future__ import annotations

import functools
import hashlib
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor
from torch._subclasses.fake_tensor import FakeTensorMode

try:
    from comfy_kitchen.registry import registry
    from comfy_kitchen.tensor.fp8 import TensorCoreFP8Layout
    from comfy_kitchen.tensor.int8 import TensorWiseINT8Layout
except ImportError:
    registry = None

from ....precision.base.dtypes import name_of
from ....precision.base.modes import FP8
from ....precision.base.patching import patched
from ....precision.formats.format import Format, Unpacker
from ....precision.formats.registry import FORMAT_OF_STORAGE, FORMATS

NATIVE, EAGER, DEQUANTIZED = "native", "eager", "dequantized"
ROWS = 32
DATA, PARAMS, LAYOUT = "_qdata", "_params", "_layout_cls"
"""Where comfy-kitchen's tensors keep their data, their scales and the name of their layout; its
properties take a function of Python each time."""
EXPORT = "_wrap_for_dlpack"
"""The function of comfy-kitchen's CUDA backend that exports a tensor to its library."""
EXPORT_READ = "75902b722bba1bdc8d64d91f84ab55d03e2581d6ff8e6f4bef567f0e6067841e"
"""Hash of that function's source as :func:`_exporting_in_c` replaces it: comfy-kitchen 0.2.26 to
0.2.40."""
logger = logging.getLogger("halfsafe")
_unpacking: dict[tuple[torch.device, torch.dtype, torch.dtype, torch.dtype, int], Unpacker] = {}


@contextmanager
def general_operations() -> Iterator[None]:
    """Run comfy-kitchen's operations as torch's general ones while the context lasts, where it has
    them as such.

    A kernel of a device may be finite and wrong, as its RoPE is on Blackwell
    (``comfy/ldm/sensenova/model.py``)."""
    known_anew = patched([(sys.modules[__name__], "_unpacking", {})])
    with known_anew, registry.use_backend(EAGER) if registry else nullcontext():
        yield


def kernel_of_product(row: Format | None, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    """Name the kernel that multiplies a weight as it is stored: ``native`` or ``eager``.

    An fp8 product is torch's own ``_scaled_mm``, which a CPU emulates. The others are
    comfy-kitchen's, in the first of its backends that takes the call: CUDA, HIP, Triton, or eager,
    which is made of torch's general operations. ComfyUI turns backends off
    (``comfy/quant_ops.py``).

    ``row``: the weight's format; None for a weight without a row. ``shape``: of the weight,
    (outputs, inputs). ``dtype``: of the layer's input and result."""
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


def bound_format(weight: object) -> Format | None:
    """Return the format of a quantized matrix whose product can be bound: fp8 with one scale, or
    int8; None for any other weight."""
    if registry is None or not isinstance(weight, QuantizedTensor) or not {DATA, PARAMS} <= vars(weight).keys():
        return None
    data, params = getattr(weight, DATA), weight.params
    if data.dim() != 2 or getattr(params, "transposed", False):
        return None
    if issubclass(weight.layout_cls, TensorWiseINT8Layout):
        return FORMATS["int8_tensorwise"]
    is_fp8 = issubclass(weight.layout_cls, TensorCoreFP8Layout) and params.scale.numel() == 1
    return FORMAT_OF_STORAGE.get(name_of(data.dtype)) if is_fp8 else None


def group_of(weight: QuantizedTensor) -> int:
    """Return the number of inputs that an int8 weight's rotation turns together; 0 without a
    rotation."""
    params = weight.params
    return params.convrot_groupsize if getattr(params, "convrot", False) else 0


def unpacking(format: Format, weight: QuantizedTensor, dtype: torch.dtype) -> Unpacker:
    """Return what unpacks a weight of a format to a dtype.

    comfy-kitchen's registry is asked once: its operator asks it at each call, which takes longer on
    the host than the kernel does on a GPU."""
    data, group, scale = getattr(weight, DATA), group_of(weight), weight.params.scale
    key = data.device, data.dtype, scale.dtype, dtype, group
    if key not in _unpacking:
        _unpacking[key] = format.unpacking(kernel_that_takes, data, scale, dtype, group)
    return _unpacking[key]


def kernel_that_takes(name: str, **arguments: Any) -> Callable:
    """Return comfy-kitchen's function for a call in the first of its backends that takes these
    arguments.

    It takes arguments by their places, and tensors of the device of the first argument.
    """
    kernel = registry.get_implementation(name, kwargs=arguments)
    return _exporting_in_c(kernel, next(iter(arguments.values())).device.index)


@functools.cache
def _exporting_in_c(kernel: Callable, device: int | None) -> Callable:
    """Return a copy of a function of comfy-kitchen's CUDA backend that exports tensors in C; other
    functions as they are.

    Its ``_wrap_for_dlpack`` ends in ``torch._C._to_dlpack`` after checks in ``Tensor.__dlpack__``
    that take 3 microseconds of Python a tensor, half of the function's time. The capsule is the
    same. One of these checks counts: it refuses a tensor of another device than the current one,
    where the library would launch its kernel. With several GPUs the tensor's device is therefore
    made the current one (Comfy-Org/ComfyUI#16016)."""
    names = getattr(kernel, "__globals__", {})
    if EXPORT not in names:
        return kernel
    if _is_read(names[EXPORT]):
        kernel = _copies(names["__name__"], torch._C._to_dlpack)[kernel.__name__]
    return kernel if torch.cuda.device_count() < 2 else _on_device(kernel, device)


@functools.cache
def _copies(module: str, export: Callable) -> dict[str, Any]:
    """Copy a module's functions, with ``export`` as their export function, and return the module's
    names; the copies call each other."""
    own = vars(sys.modules[module])
    names = {**own, EXPORT: export}
    for name, function in own.items():
        if name != EXPORT and getattr(function, "__globals__", None) is own:
            parts = function.__code__, names, name, function.__defaults__, function.__closure__
            names[name] = types.FunctionType(*parts)
            names[name].__kwdefaults__ = function.__kwdefaults__
    return names


@functools.cache
def _is_read(export: Callable) -> bool:
    """True if comfy-kitchen's export of tensors has the source that was reviewed. Other sources are
    logged, and left as they are."""
    try:
        source = inspect.getsource(export)
    except OSError:  # a package without its source
        source = ""
    is_read = hashlib.sha256(source.encode()).hexdigest() == EXPORT_READ
    if not is_read:
        logger.info("Halfsafe: this comfy-kitchen exports tensors in another way, so its functions run unchanged.")
    return is_read


def _on_device(kernel: Callable, device: int | None) -> Callable:
    def run(*args: object) -> torch.Tensor:
        with torch.cuda.device(device):
            return kernel(*args)

    return run
