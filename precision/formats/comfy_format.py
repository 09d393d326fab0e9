"""Weights in ComfyUI's own quantization format: what they are stored in there, and their tensors.

A quantized layer is ``<layer>.weight`` (fp8 or int8), ``<layer>.weight_scale`` (fp32, 0-dim; int8:
(rows, 1)), ``<layer>.comfy_quant`` (JSON as uint8) and, if known, ``<layer>.input_scale`` (ComfyUI
``comfy/ops.py``, ``_load_quantized_module``)."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache

import torch

from ..base.dtypes import FP8_NAMES, FP16_MAX, QUANTIZED_NAMES, dtype_named, max_of
from ..base.message import Message
from ..files.safetensors_header import TensorSpec
from .format import Format, comfy_quant_tensor
from .fp8 import quantize
from .layer_plan import AS_FILE, LayerPlan
from .registry import FORMAT_OF_STORAGE
from .stored_weight import FULL_PRECISION, StoredWeight, Tensors

LARGEST_ROUNDED = max_of(torch.float32) / 2
ERROR_SAMPLE = 8
SHARED_SAMPLE = 4
Made = tuple[StoredWeight, dict[str, torch.Tensor]]
"""A weight and its tensors as they are planned."""


def can_be_quantized(cls: str = "Linear", dimensions: int = 2) -> bool:
    """True if ComfyUI can hold a layer's weight in fp8 or int8: 2-D weights of ``Linear`` modules
    only.

    ``cls``: name of the module's class. A file does not have it, so for a file the dimensions
    decide."""
    # Of the other operations of ``mixed_precision_ops`` (comfy/ops.py) none but a bank of experts reads a scale.
    return cls == "Linear" and dimensions == 2


def exceeds_fp16(weight: StoredWeight, path) -> bool:
    """True if fp16 cannot hold a value of a weight.

    Raises:
        NonFiniteWeight: it holds NaN or Inf.
    """
    if weight.plain and weight.data.dtype == torch.float16:
        return False
    return weight.exceeds(FP16_MAX, weight.finite_bound(path))


def requantization_error(weight: StoredWeight, storage: str, path) -> float:
    """Measure the error of a weight with a single fp8 scale, on a sample of its rows.

    Returns:
        The root mean square of each row's relative error: a small output channel counts like a large one.

    Raises:
        NonFiniteWeight: it holds NaN or Inf.
    """
    bound = weight.finite_bound(path)
    squares = 0.0
    rows = 0
    largest = weight.format.largest_of(weight, bound)
    for _, part in weight.parts(sample=ERROR_SAMPLE):
        data, scale = quantize(part, dtype_named(storage), largest)
        error = (data.float() * scale - part).square().sum(1)
        squares += (error / part.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)).sum().item()
        rows += part.shape[0]
    return math.sqrt(squares / rows)


def stays(weight: StoredWeight, storage: str) -> bool:
    """True if a weight keeps the data of its file in a storage."""
    if storage in QUANTIZED_NAMES:
        return is_same_fp8(weight, storage) and weight.data.dtype == dtype_named(storage)
    return storage == AS_FILE or (weight.plain and weight.data.dtype == dtype_named(storage))


def tensors_of(weight: StoredWeight, storage: str, path, read: bool = True) -> dict[str, torch.Tensor]:
    """Make a weight's tensors in ComfyUI's format, by full name. fp8 with one scale stays as it is,
    of many gets one.

    ``read``: False to leave data that stay as they are unread, and unchecked.

    Raises:
        NonFiniteWeight: the weight holds NaN or Inf.
    """
    largest = weight.finite_bound(path) if read or not stays(weight, storage) else 0.0
    if storage == AS_FILE:
        return {weight.name: weight.data, **weight.auxiliary}
    if largest > LARGEST_ROUNDED:
        problem = Message("holds values up to {0}, which round to infinity in {1}", f"{largest:.3g}", storage)
        raise weight.damaged(path, problem)
    if storage not in QUANTIZED_NAMES:
        return {weight.name: weight.dequantize(dtype_named(storage))}
    made = _encoded(weight, FORMAT_OF_STORAGE[storage], largest)
    if storage not in FP8_NAMES and not all(made[leaf].float().isfinite().all() for leaf in made if leaf != "weight"):
        raise weight.damaged(path, "exceeds the range of fp32 once rotated")
    return {**{f"{weight.layer}.{leaf}": tensor for leaf, tensor in made.items()}, **_settings(weight, storage)}


def _settings(weight: StoredWeight, storage: str) -> dict[str, torch.Tensor]:
    """Make a quantized weight's ``comfy_quant``, and the scale of the layer's fp8 input if the file
    has that."""
    # That fp8 is too coarse for a layer's inputs does not tell that int8, with a scale for each token, is.
    fp8_alone = str(weight.settings.get("format")).startswith("float8") and storage not in FP8_NAMES
    full = bool(weight.settings.get(FULL_PRECISION)) and not fp8_alone
    tensors = {f"{weight.layer}.comfy_quant": _comfy_quant(storage, weight.shape[1], full)}
    if storage in FP8_NAMES and weight.input_scale is not None:
        tensors[f"{weight.layer}.input_scale"] = weight.input_scale
    return tensors


@lru_cache
def _comfy_quant(storage: str, columns: int, full_precision: bool) -> torch.Tensor:
    """Make the settings of all weights of a storage and as many columns: one tensor, which nothing
    writes to."""
    format = FORMAT_OF_STORAGE[storage]
    more = {FULL_PRECISION: True} if full_precision else {}
    return comfy_quant_tensor({"format": format.name} | format.settings(columns) | more)


def _encoded(weight: StoredWeight, format: Format, bound: float) -> Tensors:
    """Round a weight to nearest in a format; its tensors by the last part of their names."""
    if format.holds(weight):
        return format.taken_over(weight)
    if format.by_largest:
        shared = format.scale_for(weight.format.largest_of(weight, bound))
    else:
        shared = format.shared(part for _, part in weight.parts(sample=SHARED_SAMPLE))
    if weight.plain and not format.writer:
        return {**format.encode(weight.data, shared), **shared}
    device = weight.data.device if weight.plain else None
    specs = {leaf: spec for leaf, spec in format.specs(*weight.shape).items() if leaf not in shared}
    made = {leaf: torch.empty(shape, dtype=dtype, device=device) for leaf, (shape, dtype) in specs.items()}
    for part, rows in weight.parts(align=format.aligned):
        for leaf, tensor in format.encode(rows, shared).items():
            made[leaf][part.start : part.start + len(tensor)] = tensor
    return {**made, **shared}


def is_same_fp8(weight: StoredWeight, storage: str) -> bool:
    """True if a weight is in an fp8 storage with one scale, or in its fnuz sibling."""
    return storage in FP8_NAMES and FORMAT_OF_STORAGE[storage].holds(weight)


def specs_of(weight: StoredWeight, storage: str) -> list[TensorSpec]:
    """Describe the tensors that :func:`tensors_of` will give, without making them."""
    if storage in QUANTIZED_NAMES:
        specs = FORMAT_OF_STORAGE[storage].specs(*weight.shape).items()
        made = [TensorSpec(f"{weight.layer}.{leaf}", dtype, shape) for leaf, (shape, dtype) in specs]
        return made + [_spec(name, tensor) for name, tensor in _settings(weight, storage).items()]
    if storage == AS_FILE:
        return [_spec(name, tensor) for name, tensor in {weight.name: weight.data, **weight.auxiliary}.items()]
    return [TensorSpec(weight.name, dtype_named(storage), tuple(weight.shape))]


def _spec(name: str, tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(name, tensor.dtype, tuple(tensor.shape))


def check_finite(tensors: Mapping[str, torch.Tensor], path) -> None:
    """Raise :class:`NonFiniteWeight` for the first floating tensor that holds NaN or Inf."""
    for name, tensor in tensors.items():
        StoredWeight(name, tensor).finite_bound(path)


def made_here(
    weights: Mapping[str, StoredWeight], plans: Mapping[str, LayerPlan], path, read: bool = True
) -> Iterator[Made]:
    """Make weights where they are, one after another, by :func:`tensors_of`."""
    for name, weight in weights.items():
        yield weight, tensors_of(weight, plans[name].storage, path, read)


def tensors_made(made: Iterable[Made], done: Callable[[str, int], None]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of weights by name as they are made.

    ``done``: called with the name of each weight once its tensors are taken, and the bytes it had.
    """
    for weight, tensors in made:
        yield from tensors.items()
        done(weight.name, weight.data.nbytes)
