"""From rules, device and model to the arithmetic of each layer, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..devices.detect import Device, auto_compute
from ..dtypes import FP8_NAMES
from ..modes import INT8, MODE_OF
from .accumulation import MatmulProfile, fp16_sums_inert
from .choice import Choice, frozen
from .facts import LayerSpec, ModelFacts
from .rules import Rules

SAFE = "fp16_safe"
QUANTIZED_PRODUCTS = (INT8.name, "int4", "nvfp4", "mxfp8")
"""Storages, beside fp8, whose layers multiply quantized operands by themselves in ComfyUI."""
FP8_MULTIPLE = 16


@dataclass(frozen=True)
class ComputeDecision:
    """How one layer runs.

    Attributes:
        mode: as in the report.
        stream: the dtype of its result: ``fp32``, or ``same`` as its input.
        sums: the accumulation dtype that a rule sets, ``fp32`` or ``fp16``; it overrides the Accumulation node. Empty
            where no rule does.
    """

    mode: str
    stream: str
    reason: str
    sums: str = ""


@dataclass(frozen=True)
class ComputePlan:
    """The arithmetic of a model.

    Attributes:
        decisions: layer name -> decision, for the layers that do not simply follow ``activation_dtype``.
        without_effect: (setting, reason).
    """

    choice: Choice
    decisions: Mapping[str, ComputeDecision]
    fp8_matmul: bool = False
    without_effect: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_safe(self) -> bool:
        """Tell whether the whole model computes as ``fp16_safe``."""
        return self.choice.used == SAFE

    @property
    def mixes_fp32_in(self) -> bool:
        """Tell whether single layers give fp32 activations, so that those after them get fp32 where they expect 16 bit."""
        return not self.is_safe and any(decision.stream == "fp32" for decision in self.decisions.values())

    @property
    def activation_dtype(self) -> str:
        """The dtype of activations between layers."""
        return "fp32" if self.is_safe else self.choice.used

    @property
    def weight_dtype(self) -> str:
        """The dtype that weights which are not quantized are best kept in."""
        return "fp16" if self.is_safe else self.choice.used


def plan_compute(
    facts: ModelFacts, device: Device, compute: str, rules: Rules, storages: Mapping[str, str] | None = None
) -> ComputePlan:
    """Resolve ``compute`` for a model on a device, layer by layer.

    ``storages``: layer name -> storage name, for those known to be stored in fp8 or in a format of ComfyUI's: only fp8
    weights can multiply in fp8, and quantized weights multiply quantized until a dtype is asked for.
    """
    choice, without_effect, notes = _choose(facts, device, compute)
    fp8_matmul = _multiplies_in_fp8(facts, device, compute)
    decisions: dict[str, ComputeDecision] = {}
    without_effect += rules_on_other_layers(facts.layers, rules)
    for layer in facts.layers:
        decision, problem = _decide(layer, choice, compute, fp8_matmul, device, rules, (storages or {}).get(layer.name, ""))
        sums, inert = _sums(layer, decision.mode if decision else MODE_OF[choice.used], device, rules)
        if sums:
            decision = replace(decision or ComputeDecision(MODE_OF[choice.used], "same", ""), sums=sums)
        if decision:
            decisions[layer.name] = decision
        without_effect += [entry for entry in (problem, inert) if entry and entry not in without_effect]
    if any(decision.stream == "fp32" for decision in decisions.values()):
        followers = (layer.name for layer in facts.layers if layer.multiplies and layer.name not in decisions)
        decisions |= {name: ComputeDecision(MODE_OF[choice.used], "same", "") for name in followers}
    return ComputePlan(choice, frozen(decisions), fp8_matmul, tuple(without_effect), tuple(notes))


def _choose(facts: ModelFacts, device: Device, compute: str) -> tuple[Choice, list[tuple[str, str]], list[str]]:
    automatic, reason = auto_compute(device, facts.supported, facts.file_dtype)
    if compute == "auto":
        return Choice(compute, automatic, reason), [], []
    if compute == "fp8":
        if not device.capabilities["fp8_matmul"]:
            why = f"{device.profile.name} has no fp8 matmul: fp8 weights are computed in {automatic}"
            return Choice(compute, automatic, why), [("compute=fp8", why)], []
        return Choice(compute, automatic, f"fp8 matmul of fp8 weights, other operations in {automatic}"), [], []
    notes = []
    if compute not in (*facts.supported, SAFE, "fp32"):
        notes.append(f"ComfyUI does not list {compute} for this model: its activations may overflow. fp16_safe cannot.")
    return Choice(compute, compute), [], notes


def _multiplies_in_fp8(facts: ModelFacts, device: Device, compute: str) -> bool:
    possible = device.capabilities["fp8_matmul"]
    if compute == "auto":
        return possible and device.capabilities["fp8_matmul_gains"] and facts.has_input_scales
    return possible and compute == "fp8"


def _decide(
    layer: LayerSpec, choice: Choice, asked: str, fp8_matmul: bool, device: Device, rules: Rules, storage: str
) -> tuple[ComputeDecision | None, tuple[str, str] | None]:
    if not layer.multiplies:
        return None, None
    compute, stream = (rules.setting(key, layer.name, layer.cls) for key in ("compute", "stream"))
    wanted = compute[0] if compute else "fp8" if fp8_matmul and storage in FP8_NAMES else choice.used
    found = compute or stream
    reason = found[1].reason or str(found[1]) if found else ""
    problem = None
    if wanted == "fp8" and (why := _why_no_fp8(layer, device, storage)):
        wanted, reason = choice.used, why
        problem = (str(compute[1]) if compute else "compute=fp8", f"{layer.name}: {why}")
    stream_value = stream[0] if stream else "same"
    if storage in QUANTIZED_PRODUCTS and not compute and asked in ("auto", "fp8"):
        return _in_its_own_way(storage, stream_value, reason), None
    if storage in QUANTIZED_PRODUCTS:
        reason = reason or f"its {storage} weight is dequantized, as {asked} was asked for"
        return ComputeDecision(MODE_OF[wanted], stream_value, reason), problem
    if wanted == choice.used and stream_value == "same" and choice.used != SAFE:
        return (ComputeDecision(MODE_OF[wanted], "same", reason), problem) if problem else (None, None)
    return ComputeDecision(MODE_OF[wanted], stream_value, reason), problem


def _in_its_own_way(storage: str, stream: str, reason: str) -> ComputeDecision | None:
    """ComfyUI's own product of a quantized weight, which nothing asked to change."""
    return ComputeDecision(INT8.name, stream, reason) if storage == INT8.name else None


def _sums(layer: LayerSpec, mode: str, device: Device, rules: Rules) -> tuple[str, tuple[str, str] | None]:
    """(sums that a rule asks for, why the rule has no effect)."""
    asked = rules.setting("accumulation", layer.name, layer.cls) if layer.multiplies else None
    if asked is None:
        return "", None
    problem = fp16_sums_inert(device, MatmulProfile({mode}))
    return ("", (str(asked[1]), problem)) if problem else (asked[0], None)


def rules_on_other_layers(layers: Sequence[LayerSpec], rules: Rules) -> list[tuple[str, str]]:
    """List (rule, reason) for the user's own compute and stream rules that match only layers without a matmul."""
    found = []
    for rule in (rule for rule in rules.own if {"compute", "stream"} & dict(rule.settings).keys()):
        matched = [layer for layer in layers if rule.matches(layer.name, layer.cls)]
        if matched and not any(layer.multiplies for layer in matched):
            classes = ", ".join(sorted({layer.cls for layer in matched}))
            found.append((str(rule), f"{classes} multiplies no matrices: it follows the stream"))
    return found


def rules_without_effect(layers: Sequence[LayerSpec], rules: Rules) -> list[tuple[str, str]]:
    """List (rule, reason) for the user's own rules that match none of these layers."""
    pairs = [(layer.name, layer.cls) for layer in layers]
    return [(str(rule), "the pattern matches no layer of this model") for rule in rules.without_match(pairs)]


def _why_no_fp8(layer: LayerSpec, device: Device, storage: str) -> str | None:
    """Say why a layer cannot multiply in fp8 here; None where it can."""
    if storage not in FP8_NAMES:
        return f"its weight is stored in {storage or '16 bit'}, not in fp8"
    if not device.capabilities["fp8_matmul"]:
        return f"{device.profile.name} has no fp8 matmul"
    if any(size % FP8_MULTIPLE for size in layer.shape):
        return f"fp8 matmul needs sizes that are multiples of {FP8_MULTIPLE}, this is {' x '.join(map(str, layer.shape))}"
    return None
