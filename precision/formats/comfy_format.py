"""One weight in ComfyUI's own quantization format: what it is stored in there, and its tensors.

A quantized layer is ``<layer>.weight`` (fp8 or int8), ``<layer>.weight_scale`` (fp32, 0-dim; int8: (rows, 1)),
``<layer>.comfy_quant`` (JSON as uint8) and, if known, ``<layer>.input_scale`` (ComfyUI ``comfy/ops.py``,
``_load_quantized_module``).
"""

import math
from dataclasses import dataclass

import torch

from ..amax import host_amax
from ..dtypes import FP8_NAMES, FP16_MAX, QUANTIZED_NAMES, dtype_named, max_of, name_of
from ..errors import NonFiniteWeight
from ..files.safetensors_header import TensorSpec
from .int8 import quantize_rows, rotation_group, why_not_int8
from .quantize import quantize
from .stored_weight import StoredWeight, comfy_quant_tensor

REQUANTIZATION_LIMIT = {"fp8_e4m3fn": 0.04, "fp8_e5m2": 0.08}
LARGEST_ROUNDED = max_of(torch.float32) / 2
ERROR_SAMPLE = 8
AS_FILE = "as_file"
_OF_FNUZ = {"fp8_e4m3fnuz": "fp8_e4m3fn", "fp8_e5m2fnuz": "fp8_e5m2"}


@dataclass(frozen=True)
class StoragePlan:
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


def plan_weight(weight: StoredWeight, storage: str, path) -> StoragePlan:
    """What a weight will be stored in. Looks into the data only where the answer depends on it.

    Args:
        storage: ``as_file`` (or ``auto``), or a dtype name.

    Raises:
        NonFiniteWeight: the weight holds NaN or Inf.
    """
    if weight.data.numel() == 0 or (weight.scale is None and not weight.is_number and weight.encoding is None):
        return StoragePlan(AS_FILE)
    storage = _resolved(weight, storage)
    if storage == AS_FILE or (weight.encoding is not None and storage == weight.storage):
        return StoragePlan(AS_FILE)
    if storage in FP8_NAMES:
        return _plan_fp8(weight, storage, path)
    if storage == "int8":
        return _plan_int8(weight)
    if storage == "fp16" and exceeds_fp16(weight, path):
        return StoragePlan("bf16", f"kept in bf16: values exceed fp16's {FP16_MAX:.0f}")
    return StoragePlan(AS_FILE if storage == weight.storage and weight.scale is None else storage)


def _resolved(weight: StoredWeight, storage: str) -> str:
    if storage not in ("auto", AS_FILE):
        return storage
    if weight.encoding is not None:
        return AS_FILE
    own = name_of(weight.data.dtype)
    return _OF_FNUZ.get(own, "bf16" if own == "int8" else own)


def _not_linear(weight: StoredWeight, storage: str) -> StoragePlan | None:
    """What a weight stays in because ComfyUI cannot hold it quantized; None for the weight of a Linear layer."""
    if can_be_quantized(dimensions=len(weight.shape)) and weight.name.endswith(".weight"):
        return None
    return StoragePlan(_unquantized(weight), f"ComfyUI holds only the weights of Linear layers in {storage}")


def _unquantized(weight: StoredWeight) -> str:
    return "bf16" if weight.quantized else AS_FILE


def _plan_int8(weight: StoredWeight) -> StoragePlan:
    if (kept := _not_linear(weight, "int8")) is not None:
        return kept
    if why := why_not_int8(weight.shape[1]):
        return StoragePlan(_unquantized(weight), why)
    return StoragePlan("int8")


def _plan_fp8(weight: StoredWeight, storage: str, path) -> StoragePlan:
    if (kept := _not_linear(weight, "fp8")) is not None:
        return kept
    if weight.encoding is not None or weight.granularity in ("row", "block") or weight.data.dtype == torch.int8:
        error = _requantization_error(weight, dtype_named(storage), _fp8_amax(weight, finite_bound(weight, path)))
        if error > REQUANTIZATION_LIMIT[storage]:
            many = weight.storage if weight.encoding is not None else f"{weight.scale.numel()}"
            return StoragePlan("bf16", f"kept in bf16: one scale instead of {many} costs {error:.1%}")
    return StoragePlan(storage)


def exceeds_fp16(weight: StoredWeight, path) -> bool:
    """Tell whether fp16 cannot hold a value of a weight.

    Raises:
        NonFiniteWeight: it holds NaN or Inf.
    """
    if weight.scale is None and weight.data.dtype == torch.float16:
        return False
    return weight.exceeds(FP16_MAX, finite_bound(weight, path))


def finite_bound(weight: StoredWeight, path) -> float:
    """Upper bound on the magnitude of the dequantized weight; its amax where there is one scale.

    Raises:
        NonFiniteWeight: it holds NaN or Inf, or exceeds fp32's range.
    """
    if weight.encoding is not None:
        largest = weight.encoding.bound()
    elif weight.is_number:
        largest = host_amax(weight.data)
    else:
        largest = 0.0 if weight.scale is None else float(torch.iinfo(weight.data.dtype).max + 1)
    if not math.isfinite(largest):
        raise _damaged(weight, path, "holds NaN or Inf")
    bound = weight.bound(largest)
    if bound > max_of(torch.float32):
        raise _damaged(weight, path, "exceeds the range of fp32")
    return bound


def _damaged(weight: StoredWeight, path, problem: str) -> NonFiniteWeight:
    return NonFiniteWeight(weight.file or path, problem, weight.name, "The file is damaged: download it again.")


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


def tensors_of(weight: StoredWeight, plan: StoragePlan, path) -> dict[str, torch.Tensor]:
    """A weight's tensors in ComfyUI's format, by full name. fp8 with one scale stays as it is; other scales become one.

    Raises:
        NonFiniteWeight: the weight holds NaN or Inf.
    """
    largest = finite_bound(weight, path)
    if plan.storage == AS_FILE:
        return {weight.name: weight.data, **weight.auxiliary}
    if largest > LARGEST_ROUNDED:
        problem = f"holds values up to {largest:.3g}, which round to infinity in {plan.storage}"
        raise _damaged(weight, path, problem)
    dtype = dtype_named(plan.storage)
    if plan.storage not in QUANTIZED_NAMES:
        return {weight.name: weight.dequantize(dtype)}
    data, scale = _int8(weight, path) if plan.storage == "int8" else _fp8(weight, dtype, largest)
    return {weight.name: data, f"{weight.layer}.weight_scale": scale, **_beside_quantized(weight, dtype)}


def storage_name(weight: StoredWeight, plan: StoragePlan) -> str:
    """The storage name of a plan, also of an unchanged weight."""
    return weight.storage if plan.storage == AS_FILE else plan.storage


def _beside_quantized(weight: StoredWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What stands beside data and scale: how ComfyUI is to read them, and the scale of the layer's input if that is known."""
    if dtype == torch.int8:
        settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": rotation_group(weight.shape[1])}
        return {f"{weight.layer}.comfy_quant": comfy_quant_tensor(settings)}
    settings = {"format": str(dtype).removeprefix("torch.")}
    if weight.full_precision:
        settings["full_precision_matrix_mult"] = True
    tensors = {f"{weight.layer}.comfy_quant": comfy_quant_tensor(settings)}
    if weight.input_scale is not None:
        tensors[f"{weight.layer}.input_scale"] = weight.input_scale
    return tensors


def _int8(weight: StoredWeight, path) -> tuple[torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    if weight.granularity == "none" and weight.encoding is None:
        data, scale = quantize_rows(weight.data, rotation_group(columns))
    else:
        data, scale = torch.empty(rows, columns, dtype=torch.int8), torch.empty(rows, 1)
        for part, values in weight.parts():
            data[part], scale[part] = quantize_rows(values, rotation_group(columns))
    if not torch.isfinite(scale).all():
        raise _damaged(weight, path, "exceeds the range of fp32 once rotated")
    return data, scale


def _fp8_amax(weight: StoredWeight, bound: float) -> float:
    """The amax that one fp8 scale is made for. An encoding's bound is loose: its values are looked at."""
    return bound if weight.encoding is None else max(part.abs().max().item() for _, part in weight.parts())


def _fp8(weight: StoredWeight, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    if (unchanged := _as_it_is(weight, dtype)) is not None:
        return unchanged
    if weight.granularity == "none" and weight.encoding is None:
        quantized = quantize(weight.data, dtype, largest)
        return quantized.data, quantized.scale
    data, largest = torch.empty(weight.shape, dtype=dtype), _fp8_amax(weight, largest)
    target = weight.matrix(data)
    for rows, part in weight.parts():
        quantized = quantize(part, dtype, largest)
        target[rows] = quantized.data
    return data, quantized.scale


def _as_it_is(weight: StoredWeight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Data and scale of a weight that is in fp8 ``dtype`` with one scale, or in its fnuz sibling; None for others."""
    if weight.encoding is not None or weight.granularity not in ("none", "tensor"):
        return None
    scale = torch.tensor(1.0) if weight.scale is None else weight.scale
    if weight.data.dtype == dtype:
        return weight.data, scale
    if _OF_FNUZ.get(name_of(weight.data.dtype)) == name_of(dtype):
        # The values of an fnuz format fit its sibling with the same scale; only its last subnormal bit is lost.
        return weight.data.to(dtype), scale
    return None


def specs_of(weight: StoredWeight, plan: StoragePlan) -> list[TensorSpec]:
    """The tensors that :func:`tensors_of` will give, without making them."""
    tensors = {weight.name: weight.data, **weight.auxiliary}
    if plan.storage != AS_FILE:
        dtype = dtype_named(plan.storage)
        tensors = {weight.name: torch.empty(weight.shape, dtype=dtype, device="meta")}
        if plan.storage in QUANTIZED_NAMES:
            scale = torch.empty((weight.shape[0], 1) if plan.storage == "int8" else (), device="meta")
            tensors |= {f"{weight.layer}.weight_scale": scale, **_beside_quantized(weight, dtype)}
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
