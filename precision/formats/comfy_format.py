"""One weight in ComfyUI's own quantization format: what it is stored in there, and its tensors.

A quantized layer is ``<layer>.weight`` (fp8 or int8), ``<layer>.weight_scale`` (fp32, 0-dim; int8: (rows, 1)),
``<layer>.comfy_quant`` (JSON as uint8) and, if known, ``<layer>.input_scale`` (ComfyUI ``comfy/ops.py``,
``_load_quantized_module``).
"""

import math
from dataclasses import dataclass

import torch

from ..amax import host_amax
from ..dtypes import FP16_MAX, QUANTIZED_NAMES, dtype_named, max_of, name_of
from ..errors import NonFiniteWeight
from ..files.safetensors_header import TensorSpec
from .int8 import dequantize_rows, quantize_rows, rotation_group
from .quantize import quantize
from .scratch import empty
from .stored_weight import StoredWeight, comfy_quant_tensor

LARGEST_ROUNDED = max_of(torch.float32) / 2
ERROR_SAMPLE = 8
SAMPLED = ((1, 4), (3, 4))
ROWS = 8
AS_FILE = "as_file"
OF_FNUZ = {"fp8_e4m3fnuz": "fp8_e4m3fn", "fp8_e5m2fnuz": "fp8_e5m2"}


@dataclass(frozen=True)
class SampledError:
    """Squared error of some rows of a weight as it is stored, and squared values, summed; zeros where unmeasured."""

    error: float = 0.0
    values: float = 0.0


@dataclass(frozen=True)
class WeightPlan:
    """What one weight is stored in.

    Attributes:
        storage: what is made of it; ``as_file``: it stays as it is.
        stored: the storage name that it has then.
        reason: why it is not stored as asked; empty where it is.
        format: the quantization format that it is in then; empty where it is in none.
        changes: its values or its scale are not those of the source.
        specs: the tensors that hold it.
        error: of the values that it is stored with.
    """

    storage: str
    stored: str
    reason: str
    format: str
    changes: bool
    specs: tuple[TensorSpec, ...]
    error: SampledError = SampledError()

    @property
    def bytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(spec.bytes for spec in self.specs)


def can_be_quantized(cls: str = "Linear", dimensions: int = 2) -> bool:
    """Tell whether ComfyUI can hold a layer's weight in fp8 or int8: 2-D weights of ``Linear`` modules only.

    Args:
        cls: name of the module's class; a file does not tell it, so that there the dimensions have to do.
        dimensions: of the weight.
    """
    # Of the other operations of ``mixed_precision_ops`` (comfy/ops.py) none but a bank of experts reads a scale.
    return cls == "Linear" and dimensions == 2


def exceeds_fp16(weight: StoredWeight, path) -> bool:
    """Tell whether fp16 cannot hold a value of a weight.

    Raises:
        NonFiniteWeight: it holds NaN or Inf.
    """
    if weight.scale is None and weight.data.dtype == torch.float16:
        return False
    return weight.exceeds(FP16_MAX, finite_bound(weight, path))


def finite_bound(weight: StoredWeight, path) -> float:
    """Return an upper bound on the magnitude of the dequantized weight; its amax where there is one scale.

    Raises:
        NonFiniteWeight: it holds NaN or Inf, or exceeds fp32's range.
    """
    if weight.coded is not None:
        largest = weight.coded.bound()
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


def requantization_error(weight: StoredWeight, storage: str, path) -> float:
    """Measure what bringing a weight to one fp8 scale costs, on a sample of its rows.

    Returns:
        The root mean square of each row's relative error: a small output channel counts like a large one.

    Raises:
        NonFiniteWeight: it holds NaN or Inf.
    """
    largest, squares, rows = _fp8_amax(weight, finite_bound(weight, path)), 0.0, 0
    for _, part in weight.parts(sample=ERROR_SAMPLE):
        quantized = quantize(part, dtype_named(storage), largest)
        error = (quantized.data.float() * quantized.scale - part).square().sum(1)
        squares += (error / part.square().sum(1).clamp_min(torch.finfo(torch.float32).tiny)).sum().item()
        rows += part.shape[0]
    return math.sqrt(squares / rows)


def sampled_error(weight: StoredWeight, storage: str) -> SampledError:
    """Compare some rows of a weight, quantized to ``storage``, with their own values; zeros where none is quantized.

    Nothing but these rows is read: fp8 gets a scale for their own amax. Scales are powers of two, so that the error
    differs from that of the whole weight's scale only for values that become subnormal with one of them.
    """
    if storage not in QUANTIZED_NAMES or _stays(weight, dtype_named(storage)):
        return SampledError()
    rows = torch.cat([weight.rows(part) for part in _sampled_rows(weight.shape[0])])
    exact = rows.double()  # squares of small weights are zero in fp32, of large ones Inf
    error = (_quantized_values(rows, storage) - exact).square().sum().item()
    return SampledError(error, exact.square().sum().item())


def _sampled_rows(rows: int) -> list[slice]:
    """Return two runs of rows, or all of them where there are few."""
    if rows <= ROWS * len(SAMPLED):
        return [slice(0, rows)]
    return [slice(start, start + ROWS) for start in (rows * over // under - ROWS // 2 for over, under in SAMPLED)]


def _quantized_values(rows: torch.Tensor, storage: str) -> torch.Tensor:
    if storage == "int8":
        group = rotation_group(rows.shape[1])
        codes, scale = quantize_rows(rows, group)
        return dequantize_rows(codes, scale, group)
    quantized = quantize(rows, dtype_named(storage), host_amax(rows))
    return quantized.data.float() * quantized.scale


def tensors_of(weight: StoredWeight, storage: str, path) -> dict[str, torch.Tensor]:
    """Make a weight's tensors in ComfyUI's format, by full name. fp8 with one scale stays as it is;
    other scales become one.

    Raises:
        NonFiniteWeight: the weight holds NaN or Inf.
    """
    largest = finite_bound(weight, path)
    if storage == AS_FILE:
        return {weight.name: weight.data, **weight.auxiliary}
    if largest > LARGEST_ROUNDED:
        problem = f"holds values up to {largest:.3g}, which round to infinity in {storage}"
        raise _damaged(weight, path, problem)
    dtype = dtype_named(storage)
    if storage not in QUANTIZED_NAMES:
        return {weight.name: weight.dequantize(dtype)}
    data, scale = _int8(weight, path) if storage == "int8" else _fp8(weight, dtype, largest)
    return {weight.name: data, f"{weight.layer}.weight_scale": scale, **_quantized_extras(weight, dtype)}


def _quantized_extras(weight: StoredWeight, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Make the tensors besides data and scale: their ``comfy_quant``, and the scale of the layer's input if known."""
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
    if weight.plain:
        data, scale = quantize_rows(weight.data, rotation_group(columns))
    else:
        data, scale = empty(weight.shape, torch.int8), torch.empty(rows, 1)
        for part, values in weight.parts():
            data[part], scale[part] = quantize_rows(values, rotation_group(columns))
    if not torch.isfinite(scale).all():
        raise _damaged(weight, path, "exceeds the range of fp32 once rotated")
    return data, scale


def _fp8_amax(weight: StoredWeight, bound: float) -> float:
    """Return the amax that one fp8 scale is made for. The bound of a weight that is unpacked is loose."""
    return bound if weight.coded is None else weight.amax


def _fp8(weight: StoredWeight, dtype: torch.dtype, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    if (unchanged := _as_it_is(weight, dtype)) is not None:
        return unchanged
    largest = _fp8_amax(weight, bound)
    if weight.plain:
        quantized = quantize(weight.data, dtype, largest)
        return quantized.data, quantized.scale
    data = empty(weight.shape, dtype)
    target = weight.matrix(data)
    for rows, part in weight.parts():
        quantized = quantize(part, dtype, largest)
        target[rows] = quantized.data
    return data, quantized.scale


def _as_it_is(weight: StoredWeight, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return data and scale of a weight that is in fp8 ``dtype`` with one scale, or in its fnuz sibling;
    None for others."""
    if not _stays(weight, dtype):
        return None
    # The values of an fnuz format fit its sibling with the same scale; only its last subnormal bit is lost.
    return weight.data.to(dtype), torch.tensor(1.0) if weight.scale is None else weight.scale


def _stays(weight: StoredWeight, dtype: torch.dtype) -> bool:
    """Tell whether a weight is in fp8 ``dtype`` with one scale, or in its fnuz sibling."""
    own = OF_FNUZ.get(name_of(weight.data.dtype), name_of(weight.data.dtype))
    return weight.coded is None and weight.granularity in ("none", "tensor") and own == name_of(dtype) != "int8"


def specs_of(weight: StoredWeight, storage: str) -> list[TensorSpec]:
    """Describe the tensors that :func:`tensors_of` will give, without making them."""
    tensors = {weight.name: weight.data, **weight.auxiliary}
    if storage != AS_FILE:
        dtype = dtype_named(storage)
        tensors = {weight.name: torch.empty(weight.shape, dtype=dtype, device="meta")}
        if storage in QUANTIZED_NAMES:
            scale = torch.empty((weight.shape[0], 1) if storage == "int8" else (), device="meta")
            tensors |= {f"{weight.layer}.weight_scale": scale, **_quantized_extras(weight, dtype)}
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
