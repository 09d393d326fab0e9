"""From rules, device and model to decisions: what each weight is stored in, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..devices.detect import Device, auto_storage
from ..dtypes import FP8_NAMES, QUANTIZED_NAMES
from ..formats.comfy_format import can_be_quantized
from ..formats.int8 import why_not_int8
from ..text import size_text
from .choice import Choice, frozen
from .compute import ComputePlan, plan_compute, rules_without_effect
from .facts import LayerSpec, ModelFacts
from .rules import TEXT_ENCODER_RULES, Rules


@dataclass(frozen=True)
class StorageDecision:
    """``storage``: a storage name or ``as_file``; ``kept``: the rules or the format kept it from 8 bits."""

    storage: str
    reason: str
    kept: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """How a model is stored and computed: one storage decision per layer, and the compute plan with its own."""

    storage: Choice
    compute: ComputePlan
    decisions: Mapping[str, StorageDecision]
    without_effect: tuple[tuple[str, str], ...] = ()


def plan_storage(layers: Sequence[LayerSpec], storage: str, rules: Rules) -> Mapping[str, StorageDecision]:
    """Decide the storage of each layer, by name, for a model that is asked to be stored in ``storage``."""
    rules = rules.on(layers)
    return frozen({layer.name: _decide_storage(layer, storage, rules) for layer in layers})


def _decide_storage(layer: LayerSpec, storage: str, rules: Rules) -> StorageDecision:
    found = rules.setting("storage", layer.name, layer.cls)
    if found and found[1].preset and storage not in QUANTIZED_NAMES:
        found = None  # presets guard layers against 8 bits only
    wanted, reason = (found[0], found[1].reason or str(found[1])) if found else (storage, "")
    if wanted in QUANTIZED_NAMES and not can_be_quantized(layer.cls, len(layer.shape)):
        kind = "fp8" if wanted in FP8_NAMES else wanted
        return StorageDecision("as_file", f"{layer.cls}: only Linear weights are held in {kind}", kept=len(layer.shape) > 1)
    if wanted == "int8" and (why := why_not_int8(layer.shape[1])):
        return StorageDecision("as_file", why, kept=True)
    kept = storage in QUANTIZED_NAMES and wanted not in QUANTIZED_NAMES and len(layer.shape) > 1
    return StorageDecision(wanted, reason, kept=kept)


def plan_load(
    facts: ModelFacts, device: Device, storage: str, compute: str, rules: Rules, free_device_bytes: int | None
) -> LoadPlan:
    """Resolve ``storage`` and ``compute`` for a model on a device.

    ``free_device_bytes``: memory left on the device, None where weights live in host memory anyway.
    """
    base = plan_compute(facts, device, compute, Rules())
    choice = _choose_storage(facts, device, storage, base, free_device_bytes)
    decisions = plan_storage(facts.layers, choice.used, rules)
    storages = {name: facts.file_dtype if d.storage == "as_file" else d.storage for name, d in decisions.items()}
    storages |= facts.formats
    arithmetic = plan_compute(facts, device, compute, rules, storages)
    return LoadPlan(choice, arithmetic, decisions, tuple(rules_without_effect(facts.layers, rules)))


def plan_text_encoder(
    layers: Sequence[LayerSpec], storage: str, file_storage: str, default: str, needed: int, free_bytes: int
) -> tuple[Choice, Mapping[str, StorageDecision]]:
    """Resolve the storage of a text encoder that takes ``needed`` bytes in 16 bit.

    ``default``: the dtype ComfyUI keeps text encoders in. An encoder runs once per prompt: fp8 saves memory, not time.
    """
    choice = Choice(storage, storage)
    if storage == "auto" and (file_storage.startswith("fp8") or file_storage == "quantized"):
        choice = Choice(storage, "as_file", "the file is quantized already")
    elif storage == "auto" and needed > free_bytes:
        choice = Choice(storage, "fp8_e4m3fn", f"{size_text(needed)} in 16 bit, {size_text(free_bytes)} of memory are free")
    elif storage == "auto":
        choice = Choice(storage, default, "ComfyUI's default for text encoders")
    return choice, plan_storage(layers, choice.used, Rules(presets=TEXT_ENCODER_RULES))


def _choose_storage(
    facts: ModelFacts, device: Device, storage: str, compute: ComputePlan, free_device_bytes: int | None
) -> Choice:
    if storage != "auto":
        return Choice(storage, storage)
    used, reason = auto_storage(device, 2 * facts.parameters, facts.file_dtype, free_device_bytes, compute.choice.requested)
    enough = compute.weight_dtype
    if used == "as_file" and facts.file_dtype == "fp32" and enough != "fp32":
        used, reason = enough, f"an fp32 file computed in {compute.choice.used} needs no more than {enough}"
    if used == "as_file" and facts.file_dtype == "bf16" and compute.is_safe:
        used, reason = enough, f"{compute.choice.used} multiplies in {enough}: converted once, not at every step"
    return Choice(storage, used, reason)
