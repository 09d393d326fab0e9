"""Decide the storage of each layer: from the option, the rules and the layer's class, then from its
tensor.

The tensor is looked at with its scales, with its values if they matter, and with the device and
ComfyUI that will hold it. ``plan/compute.py`` decides the arithmetic from the storage."""

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from ..base.dtypes import FP8_NAMES, FP16_MAX, QUANTIZED_NAMES
from ..base.errors import CheckpointError, StorageNotHeld
from ..base.message import Message
from ..base.options import StorageOption
from ..base.text import listed
from ..devices.detect import Device
from ..formats.checkpoint import Checkpoint, StoredWeight, looks_like_scale
from ..formats.comfy_format import (
    can_be_quantized,
    exceeds_fp16,
    is_same_fp8,
    requantization_error,
    specs_of,
)
from ..formats.layer_plan import AS_FILE, LayerPlan
from ..formats.registry import FORMAT_OF_STORAGE
from .choice import frozen
from .facts import LayerSpec, layer_specs
from .nvfp4 import NVFP4, kept_from_nvfp4
from .rules import Rules
from .structure import OUTSIDE, roles_of

FEWER_BITS: tuple[StorageOption, ...] = ("w6a8", "w4a8", "nvfp4")
REQUANTIZATION_LIMIT = {"fp8_e4m3fn": 0.04, "fp8_e5m2": 0.08}
_PACKED = frozenset(name for name in QUANTIZED_NAMES if FORMAT_OF_STORAGE[name].is_packed)
"""Storages with several values in a byte."""
# ComfyUI tells these models by the columns of a weight in a block (``shape[1]`` in comfy/model_detection.py, 0.30).
_TELLS_MODEL = re.compile(
    r"(^|\.)transformer_blocks\.0\.attn2\.to_k$"  # SD, SDXL, LTX-Video
    r"|^transformer\.layers\.0\.(self_attn\.to_qkv|to_local_embed\.0)$"  # Stable Audio
    r"|^blocks\.0\.norm1\.linear$"  # CogVideoX
)
# ``process_unet_state_dict`` of PixelDiT in comfy/supported_models.py.
_SPLIT = re.compile(r"(^|\.)pixel_blocks\.\d+\.adaLN_modulation\.0$")
SPLIT = "ComfyUI splits this weight while loading, without its scale"
TOLD_BY = "ComfyUI detects the architecture from this weight's width, which storages below 8 bits change"


def plan_storage(layers: Sequence[LayerSpec], storage: str, rules: Rules) -> Mapping[str, LayerPlan]:
    """Decide the storage of each layer by its name, class and shape, without its tensor.

    ComfyUI tells families by the widths of layers outside of the repeated blocks, which packed
    weights change, of a file and of a model that is loaded: these layers are not packed.

    ``storage``: the storage requested for the model.
    """
    rules = rules.on(layers)
    if storage == NVFP4 and any(preset != "none" for preset in rules.names):
        rules = replace(rules, presets=rules.presets + kept_from_nvfp4(layers))
    plans = {layer.name: _by_name(layer, storage, rules) for layer in layers}
    if not _PACKED.isdisjoint({plan.storage for plan in plans.values()}):
        roles = roles_of(layers)
        outside = [layer for layer in layers if roles.get(layer.name) == OUTSIDE]
        plans |= {layer.name: _as_wide(plans[layer.name], layer) for layer in outside}
    return frozen(plans)


def plan_file(checkpoint: Checkpoint, prefix: str, storage: str, rules: Rules) -> dict[str, LayerPlan]:
    """Decide the storage of each layer below ``prefix`` of a file, by the name of its weight in the
    file."""
    layers = plan_storage(layer_specs(checkpoint, prefix), storage, rules)
    return {f"{prefix}{layer}.weight": plan for layer, plan in layers.items()}


def _as_wide(plan: LayerPlan, layer: LayerSpec) -> LayerPlan:
    """Store a layer in int8, or as it is, instead of a storage with several values in a byte."""
    if plan.storage not in _PACKED:
        return plan
    if why_not_quantized("int8", layer.shape, layer.cls):
        return replace(plan, storage=AS_FILE, why_stored=TOLD_BY, kept=True)
    return replace(plan, storage="int8", why_stored=TOLD_BY)


def _by_name(layer: LayerSpec, storage: str, rules: Rules) -> LayerPlan:
    wanted = storage
    reason = ""
    asked = storage in QUANTIZED_NAMES
    found = rules.setting("storage", layer.name, layer.cls)
    if found and (asked or not found[1].preset):  # presets guard layers against 8 bits only
        wanted = found[0]
        reason = found[1].reason or str(found[1])
    if wanted in QUANTIZED_NAMES and (why := why_not_quantized(wanted, layer.shape, layer.cls)):
        wanted = AS_FILE
        reason = why
        asked = True
    elif wanted in QUANTIZED_NAMES and _SPLIT.search(layer.name):
        wanted = AS_FILE
        reason = SPLIT
        asked = True
    elif wanted in _PACKED and _TELLS_MODEL.search(layer.name):
        wanted = "int8"
        reason = TOLD_BY
    kept = asked and wanted not in QUANTIZED_NAMES and len(layer.shape) > 1
    return LayerPlan(wanted, reason, kept, can_be_quantized(layer.cls, len(layer.shape)))


def why_not_quantized(storage: str, shape: Sequence[int], cls: str = "") -> str:
    """Return why a weight cannot be stored in a quantized storage; "" if it can.

    ``cls``: the class of its layer; empty if only the file is known.
    """
    kind = "fp8" if storage in FP8_NAMES else storage
    if not can_be_quantized(cls or "Linear", len(shape)):
        where = Message("{0}: only Linear weights can be {1}", cls, kind)
        return where if cls else Message("ComfyUI supports {0} only for the weights of Linear layers", kind)
    return FORMAT_OF_STORAGE[storage].why_not(*shape)


def require_held(storages: Iterable[str], formats: Container[str], device: Device | None = None) -> None:
    """Raise :class:`StorageNotHeld` for the first requested storage that the device or this ComfyUI
    cannot hold.

    Without this check the first move to the device raises, in the middle of a run and in torch's
    words. A simulated device refuses nothing, because the weights go to the CPU."""
    for storage in dict.fromkeys(name for name in storages if name in QUANTIZED_NAMES):
        if device and not device.simulated and (why := device.refuses(storage)):
            raise StorageNotHeld(Message("storage={0}: {1}", storage, why), "Use storage=auto, fp16 or bf16.")
        if why := why_not_run(storage, formats):
            advice = "Update ComfyUI and the packages that it requires, or use storage=int8."
            raise StorageNotHeld(Message("storage={0}: {1}", storage, why), advice)


def why_not_run(storage: str, formats: Container[str]) -> str:
    """Return why a ComfyUI with these formats does not run a storage; "" if it does."""
    if storage not in QUANTIZED_NAMES or storage in formats:
        return ""
    format = FORMAT_OF_STORAGE[storage]
    return Message(
        "this ComfyUI does not run {0}, which came with ComfyUI {1} and its comfy-kitchen.", format.title, format.since
    )


@dataclass(frozen=True)
class LoadTarget:
    """The device and the ComfyUI that weights are loaded into.

    Attributes:
        free: the bytes that weights may take: of the device for a model, None if weights live in host memory anyway; of
            the host for a text encoder.
        formats: the quantized storages that this ComfyUI runs.
        streamed_from: free memory of the host, if weights stay memory-mapped and ComfyUI streams them to the device, as
            under dynamic VRAM; None if it does not.
        unpacked: the dtype of weights that cannot be held quantized.
        only_linear: fp8 is held by Linear modules alone.
    """

    device: Device
    free: int | None = None
    formats: Container[str] = QUANTIZED_NAMES
    streamed_from: int | None = None
    unpacked: str = "bf16"
    only_linear: bool = False

    @property
    def streams(self) -> bool:
        """True if ComfyUI is given the memory-mapped tensors themselves, and copies none into the
        model."""
        return self.streamed_from is not None

    @cached_property
    def refuses(self) -> Callable[[str], str]:
        """``Device.refuses``, asked once for each storage."""
        return cache(self.device.refuses)

    def lacks(self, weight: StoredWeight) -> bool:
        """True if the weight cannot be held as it is."""
        # Its own loader fails on an unknown format with a KeyError (``_load_quantized_module`` in comfy/ops.py), and
        # does not rotate the inputs of experts (``_expert_qt_from`` leaves ``convrot`` out).
        rotated_experts = bool(weight.experts) and weight.group is not None
        return (
            not weight.format.is_held_by(self.formats)
            or rotated_experts
            or (weight.quantized and bool(self.refuses(weight.storage)))
        )


def plan_weights(
    weights: Mapping[str, StoredWeight],
    layers: Mapping[str, LayerPlan],
    path,
    target: LoadTarget | None = None,
    done: Callable[[str, int], None] | None = None,
) -> dict[str, LayerPlan]:
    """Complete the plans of layers with their tensors, and plan all other tensors. Reads values
    only if they matter.

    Args:
        layers: tensor name -> the plan of its layer by name; other tensors stay as they are.
        target: where the weights are loaded; None for a file, which holds every format.

    Raises:
        NonFiniteWeight: a weight whose values were read holds NaN or Inf.
        StorageNotHeld: ``target`` cannot hold a storage that is requested, or the comfy-kitchen that writes it is
            missing.
        CheckpointError: a weight has to be unpacked, and nothing here can, or the file does not tell its shape.
    """
    asked = dict.fromkeys(plan.storage for plan in layers.values())
    written = [name for name in asked.keys() & FORMAT_OF_STORAGE.keys() if FORMAT_OF_STORAGE[name].can_write]
    require_held(asked, target.formats if target else written, target.device if target else None)
    with_scales = {name.rpartition(".")[0] for name in weights if looks_like_scale(name)}
    plans = {}
    for name, weight in weights.items():
        by_name = layers.get(name, LayerPlan())
        storage, note = _by_tensor(weight, by_name, path, target)
        if storage in QUANTIZED_NAMES and not weight.quantized and weight.layer in with_scales:
            storage = _not_quantized(weight)
            note = "another tensor of the layer is named like a scale"
        made = storage != AS_FILE
        stored = storage if made else weight.storage
        is_again = storage in QUANTIZED_NAMES and weight.quantized and not is_same_fp8(weight, storage)
        specs = tuple(specs_of(weight, storage))
        plans[name] = replace(
            by_name,
            storage=storage,
            asked=by_name.storage,
            note=note,
            stored=stored,
            declared=len(specs) > 1,
            changes=made and not weight.format.is_same_in(weight, storage),
            again=weight.storage if is_again else "",
            specs=specs,
        )
        if done:
            done(name, weight.data.nbytes)
    return plans


def notes_on(plans: Mapping[str, LayerPlan]) -> list[str]:
    """List why weights are not stored as requested or as in the file, a line for each reason."""
    names: dict[str, list[str]] = {}
    for name, plan in plans.items():
        names.setdefault(plan.note, []).append(name)
    names.pop("", None)
    return [Message("{0}: {1}", listed(of_reason), reason) for reason, of_reason in names.items()]


def _by_tensor(weight: StoredWeight, plan: LayerPlan, path, target: LoadTarget | None) -> tuple[str, str]:
    if weight.data.numel() == 0 or not weight.format.has_values(weight):
        return AS_FILE, ""
    storage = _wanted(weight, plan, target)
    if storage == AS_FILE or weight.format.lies_in(weight, storage):
        return AS_FILE, ""
    if not weight.format.unpacks:
        problem = Message("in {0}, which this comfy-kitchen cannot unpack", weight.format.title)
        raise CheckpointError(weight.file or path, problem, weight.name, _another(weight))
    if doubt := weight.doubt:
        if target is not None and target.lacks(weight):
            problem = Message("in {0}, {1}", weight.storage, doubt)
            raise CheckpointError(weight.file or path, problem, weight.name, _another(weight))
        return AS_FILE, Message("kept in {0}: {1}", weight.storage, doubt)
    if storage in QUANTIZED_NAMES:
        return _quantized(weight, storage, path)
    if storage == "fp16" and exceeds_fp16(weight, path):
        return "bf16", Message("kept in bf16: values exceed fp16's {0}", f"{FP16_MAX:.0f}")
    return storage, ""


def _another(weight: StoredWeight) -> str:
    return Message("Use ComfyUI {0} or later, or another version of the model.", weight.format.since)


def _wanted(weight: StoredWeight, plan: LayerPlan, target: LoadTarget | None) -> str:
    asked = plan.storage
    if target is not None:
        cast = weight.quantized and target.only_linear and not plan.quantizable and weight.format.is_only_linear(weight)
        if cast or (asked == AS_FILE and target.lacks(weight)):
            return target.unpacked
        if asked not in QUANTIZED_NAMES and weight.format.is_cast(weight):
            return AS_FILE
    return weight.format.as_loaded(weight) if asked in ("auto", AS_FILE) else asked


def _quantized(weight: StoredWeight, storage: str, path) -> tuple[str, str]:
    why = why_not_quantized(storage, weight.shape if weight.name.endswith(".weight") else ())
    if why:
        return _not_quantized(weight), why
    if storage in FP8_NAMES and weight.format.is_rounded_again(weight):
        error = requantization_error(weight, storage, path)
        if error > REQUANTIZATION_LIMIT[storage]:
            text = "kept in bf16: a single scale instead of {0} would cost an error of {1}"
            return "bf16", Message(text, weight.format.scales_text(weight), f"{error:.1%}")
        if weight.has_many_scales:
            return storage, Message("a single scale in place of the file's many costs an error of {0}", f"{error:.0%}")
    return storage, ""


def _not_quantized(weight: StoredWeight) -> str:
    return AS_FILE if weight.format.is_cast(weight) else "bf16"
