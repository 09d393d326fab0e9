"""From rules to decisions: what each layer's weight is stored in, and why."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .checkpoint import Checkpoint
from .dtypes import FP8_NAMES
from .rules import Rules

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


def layers_of(checkpoint: Checkpoint, prefix: str = "") -> list[Layer]:
    """The layers below ``prefix``, without the model's modules at hand: classes are inferred from name and shape."""
    names = (name for name in checkpoint.weights if name.startswith(prefix) and name.endswith(".weight"))
    return [_inferred(name[len(prefix) :], tuple(checkpoint.weights[name].data.shape)) for name in names]


def _inferred(name: str, shape: tuple[int, ...]) -> Layer:
    name = name.removesuffix(".weight")
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
    wanted, reason = (found[0], str(found[1].reason or found[1])) if found else (storage, "")
    if wanted in FP8_NAMES and layer.cls != "Linear":
        return StorageDecision("as_file", f"{layer.cls}: only Linear weights are held in fp8", kept=True)
    return StorageDecision(wanted, reason, kept=storage in FP8_NAMES and wanted not in FP8_NAMES)


def kept_high(decisions: dict[str, StorageDecision], names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, reason) of each of ``names`` that was kept from fp8."""
    return [(name, decisions[name].reason) for name in names if decisions[name].kept]
