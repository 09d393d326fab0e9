"""What each weight of a model is stored in, and why not as asked.

The rules of a user and the modules of a model are asked before, layer by layer (``plan/storage.py``); here every
tensor is looked at with its scales, its values where they decide, and what holds it afterwards.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from ..base.dtypes import FP8_DTYPES, FP8_NAMES, FP16_MAX, QUANTIZED_NAMES, name_of
from ..base.errors import CheckpointError, StorageNotHeld
from ..base.text import listed
from ..formats.checkpoint import StoredWeight, looks_like_scale
from ..formats.comfy_format import (
    AS_FILE,
    OF_FNUZ,
    UNMEASURED,
    WeightPlan,
    exceeds_fp16,
    requantization_error,
    sampled_error,
    specs_of,
)
from ..formats.registry import FORMAT_OF_STORAGE
from .choice import frozen
from .storage import why_not_quantized

REQUANTIZATION_LIMIT = {"fp8_e4m3fn": 0.04, "fp8_e5m2": 0.08}


@dataclass(frozen=True)
class Memory:
    """The formats and dtypes that a ComfyUI and its device can hold.

    Attributes:
        unpacked: the dtype for weights that leave 8 bits or fewer because it cannot hold them so.
        not_linear: the model's tensors that are the weight of no Linear module, which alone holds fp8 with a scale.
        linear: those that are.
        assigned: the model is given the tensors themselves, as under dynamic VRAM, and none is copied into it; what
            stays as it is, is not read.
        unheld: each storage that the device cannot hold -> why.
    """

    formats: Container[str]
    unpacked: str
    not_linear: Container[str] = ()
    linear: Container[str] = ()
    assigned: bool = False
    unheld: Mapping[str, str] = field(default_factory=lambda: frozen({}))

    def lacks(self, weight: StoredWeight) -> bool:
        """Tell whether a weight cannot be held as it is."""
        # Inputs of experts are not rotated (``_expert_qt_from`` of comfy/ops.py leaves ``convrot`` out).
        rotated_experts = bool(weight.experts) and weight.group is not None
        return weight.storage in self.unheld or self.is_unknown(weight) or rotated_experts

    def is_unknown(self, weight: StoredWeight) -> bool:
        """Tell whether a weight is in a format unknown to the ComfyUI."""
        # Its own loader fails on one with a KeyError (``_load_quantized_module`` in comfy/ops.py).
        return weight.format is not None and weight.storage not in self.formats


def plan_weights(
    weights: Mapping[str, StoredWeight],
    asked: Mapping[str, str],
    path,
    memory: Memory | None = None,
    done: Callable[[str, int], None] | None = None,
) -> dict[str, WeightPlan]:
    """Decide what each weight is stored in. Reads values only where the answer depends on them.

    Args:
        asked: tensor name -> storage; the others stay as they are.
        memory: what the weights are loaded into; None for a file, which holds every format, and whose card gets errors.

    Raises:
        NonFiniteWeight: a weight whose values were read holds NaN or Inf.
        StorageNotHeld: ``memory`` lacks the storage that is asked for, or the comfy-kitchen that writes it is missing.
        CheckpointError: a weight has to be unpacked, and nothing here can, or the file does not tell its shape.
    """
    written = [name for name in {*asked.values()} & FORMAT_OF_STORAGE.keys() if FORMAT_OF_STORAGE[name].can_write]
    require_held(asked.values(), written if memory is None else memory.formats)
    with_scales = {name.rpartition(".")[0] for name in weights if looks_like_scale(name)}
    plans = {}
    for name, weight in weights.items():
        storage, reason = _decide(weight, asked.get(name, AS_FILE), path, memory)
        if storage in QUANTIZED_NAMES and not weight.quantized and weight.layer in with_scales:
            storage, reason = _not_quantized(weight), "another tensor of the layer is named like a scale"
        error = sampled_error(weight, storage) if memory is None else UNMEASURED
        plans[name] = _plan(weight, storage, reason, error)
        if done:
            done(name, weight.data.nbytes)
    return plans


def notes_on(plans: Mapping[str, WeightPlan]) -> list[str]:
    """List why weights are not stored as asked or as in the file, a line for each reason."""
    names: dict[str, list[str]] = {}
    for name, plan in plans.items():
        names.setdefault(plan.reason, []).append(name)
    names.pop("", None)
    return [f"{listed(of_reason)}: {reason}" for reason, of_reason in names.items()]


def require_held(storages: Iterable[str], formats: Container[str]) -> None:
    """Raise :class:`StorageNotHeld` for the first quantized storage that is not among a ComfyUI's ``formats``."""
    lacking = next((name for name in storages if why_not_held(name, formats)), None)
    if lacking is not None:
        advice = "Update ComfyUI and the packages that it requires, or use storage=int8."
        raise StorageNotHeld(f"storage={lacking}: {why_not_held(lacking, formats)}", advice)


def why_not_held(storage: str, formats: Container[str]) -> str:
    """Say why a ComfyUI with these formats cannot hold weights in a storage; "" where it can."""
    if storage not in QUANTIZED_NAMES or storage in formats:
        return ""
    format = FORMAT_OF_STORAGE[storage]
    return f"this ComfyUI does not run {format.title}, which came with ComfyUI {format.since} and its comfy-kitchen."


def _plan(weight: StoredWeight, storage: str, reason: str, error: tuple[float, float]) -> WeightPlan:
    made = storage != AS_FILE
    stored = storage if made else weight.storage
    declared = stored in FORMAT_OF_STORAGE and (made or weight.format is not None)
    format = FORMAT_OF_STORAGE[stored].name if declared else ""
    changes = made and (storage != weight.storage or weight.granularity != "tensor")
    return WeightPlan(storage, stored, reason, format, changes, tuple(specs_of(weight, storage)), error)


def _decide(weight: StoredWeight, asked: str, path, memory: Memory | None) -> tuple[str, str]:
    if weight.data.numel() == 0 or (weight.scale is None and not weight.is_number and weight.format is None):
        return AS_FILE, ""
    storage = _wanted(weight, asked, memory)
    if storage == AS_FILE or (weight.format is not None and storage == weight.storage):
        return AS_FILE, ""
    if weight.format is not None:
        advice = f"Use ComfyUI {weight.format.since} or later, or another version of the model."
        if not weight.format.unpacks:
            problem = f"in {weight.format.title}, which this comfy-kitchen cannot unpack"
            raise CheckpointError(weight.file or path, problem, weight.name, advice)
        if doubt := weight.doubt:
            if memory is not None and memory.lacks(weight):
                raise CheckpointError(weight.file or path, f"in {weight.storage}, {doubt}", weight.name, advice)
            return AS_FILE, f"kept in {weight.storage}: {doubt}"
    if storage in QUANTIZED_NAMES:
        return _quantized(weight, storage, path)
    if storage == "fp16" and exceeds_fp16(weight, path):
        return "bf16", f"kept in bf16: values exceed fp16's {FP16_MAX:.0f}"
    return AS_FILE if storage == weight.storage and weight.scale is None else storage, ""


def _wanted(weight: StoredWeight, asked: str, memory: Memory | None) -> str:
    if memory is not None:
        fp8 = weight.format is None and weight.data.dtype in FP8_DTYPES
        if (fp8 and weight.name in memory.not_linear) or (asked == AS_FILE and memory.lacks(weight)):
            return memory.unpacked
        if asked not in QUANTIZED_NAMES and weight.scale is None and not weight.quantized:
            return AS_FILE  # ComfyUI casts from one 16- or 32-bit dtype to another as it loads, with no second copy
    if asked not in ("auto", AS_FILE):
        return asked
    if weight.format is not None:
        return AS_FILE
    own = name_of(weight.data.dtype)
    return OF_FNUZ.get(own, "bf16" if own == "int8" else own)


def _quantized(weight: StoredWeight, storage: str, path) -> tuple[str, str]:
    why = why_not_quantized(storage, weight.shape if weight.name.endswith(".weight") else ())
    if why:
        return _not_quantized(weight), why
    many = weight.format is not None or weight.granularity in ("row", "block") or weight.data.dtype == torch.int8
    if storage in FP8_NAMES and many:
        error = requantization_error(weight, storage, path)
        if error > REQUANTIZATION_LIMIT[storage]:
            scales = weight.storage if weight.scale is None else str(weight.scale.numel())
            return "bf16", f"kept in bf16: a single scale instead of {scales} would cost an error of {error:.1%}"
        if weight.has_many_scales:
            return storage, f"a single scale in place of the file's many costs an error of {error:.0%}"
    return storage, ""


def _not_quantized(weight: StoredWeight) -> str:
    return "bf16" if weight.quantized or weight.scale is not None else AS_FILE
