"""From rules, device and model to decisions: what each weight is stored in, and why."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from ..base.dtypes import FP8_NAMES, QUANTIZED_NAMES
from ..base.options import ComputeOption, StorageOption
from ..base.text import size_text
from ..devices.detect import Device, unheld_storages, why_no_bf16
from ..formats.comfy_format import AS_FILE, can_be_quantized
from ..formats.registry import FORMAT_OF_STORAGE
from ..formats.stored_weight import StoredWeight
from .auto import ACTIVATION_ROOM, auto_storage, held_storage, smallest_storage, why_low_bits_are_slow
from .choice import Choice, WithoutEffect, frozen
from .compute import SAFE, ComputePlan, choose_compute, plan_compute, rules_without_effect
from .facts import LayerSpec, ModelFacts
from .rules import TEXT_ENCODER_RULES, Rules

EIGHT_BITS = ("int8", "fp8_e4m3fn")
PREDICTED_ERROR = {"int8": 0.0089, "w6a8": 0.0184, "w4a8": 0.0617}
"""Relative error of a layer's int8 product with weights rounded to nearest: MiniLM in benchmarks/README.md."""
FEWER_BITS: tuple[StorageOption, ...] = ("w6a8", "w4a8")
# ComfyUI tells SD, SDXL and LTX-Video by the columns of this weight (comfy/model_detection.py).
_TELLS_MODEL = re.compile(r"(^|\.)transformer_blocks\.0\.attn2\.to_k$")
MANY_SCALES = "the file's fp8 has many scales, ComfyUI's has one: int8 takes the same bytes and is nearer to the file"
TOLD_BY = "ComfyUI detects the architecture from this weight's width, which storages below 8 bits change"


@dataclass(frozen=True)
class StorageDecision:
    """What a layer's weight is to be stored in.

    Attributes:
        storage: a storage name or ``as_file``.
        reason: why that is not what was asked for the whole model; empty where it is.
        kept: the rules or the format kept it from 8 bits.
        quantizable: ComfyUI can hold it quantized.
    """

    storage: str
    reason: str
    kept: bool = False
    quantizable: bool = True


@dataclass(frozen=True)
class LoadPlan:
    """How a model is stored and computed: one storage decision per layer, and the compute plan with its own.

    ``no_bf16``: why the device cannot hold weights in bf16; empty where it can. ``unheld``: each storage of fp8 that it
    cannot hold -> why.
    """

    storage: Choice[StorageOption]
    compute: ComputePlan
    decisions: Mapping[str, StorageDecision]
    without_effect: tuple[WithoutEffect, ...] = ()
    no_bf16: str = ""
    unheld: Mapping[str, str] = field(default_factory=lambda: frozen({}))


def plan_storage(layers: Sequence[LayerSpec], storage: str, rules: Rules) -> Mapping[str, StorageDecision]:
    """Decide the storage of each layer, by name, for a model that is asked to be stored in ``storage``."""
    rules = rules.on(layers)
    return frozen({layer.name: _decide_layer(layer, storage, rules) for layer in layers})


def _decide_layer(layer: LayerSpec, storage: str, rules: Rules) -> StorageDecision:
    wanted, reason, asked = storage, "", storage in QUANTIZED_NAMES
    found = rules.setting("storage", layer.name, layer.cls)
    if found and (asked or not found[1].preset):  # presets guard layers against 8 bits only
        wanted, reason = found[0], found[1].reason or str(found[1])
    if wanted in QUANTIZED_NAMES and (why := why_not_quantized(wanted, layer.shape, layer.cls)):
        wanted, reason, asked = "as_file", why, True
    elif _TELLS_MODEL.search(layer.name) and wanted in FEWER_BITS:
        wanted, reason = "int8", TOLD_BY
    kept = asked and wanted not in QUANTIZED_NAMES and len(layer.shape) > 1
    return StorageDecision(wanted, reason, kept, can_be_quantized(layer.cls, len(layer.shape)))


def why_not_quantized(storage: str, shape: Sequence[int], cls: str = "") -> str:
    """Say why a weight cannot be stored in fp8 or int8; "" where it can be.

    ``cls``: the class of its layer; empty where only its file is at hand.
    """
    kind = "fp8" if storage in FP8_NAMES else storage
    if not can_be_quantized(cls or "Linear", len(shape)):
        where = f"{cls}: only Linear weights can be {kind}"
        return where if cls else f"ComfyUI supports {kind} only for the weights of Linear layers"
    return FORMAT_OF_STORAGE[storage].why_not(shape[1])


def plan_load(
    facts: ModelFacts,
    device: Device,
    storage: StorageOption,
    compute: ComputeOption,
    rules: Rules,
    free_device_bytes: int | None,
    formats: Container[str] = QUANTIZED_NAMES,
    streamed_from: int | None = None,
) -> LoadPlan:
    """Resolve ``storage`` and ``compute`` for a model on a device.

    Args:
        free_device_bytes: memory left on the device, None where weights live in host memory anyway.
        streamed_from: as for :func:`~halfsafe.precision.plan.auto.auto_storage`.
    """
    computed = choose_compute(facts, device, compute)
    choice = _choose_storage(facts, device, storage, computed, free_device_bytes, streamed_from)
    decisions = plan_storage(facts.layers, choice.used, rules)
    if smallest_storage(device, compute)[0] == "int8":
        decisions = _many_scales_in_int8(facts, decisions)
    if storage == "auto" and choice.used in EIGHT_BITS and free_device_bytes is not None:
        choice, decisions = _fitted(facts, device, choice, decisions, rules, free_device_bytes, formats)
    storages = {name: facts.file_dtype if d.storage == "as_file" else d.storage for name, d in decisions.items()}
    storages |= facts.formats
    arithmetic = plan_compute(facts, device, compute, rules, storages)
    idle = tuple(rules_without_effect(facts.layers, rules))
    return LoadPlan(choice, arithmetic, decisions, idle, why_no_bf16(device), unheld_storages(device))


def _many_scales_in_int8(
    facts: ModelFacts, decisions: Mapping[str, StorageDecision]
) -> Mapping[str, StorageDecision]:
    """Store fp8 weights with a scale for each row or block in int8 instead of fp8 with one: at the same size the error
    of a small Wan model is 1.1 to 1.2 times that of the file's own numbers, with one fp8 scale 1.3 to 1.6 times."""
    moved = {
        layer.name: StorageDecision("int8", MANY_SCALES)
        for layer in facts.layers
        if layer.name in facts.many_scales
        and decisions[layer.name].storage == "as_file"
        and not decisions[layer.name].reason
        and not why_not_quantized("int8", layer.shape, layer.cls)
    }
    return frozen({**decisions, **moved})


def _fitted(
    facts: ModelFacts,
    device: Device,
    choice: Choice[StorageOption],
    decisions: Mapping[str, StorageDecision],
    rules: Rules,
    free: int,
    formats: Container[str],
) -> tuple[Choice[StorageOption], Mapping[str, StorageDecision]]:
    """Store the model in w6a8, else in w4a8, where int8 does not fit and the smaller one does, and say so.

    Where fp8 was chosen, int8 products gain nothing or are not what runs, and those of fewer bits are int8 products.
    """
    room, size = free - ACTIVATION_ROOM, bytes_stored(facts, decisions)
    if size <= room:
        return choice, decisions
    smaller = {name: plan_storage(facts.layers, name, rules) for name in FEWER_BITS if name in formats}
    sizes = {name: bytes_stored(facts, own) for name, own in smaller.items()}
    fitting = next((name for name in smaller if sizes[name] <= room), None)
    used = choice.used
    moved = size_text(size - room)
    slow = why_low_bits_are_slow(device)
    if fitting and not slow and used == "int8":
        reason = (
            f"{size_text(size)} in int8 do not fit either: {fitting} takes {size_text(sizes[fitting])}. The predicted "
            f"error of a layer's output is {PREDICTED_ERROR[fitting]:.1%}, against {PREDICTED_ERROR['int8']:.1%} in "
            f"int8. With storage=int8 ComfyUI moves {moved} in and out at each step."
        )
        used, decisions = fitting, smaller[fitting]
    else:
        why = f"{slow} storage={fitting} makes it fit." if fitting else "Fewer bits do not make it fit either."
        held = used.split("_")[0]
        reason = f"The model does not fit in {held} either: ComfyUI moves {moved} in and out. {why.strip()}"
    return replace(choice, used=used, reason=f"{choice.reason} {reason}".strip()), decisions


def bytes_stored(facts: ModelFacts, decisions: Mapping[str, StorageDecision]) -> int:
    """Count the bytes of a model's weights as decided; what is not quantized counts as 16 bit."""
    quantized = [layer for layer in facts.layers if decisions[layer.name].storage in QUANTIZED_NAMES]
    size = sum(quantized_bytes(decisions[layer.name].storage, *layer.shape) for layer in quantized)
    return size + 2 * (facts.parameters - sum(prod(layer.shape) for layer in quantized))


def bytes_in_memory(weights: Iterable[StoredWeight], decisions: Mapping[str, StorageDecision]) -> int:
    """Count the bytes of a file's weights stored as decided by tensor: those without a decision as in the file, but in
    16 bit where they are wider."""
    size = 0
    for weight in weights:
        storage = decisions[weight.name].storage if weight.name in decisions else AS_FILE
        if storage in QUANTIZED_NAMES and storage != weight.storage:
            size += quantized_bytes(storage, *weight.shape)
        else:
            size += weight.bytes if weight.quantized else min(weight.bytes, 2 * prod(weight.shape))
    return size


def bytes_below_16_bit(weights: Iterable[StoredWeight]) -> int:
    """Count the bytes that a file's quantized weights take less than in 16 bit."""
    return sum(2 * prod(weight.shape) - weight.bytes for weight in weights if weight.quantized)


def quantized_bytes(storage: str, rows: int, columns: int) -> int:
    """Count the bytes of a quantized weight with its scales."""
    specs = FORMAT_OF_STORAGE[storage].specs(rows, columns).values()
    return sum(prod(shape) * dtype.itemsize for shape, dtype in specs)


def plan_text_encoder(
    layers: Sequence[LayerSpec],
    storage: str,
    file_storage: str,
    default: str,
    needed: int,
    free_bytes: int | None,
    unheld: Mapping[str, str] = frozen({}),
    formats: Container[str] = QUANTIZED_NAMES,
) -> tuple[Choice[str], Mapping[str, StorageDecision]]:
    """Resolve the storage of a text encoder that takes ``needed`` bytes in 16 bit.

    ``default``: the dtype ComfyUI keeps text encoders in; ``free_bytes``: of the host, None where its weights are
    streamed from their file; ``unheld``: as of a :class:`LoadPlan`; ``formats``: the storages that ComfyUI holds. An
    encoder runs once per prompt: 8 bits save memory, not time.
    """
    choice = Choice(storage, storage)
    if storage in ("auto", "as_file") and file_storage in unheld:
        choice = Choice(storage, default, f"The file is {file_storage}. {unheld[file_storage]}")
    elif storage == "auto" and (file_storage.startswith("fp8") or file_storage == "quantized"):
        choice = Choice(storage, "as_file", "the file is quantized already")
    elif storage == "auto" and free_bytes is not None and needed > free_bytes:
        smaller = smallest_of_encoder(formats)
        choice = Choice(storage, smaller, f"{size_text(needed)} are needed in 16 bit, {size_text(free_bytes)} are free")
    elif storage == "auto":
        choice = Choice(storage, default, "ComfyUI's default for text encoders")
    return choice, plan_storage(layers, choice.used, Rules(presets=TEXT_ENCODER_RULES))


def smallest_of_encoder(formats: Container[str]) -> StorageOption:
    """Choose the 8-bit storage of a text encoder: int8, on every device, where ComfyUI holds it.

    Its error is 0.15 to 0.4 of fp8's in each encoder class of ComfyUI, at the same bytes.
    """
    return "int8" if "int8" in formats else "fp8_e4m3fn"


def _choose_storage(
    facts: ModelFacts, device: Device, storage: StorageOption, compute: Choice,
    free: int | None, streamed_from: int | None,
) -> Choice[StorageOption]:  # fmt: skip
    used: StorageOption
    if storage == "as_file":
        used, reason = held_storage(device, facts.file_dtype)
        return Choice(storage, used, reason if used != storage else "")
    if storage != "auto":
        return Choice(storage, storage)
    size = 2 * facts.parameters
    own = facts.file_dtype
    used, reason = auto_storage(device, size, own, free, compute.requested, streamed_from)
    enough: StorageOption = "fp16" if compute.used == SAFE else compute.used
    if used == "as_file" and own == "fp32" and enough != "fp32":
        used, reason = enough, f"an fp32 file computed in {compute.used} needs only {enough} weights"
    fits = free is None or streamed_from is None or size <= free - ACTIVATION_ROOM
    if used == "as_file" and own == "bf16" and enough == "fp16" and fits:
        used, reason = enough, f"{compute.used} multiplies in {enough}: converted once, not at every step"
    return Choice(storage, used, reason)
