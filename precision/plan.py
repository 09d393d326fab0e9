"""From rules, device and model to decisions: what is stored and computed in which dtype, and why."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .checkpoint import Checkpoint, StoredWeight
from .devices import Device, auto_compute, auto_storage
from .dtypes import FP8_DTYPES, FP8_NAMES, dtype_named, name_of
from .record import Choice
from .rules import TEXT_ENCODER_RULES, Rule, Rules

_EMBEDDING_WORDS = ("embed_tokens", "token_embedding", "position_embedding", "relative_attention_bias", "shared", "wte")


@dataclass(frozen=True)
class Layer:
    """A module with a weight: its name inside the model, its class and its weight's shape."""

    name: str
    cls: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StorageDecision:
    """``storage``: a storage name or ``as_file``; ``kept``: the rules or the format kept it from fp8."""

    storage: str
    reason: str
    kept: bool = False


@dataclass(frozen=True)
class ModelFacts:
    """What a plan needs to know of a model.

    ``file_dtype``: the storage name most weights have in the file; ``supported``: compute dtypes it is known to work in,
    best first; ``calibrated``: its fp8 layers bring the activation scales an fp8 matmul needs.
    """

    layers: Sequence[Layer]
    parameters: int
    file_dtype: str
    supported: tuple[str, ...]
    calibrated: bool = False


@dataclass(frozen=True)
class LoadPlan:
    """One decision per layer, and the choices behind them.

    ``compute.used`` is the dtype of activations and of weights that are not quantized; ``fp8_matmul``: layers stored in
    fp8 also multiply in fp8.
    """

    storage: Choice
    compute: Choice
    decisions: dict[str, StorageDecision]
    fp8_matmul: bool = False
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def layers_of(checkpoint: Checkpoint, prefix: str = "") -> list[Layer]:
    """The layers below ``prefix``, without the model's modules at hand: classes are inferred from name and shape."""
    names = (name for name in checkpoint.weights if name.startswith(prefix) and name.endswith(".weight"))
    return [inferred_layer(name[len(prefix) :].removesuffix(".weight"), checkpoint.weights[name]) for name in names]


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
    compute_choice, without_effect, notes = _choose_compute(facts, device, compute)
    storage_choice = _choose_storage(facts, device, storage, compute_choice.used, free_device_bytes)
    decisions = plan_storage(facts.layers, storage_choice.used, rules)
    fp8_matmul = _multiplies_in_fp8(facts, device, compute)
    pairs = [(layer.name, layer.cls) for layer in facts.layers]
    without_effect += [(str(rule), "the pattern matches no layer of this model") for rule in rules.without_match(pairs)]
    without_effect += [(str(rule), f"this version acts on storage, not on {key}, of a layer") for rule, key in _not_storage(rules)]
    return LoadPlan(storage_choice, compute_choice, decisions, fp8_matmul, without_effect, notes)


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


def _not_storage(rules: Rules) -> list[tuple[Rule, str]]:
    return [(rule, key) for rule in rules.own for key, _ in rule.settings if key != "storage"]


def _multiplies_in_fp8(facts: ModelFacts, device: Device, compute: str) -> bool:
    possible = device.capabilities["fp8_matmul"]
    if compute == "auto":
        return possible and device.capabilities["fp8_matmul_gains"] and facts.calibrated
    return possible and compute == "fp8"


def _choose_compute(facts: ModelFacts, device: Device, compute: str) -> tuple[Choice, list[tuple[str, str]], list[str]]:
    automatic, reason = auto_compute(device, facts.supported, facts.file_dtype)
    if compute == "auto":
        return Choice(compute, automatic, reason), [], []
    if compute == "fp8":
        if not device.capabilities["fp8_matmul"]:
            why = f"{device.profile.name} has no fp8 matmul: fp8 weights are computed in {automatic}"
            return Choice(compute, automatic, why), [("compute=fp8", why)], []
        note = "fp8 matmul quantizes activations with the file's input scale, or 1.0 where it has none: past 448 they clip."
        return Choice(compute, automatic, f"fp8 matmul, other operations in {automatic}"), [], [note]
    if compute == "fp16_safe":
        why = "this version has no fp16 that cannot overflow: the model computes in fp32"
        return Choice(compute, "fp32", why), [("compute=fp16_safe", why)], []
    notes = []
    if compute not in facts.supported:
        notes.append(f"ComfyUI does not list {compute} for this model: its activations may overflow.")
    return Choice(compute, compute), [], notes


def _choose_storage(
    facts: ModelFacts, device: Device, storage: str, compute: str, free_device_bytes: int | None
) -> Choice:
    if storage != "auto":
        return Choice(storage, storage)
    used, reason = auto_storage(device, 2 * facts.parameters, facts.file_dtype, free_device_bytes)
    if used == "as_file" and facts.file_dtype == "fp32" and compute != "fp32":
        used, reason = compute, f"an fp32 file computed in {compute} needs no more than {compute}"
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
    return dtype_named(storage if decision else plan.compute.used).itemsize
