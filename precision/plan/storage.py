"""From rules, device and model to decisions: what each weight is stored in, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..devices.detect import Device, auto_storage
from ..dtypes import FP8_DTYPES, FP8_NAMES, dtype_named, name_of
from ..formats.checkpoint import Checkpoint, StoredWeight
from .choice import Choice
from .compute import ComputePlan, Layer, ModelFacts, plan_compute
from .rules import TEXT_ENCODER_RULES, Rules

_EMBEDDING_WORDS = ("embed_tokens", "token_embedding", "position_embedding", "relative_attention_bias", "shared", "wte")


@dataclass(frozen=True)
class StorageDecision:
    """``storage``: a storage name or ``as_file``; ``kept``: the rules or the format kept it from fp8."""

    storage: str
    reason: str
    kept: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """How a model is stored and computed: one storage decision per layer, and the compute plan with its own."""

    storage: Choice
    compute: ComputePlan
    decisions: dict[str, StorageDecision]
    without_effect: list[tuple[str, str]] = field(default_factory=list)


def layers_of(checkpoint: Checkpoint, prefix: str = "") -> list[Layer]:
    """The layers below ``prefix``, without the model's modules at hand: classes are inferred from name and shape."""
    inside = (name[len(prefix) :] for name in checkpoint.weights if name.startswith(prefix))
    layers = ((name.removesuffix(".weight"), checkpoint.weights[prefix + name]) for name in inside if name.endswith(".weight"))
    return [inferred_layer(layer, weight) for layer, weight in layers]


def inferred_layer(name: str, weight: StoredWeight) -> Layer:
    """A layer whose class is told from its name and its weight's shape."""
    shape = tuple(weight.data.shape)
    if len(shape) == 2:
        return Layer(name, "Embedding" if _is_embedding(name) else "Linear", shape)
    return Layer(name, f"Conv{len(shape) - 2}d" if 3 <= len(shape) <= 5 else "Norm", shape)


def _is_embedding(name: str) -> bool:
    return any(word in name.rsplit(".", 1)[-1] for word in _EMBEDDING_WORDS)


def plan_storage(layers: Sequence[Layer], storage: str, rules: Rules) -> dict[str, StorageDecision]:
    """What each layer is stored in when the model is asked to be stored in ``storage``. Keys are layer names."""
    return {layer.name: _decide_storage(layer, storage, rules) for layer in layers}


def _decide_storage(layer: Layer, storage: str, rules: Rules) -> StorageDecision:
    found = rules.setting("storage", layer.name, layer.cls)
    if found and found[1].preset and storage not in FP8_NAMES:
        found = None  # presets guard layers against fp8 only
    wanted, reason = (found[0], found[1].reason or str(found[1])) if found else (storage, "")
    if wanted in FP8_NAMES and layer.cls != "Linear":
        return StorageDecision("as_file", f"{layer.cls}: only Linear weights are held in fp8", kept=len(layer.shape) > 1)
    return StorageDecision(wanted, reason, kept=storage in FP8_NAMES and wanted not in FP8_NAMES and len(layer.shape) > 1)


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
    return LoadPlan(choice, arithmetic, decisions, rules_without_effect(facts.layers, rules))


def rules_without_effect(layers: Sequence[Layer], rules: Rules) -> list[tuple[str, str]]:
    """(rule, reason) of the user's own rules that cannot act on these layers."""
    pairs = [(layer.name, layer.cls) for layer in layers]
    return [(str(rule), "the pattern matches no layer of this model") for rule in rules.without_match(pairs)]


def plan_text_encoder(
    layers: Sequence[Layer], storage: str, file_storage: str, default: str, needed: int, free_bytes: int
) -> tuple[Choice, dict[str, StorageDecision]]:
    """Resolve the storage of a text encoder that takes ``needed`` bytes in 16 bit.

    ``default``: the dtype ComfyUI keeps text encoders in. An encoder runs once per prompt: fp8 saves memory, not time.
    """
    choice = Choice(storage, storage)
    if storage == "auto" and (file_storage.startswith("fp8") or file_storage == "quantized"):
        choice = Choice(storage, "as_file", "the file is quantized already")
    elif storage == "auto" and needed > free_bytes:
        choice = Choice(storage, "fp8_e4m3fn", f"{needed / 1e9:.1f} GB in 16 bit, {free_bytes / 1e9:.1f} GB of memory are free")
    elif storage == "auto":
        choice = Choice(storage, default, "ComfyUI's default for text encoders")
    return choice, plan_storage(layers, choice.used, Rules(presets=TEXT_ENCODER_RULES))


def _choose_storage(
    facts: ModelFacts, device: Device, storage: str, compute: ComputePlan, free_device_bytes: int | None
) -> Choice:
    if storage != "auto":
        return Choice(storage, storage)
    used, reason = auto_storage(device, 2 * facts.parameters, facts.file_dtype, free_device_bytes)
    held = compute.weight_dtype
    if used == "as_file" and facts.file_dtype == "fp32" and held != "fp32":
        used, reason = held, f"an fp32 file computed in {compute.choice.used} needs no more than {held}"
    if used == "as_file" and facts.file_dtype == "bf16" and compute.safe:
        used, reason = held, f"{compute.choice.used} multiplies in {held}: converted once, not at every step"
    return Choice(storage, used, reason)


def file_dtype(checkpoint: Checkpoint, prefix: str = "") -> str:
    """The storage name that most of the weights below ``prefix`` have."""
    sizes: dict[str, int] = {}
    for name, weight in checkpoint.weights.items():
        if name.startswith(prefix):
            key = "quantized" if weight.granularity == "native" else name_of(weight.data.dtype)
            sizes[key] = sizes.get(key, 0) + weight.data.numel()
    return max(sizes, key=sizes.__getitem__) if sizes else "none"


def is_calibrated(checkpoint: Checkpoint, prefix: str = "") -> bool:
    """Whether the fp8 weights below ``prefix``, of which there is at least one, all have an activation scale."""
    scaled = [w for name, w in checkpoint.weights.items() if name.startswith(prefix) and w.data.dtype in FP8_DTYPES and w.data.dim() == 2]
    return bool(scaled) and all(weight.input_scale is not None for weight in scaled)


def weight_bytes(checkpoint: Checkpoint, plan: LoadPlan, prefix: str = "") -> int:
    """Bytes the weights below ``prefix`` take in memory once loaded as planned."""
    return sum(
        weight.data.numel() * _bytes_per_weight(weight, plan, name[len(prefix) :].removesuffix(".weight"))
        for name, weight in checkpoint.weights.items()
        if name.startswith(prefix)
    )


def _bytes_per_weight(weight: StoredWeight, plan: LoadPlan, layer: str) -> int:
    decision = plan.decisions.get(layer)
    storage = decision.storage if decision else plan.storage.used
    if storage == "as_file":
        return weight.data.element_size()
    return dtype_named(storage if decision else plan.compute.weight_dtype).itemsize
