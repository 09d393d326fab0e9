"""One weight in ComfyUI's own quantization format: what it is stored in there, and its tensors.

A quantized layer is ``<layer>.weight`` (fp8), ``<layer>.weight_scale`` (fp32, 0-dim), ``<layer>.comfy_quant`` (JSON as
uint8) and, if known, ``<layer>.input_scale`` (ComfyUI ``comfy/ops.py``, ``_load_quantized_module``).
"""

import math
from dataclasses import dataclass

import torch

from ..amax import host_amax
from ..dtypes import FP8_NAMES, FP16_MAX, dtype_named, max_of, name_of
from ..errors import NonFiniteWeight
from .checkpoint import comfy_quant_tensor
from .quantize import quantize
from .safetensors_header import TensorSpec
from .stored_weight import StoredWeight

REQUANTIZATION_LIMIT = {"fp8_e4m3fn": 0.04, "fp8_e5m2": 0.08}
LARGEST_ROUNDED = max_of(torch.float32) / 2
ERROR_SAMPLE = 8
UNCHANGED = "as_file"
_OF_FNUZ = {"fp8_e4m3fnuz": "fp8_e4m3fn", "fp8_e5m2fnuz": "fp8_e5m2"}


@dataclass(frozen=True)
class Outcome:
    """What a weight is stored in (``as_file``: unchanged), and why not as asked."""

    storage: str
    note: str | None = None


def can_be_quantized(cls: str = "Linear", dimensions: int = 2) -> bool:
    """Tell whether ComfyUI can hold a layer's weight in fp8: 2-D weights of ``Linear`` modules only.

    Of the other operations of ``mixed_precision_ops`` (``comfy/ops.py``) none but a bank of experts reads a scale.

    Args:
        cls: name of the module's class; a file does not tell it, so that there the dimensions have to do.
        dimensions: of the weight.
    """
    return cls == "Linear" and dimensions == 2


def outcome_of(weight: StoredWeight, storage: str, path) -> Outcome:
    """What a weight will be stored in. Looks into the data only where the answer depends on it.

    Args:
        storage: ``as_file`` (or ``auto``), or a dtype name.

    Raises:
        NonFiniteWeight: the weight holds NaN or Inf.
    """
    if weight.granularity == "native":
        asked_otherwise = storage not in ("auto", UNCHANGED)
        return Outcome(UNCHANGED, "stays in its own format, which only ComfyUI unpacks" if asked_otherwise else None)
    if weight.data.numel() == 0 or (weight.scale is None and not weight.is_number):
        return Outcome(UNCHANGED)
    storage = _resolved(weight, storage)
    if storage in FP8_NAMES:
        return _fp8_outcome(weight, storage, path)
    if storage == "fp16" and passes_fp16(weight, path):
        return Outcome("bf16", f"kept in bf16: values pass fp16's {FP16_MAX:.0f}")
    return Outcome(UNCHANGED if storage == name_of(weight.data.dtype) and weight.scale is None else storage)


def _resolved(weight: StoredWeight, storage: str) -> str:
    if storage not in ("auto", UNCHANGED):
        return storage
    own = name_of(weight.data.dtype)
    return _OF_FNUZ.get(own, "bf16" if own == "int8" else own)


def _fp8_outcome(weight: StoredWeight, storage: str, path) -> Outcome:
    if not weight.name.endswith(".weight") or not can_be_quantized(dimensions=weight.data.dim()):
        held = "bf16" if weight.eight_bit else UNCHANGED
        return Outcome(held, "ComfyUI holds only the weights of Linear layers in fp8")
    if weight.granularity in ("row", "block") or weight.data.dtype == torch.int8:
        error = _requantization_error(weight, dtype_named(storage), finite_bound(weight, path))
        if error > REQUANTIZATION_LIMIT[storage]:
            return Outcome("bf16", f"kept in bf16: one scale instead of {weight.scale.numel()} costs {error:.1%}")
    return Outcome(storage)


def passes_fp16(weight: StoredWeight, path) -> bool:
    """Whether fp16 cannot hold a value of a weight.

    Raises:
        NonFiniteWeight: it holds NaN or Inf.
    """
    if weight.scale is None and weight.data.dtype == torch.float16:
        return False
    return weight.passes(FP16_MAX, finite_bound(weight, path))


def finite_bound(weight: StoredWeight, path) -> float:
    """The largest magnitude of the dequantized weight; with several scales what the largest of them can give.

    Raises:
        NonFiniteWeight: it holds NaN or Inf, or passes fp32's range.
    """
    if weight.is_number:
        largest = host_amax(weight.data)
    else:
        largest = 0.0 if weight.scale is None else float(torch.iinfo(weight.data.dtype).max + 1)
    if not math.isfinite(largest):
        raise NonFiniteWeight(path, "holds NaN or Inf", weight.name, "The file is damaged: download it again.")
    bound = weight.bound(largest)
    if bound > max_of(torch.float32):
        raise NonFiniteWeight(path, "passes the range of fp32", weight.name, "The file is damaged: download it again.")
    return bound


def _requantization_error(weight: StoredWeight, dtype: torch.dtype, bound: float) -> float:
    """What bringing a weight to one scale costs, measured on a sample of its rows.

    The root mean square of each row's relative error: a small output channel counts like a large one.
    """
    squares, rows = 0.0, 0
    for _, part in weight.parts(sample=ERROR_SAMPLE):
        quantized = quantize(part, dtype, bound)
        error = (quantized.data.float() * quantized.scale - part).square().sum(1)
        squares += (error / part.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)).sum().item()
        rows += part.shape[0]
    return math.sqrt(squares / rows)


def tensors_of(weight: StoredWeight, outcome: Outcome, path) -> dict[str, torch.Tensor]:
    """A weight's tensors in ComfyUI's format, by full name. fp8 with one scale stays as it is; other scales become one.

    Raises:
        NonFiniteWeight: the weight holds NaN or Inf.
    """
    largest = finite_bound(weight, path)
    if outcome.storage == UNCHANGED:
        return {weight.name: weight.data, **weight.companions}
    if largest > LARGEST_ROUNDED:
        problem = f"holds values up to {largest:.3g}, which round to infinity in {outcome.storage}"
        raise NonFiniteWeight(path, problem, weight.name, "The file is damaged: download it again.")
    dtype = dtype_named(outcome.storage)
    if outcome.storage not in FP8_NAMES:
        return {weight.name: weight.dequantize(dtype)}
    data, scale = _fp8(weight, dtype, largest)
    return {weight.name: data, f"{weight.layer}.weight_scale": scale, **_fp8_companions(weight, dtype)}


def storage_name(weight: StoredWeight, outcome: Outcome) -> str:
    """The storage name of an outcome, also of an unchanged weight: ``native`` for a format that only ComfyUI unpacks."""
    if outcome.storage != UNCHANGED:
        return outcome.storage
    return "native" if weight.granularity == "native" else name_of(weight.data.dtype)


def _fp8_companions(weight: StoredWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    settings: dict[str, object] = {"format": str(dtype).removeprefix("torch.")}
    if weight.full_precision:
        settings["full_precision_matrix_mult"] = True
    companions = {f"{weight.layer}.comfy_quant": comfy_quant_tensor(settings)}
    if weight.input_scale is not None:
        companions[f"{weight.layer}.input_scale"] = weight.input_scale
    return companions


def _fp8(weight: StoredWeight, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    if (unchanged := _as_it_is(weight, dtype)) is not None:
        return unchanged
    if weight.granularity == "none":
        quantized = quantize(weight.data, dtype, largest)
        return quantized.data, quantized.scale
    data = torch.empty(weight.data.shape, dtype=dtype)
    target = weight.matrix(data)
    for rows, part in weight.parts():
        quantized = quantize(part, dtype, largest)
        target[rows] = quantized.data
    return data, quantized.scale


def _as_it_is(weight: StoredWeight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Data and scale of a weight that is in fp8 ``dtype`` with one scale, or in its fnuz sibling; None for others."""
    if weight.granularity not in ("none", "tensor"):
        return None
    scale = torch.tensor(1.0) if weight.scale is None else weight.scale
    if weight.data.dtype == dtype:
        return weight.data, scale
    if _OF_FNUZ.get(name_of(weight.data.dtype)) == name_of(dtype):
        # The values of an fnuz format fit its sibling with the same scale; only its last subnormal bit is lost.
        return weight.data.to(dtype), scale
    return None


def specs_of(weight: StoredWeight, outcome: Outcome) -> list[TensorSpec]:
    """The tensors that :func:`tensors_of` will give, without making them."""
    tensors = {weight.name: weight.data, **weight.companions}
    if outcome.storage != UNCHANGED:
        dtype = dtype_named(outcome.storage)
        tensors = {weight.name: torch.empty(weight.data.shape, dtype=dtype, device="meta")}
        if outcome.storage in FP8_NAMES:
            tensors |= {f"{weight.layer}.weight_scale": torch.tensor(1.0), **_fp8_companions(weight, dtype)}
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
