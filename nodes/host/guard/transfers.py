"""Tell a weight that went bad between its file and the device from one that is bad in the file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from comfy.quant_ops import QuantizedTensor

from ....precision.errors import CheckpointError
from ....precision.guard.inputs import is_finite
from ....precision.guard.localize import stored
from ..load.files import open_model
from ..run.modules import weights_of

if TYPE_CHECKING:
    from ....precision.formats.stored_weight import StoredWeight

ON_THE_WAY = (
    "The weight '{}' is finite in host memory, and as the device multiplies by it it holds NaN or Inf: "
    "it went bad on its way there."
)
AFTER_READING = (
    "The weight '{}' holds NaN or Inf as it was loaded, and in {} it does not: "
    "it went bad after it was read, or the file was replaced since."
)


def transfer_sentence(name: str, module: torch.nn.Module, device: torch.device, file: str) -> str:
    """Describe a weight that is bad where it is multiplied and finite where it came from; empty for any other.

    Args:
        name: the weight's, which ends with its attribute of ``module``.
        module: a layer whose weight no LoRA or other patch has changed.
        device: where the layer is called.
        file: the path of what the model was loaded from; empty where that is not known.
    """
    weight = getattr(module, name.rpartition(".")[2], None)
    if not isinstance(weight, torch.Tensor):
        return ""
    if is_finite(stored(weight)):
        return "" if _arrives(module, device) else ON_THE_WAY.format(name)
    return AFTER_READING.format(name, Path(file).name) if _is_fine_in(file, name, weight) else ""


def _arrives(module: torch.nn.Module, device: torch.device) -> bool:
    """Tell whether the weight that ComfyUI gives a layer on a device is finite."""
    with weights_of(module)(module, torch.zeros(1, device=device), torch.float32) as (weight, _):
        return is_finite(weight)


def _is_fine_in(file: str, name: str, weight: torch.Tensor) -> bool:
    """Tell whether the file's weight is finite, and still is in the dtype that it was loaded in."""
    found = _in_file(file, name)
    return found is not None and math.isfinite(found.amax) and is_finite(_as_loaded(found, weight))


def _in_file(file: str, name: str) -> StoredWeight | None:
    try:
        weights = open_model(file).weights if file else {}
    except (CheckpointError, OSError):
        return None
    found = [name] if name in weights else [key for key in weights if key.endswith(f".{name}")]
    return weights[found[0]] if len(found) == 1 else None


def _as_loaded(found: StoredWeight, weight: torch.Tensor) -> torch.Tensor:
    """Return the file's numbers in the dtype that the loaded ones are stored in, as a loader casts them.

    ComfyUI's casts to fp8 without a scale and takes scaled e5m2 for e4m3fn: NaN that comes of it is no transfer's. What
    is quantized from 16 bit has a scale, and no such cast.
    """
    dtype = stored(weight).dtype
    if isinstance(weight, QuantizedTensor) and not found.quantized:
        return found.data
    return found.data.to(dtype) if found.coded is None else found.dequantize(torch.float32)
