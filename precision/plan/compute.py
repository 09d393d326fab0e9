"""From rules, device and model to the arithmetic of each layer, and why."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..devices.detect import Device, auto_compute
from ..dtypes import FP8_NAMES
from .accumulation import Work, fp16_sums_inert
from .choice import Choice
from .rules import Rules

MATRIX_CLASSES = ("Linear", "Conv")
SAFE = "fp16_safe"
GOALS = ("balanced", "quality", "speed", "memory")
INT8 = "int8"
MULTIPLY_IN_INT8 = ("int8_tensorwise",)
QUANTIZED_PRODUCTS = (*MULTIPLY_IN_INT8, "convrot_w4a4", "nvfp4", "mxfp8")
"""ComfyUI's formats, beside fp8, whose layers multiply quantized operands by themselves."""
MODE_OF = {"fp8": "fp8", "fp16": "fp16", SAFE: "fp16_wide", "bf16": "bf16", "fp32": "fp32"}
FP8_MULTIPLE = 16


@dataclass(frozen=True)
class Layer:
    """A module with a weight: its name inside the model, its class and its weight's shape."""

    name: str
    cls: str
    shape: tuple[int, ...]

    @property
    def multiplies(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return any(word in self.cls for word in MATRIX_CLASSES) and len(self.shape) > 1


@dataclass(frozen=True)
class ModelFacts:
    """What a plan needs to know of a model.

    ``file_dtype``: the storage name most weights have; ``supported``: compute dtypes it is known to work in, best first;
    ``calibrated``: its fp8 layers bring the activation scales an fp8 matmul needs; ``formats``: layer -> ComfyUI's name of
    the format that its weight stays in, whatever storage is asked for.
    """

    layers: Sequence[Layer]
    parameters: int
    file_dtype: str
    supported: tuple[str, ...]
    calibrated: bool = False
    formats: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ComputeDecision:
    """How one layer runs: ``mode`` as in the report; ``stream``: ``fp32``, or ``same`` as its input; ``sums``: ``fp32`` or
    ``fp16`` where a rule asks for it, whatever else is asked for."""

    mode: str
    stream: str
    reason: str
    sums: str = ""


@dataclass(frozen=True)
class ComputePlan:
    """The arithmetic of a model. ``decisions`` holds the layers that do not simply follow ``stream_dtype``."""

    choice: Choice
    decisions: dict[str, ComputeDecision]
    fp8_matmul: bool = False
    without_effect: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def safe(self) -> bool:
        return self.choice.used == SAFE

    @property
    def widens(self) -> bool:
        """Whether a layer widens the stream, so that layers after it meet fp32 where they expect 16 bit."""
        return not self.safe and any(decision.stream == "fp32" for decision in self.decisions.values())

    @property
    def stream_dtype(self) -> str:
        """The dtype of activations between layers."""
        return "fp32" if self.safe else self.choice.used

    @property
    def weight_dtype(self) -> str:
        """The dtype that weights which are not quantized are best kept in."""
        return "fp16" if self.safe else self.choice.used


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
    return ComputePlan(choice, decisions, fp8_matmul, without_effect, notes)


def plan_for_goal(facts: ModelFacts, device: Device, goal: str, storages: Mapping[str, str]) -> tuple[ComputePlan, str]:
    """The plan for a goal of Auto Precision (balanced, quality, speed, memory), and why.

    Weights stay as they are loaded: what they are stored in is the loader's choice.
    """
    compute, reason = _for_goal(device, goal, any(storage in FP8_NAMES for storage in storages.values()))
    plan = plan_compute(facts, device, compute, Rules(), storages)
    return plan, f"{reason} {plan.choice.reason}".strip()


def _for_goal(device: Device, goal: str, has_fp8: bool) -> tuple[str, str]:
    if goal == "quality":
        if device.capabilities["fp16"]:
            return SAFE, "fp16 products with fp32 sums and fp32 between layers are closer to fp32 than bf16 is."
        return "fp32", "fp16 is not fast on this device, so fp32 is used."
    if goal == "speed" and device.capabilities["fp8_matmul_gains"]:
        if has_fp8:
            return "fp8", "fp8 products are the fastest here."
        return "auto", "No weight is stored in fp8; load with storage fp8_e4m3fn to multiply in fp8, the fastest here."
    if goal == "memory":
        halve = not has_fp8 and device.capabilities["fp8_storage"]
        return "auto", "Load the model with storage fp8_e4m3fn to halve its weights." if halve else ""
    return "auto", ""


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
        return possible and device.capabilities["fp8_matmul_gains"] and facts.calibrated
    return possible and compute == "fp8"


def _decide(
    layer: Layer, choice: Choice, asked: str, fp8_matmul: bool, device: Device, rules: Rules, storage: str
) -> tuple[ComputeDecision | None, tuple[str, str] | None]:
    if not layer.multiplies:
        return None, None
    compute, stream = (rules.setting(key, layer.name, layer.cls) for key in ("compute", "stream"))
    wanted = compute[0] if compute else "fp8" if fp8_matmul and storage in FP8_NAMES else choice.used
    reason = str((compute or stream)[1].reason or (compute or stream)[1]) if compute or stream else ""
    problem = None
    if wanted == "fp8":
        problem = _why_no_fp8(layer, device, storage)
        if problem:
            wanted, reason = choice.used, problem
            problem = (str(compute[1]) if compute else "compute=fp8", f"{layer.name}: {problem}")
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
    return ComputeDecision(INT8, stream, reason) if storage in MULTIPLY_IN_INT8 else None


def _sums(layer: Layer, mode: str, device: Device, rules: Rules) -> tuple[str, tuple[str, str] | None]:
    """(sums that a rule asks for, why the rule has no effect)."""
    asked = rules.setting("accumulation", layer.name, layer.cls) if layer.multiplies else None
    if asked is None:
        return "", None
    problem = fp16_sums_inert(device, Work({mode}))
    return ("", (str(asked[1]), problem)) if problem else (asked[0], None)


def rules_on_other_layers(layers: Sequence[Layer], rules: Rules) -> list[tuple[str, str]]:
    """(rule, reason) of the user's own compute and stream rules that match only layers that multiply no matrices."""
    found = []
    for rule in (rule for rule in rules.own if {"compute", "stream"} & dict(rule.settings).keys()):
        matched = [layer for layer in layers if rule.matches(layer.name, layer.cls)]
        if matched and not any(layer.multiplies for layer in matched):
            classes = ", ".join(sorted({layer.cls for layer in matched}))
            found.append((str(rule), f"{classes} multiplies no matrices: it follows the stream"))
    return found


def _why_no_fp8(layer: Layer, device: Device, storage: str) -> str:
    if storage not in FP8_NAMES:
        return f"its weight is stored in {storage or '16 bit'}, not in fp8"
    if not device.capabilities["fp8_matmul"]:
        return f"{device.profile.name} has no fp8 matmul"
    if any(size % FP8_MULTIPLE for size in layer.shape):
        return f"fp8 matmul needs sizes that are multiples of {FP8_MULTIPLE}, this is {' x '.join(map(str, layer.shape))}"
    return ""
