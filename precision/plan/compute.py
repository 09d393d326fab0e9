"""Decide the arithmetic of each layer from the option, the rules, the storage of its weight and the
device."""

import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from ..base.dtypes import FP8_NAMES, QUANTIZED_NAMES
from ..base.message import Message, joined
from ..base.modes import FP8, FP16, FP32, INT8, MODE_OF, MODES
from ..base.options import ComputeOption, RuledCompute
from ..devices.detect import Device
from ..formats.layer_plan import AS_FILE, LayerPlan
from ..formats.registry import FORMAT_OF_STORAGE
from .accumulation import MatmulProfile
from .auto import auto_compute, why_int8_is_unpacked
from .choice import Choice, WithoutEffect, frozen
from .facts import LayerSpec, ModelFacts
from .rules import Rule, Rules

SAFE: Final = "fp16_safe"
WEIGHTS_FOR: dict[str, tuple[str, ...]] = {
    mode.compute: tuple(name for name in QUANTIZED_NAMES if FORMAT_OF_STORAGE[name].mode is mode)
    for mode in (FP8, INT8)
}
"""Compute options that multiply quantized weights as they are stored -> the storages of such
weights."""
AUTOMATIC = ("auto", INT8.compute)
"""Compute options that leave fp8 products to ``auto``."""
LEAVES_QUANTIZED = ("auto", *WEIGHTS_FOR)
"""Compute options that ask for no dtype: weights in other formats multiply by themselves."""
OVERFLOWED = "A result in plain fp16 was NaN or Inf: the model uses fp16_safe until it is unloaded."
NATIVE_FP8 = (
    "fp8 weights of the file multiply in fp8, as in ComfyUI, but with a scale computed from each input: 1.4 times the "
    "error of unpacked weights."
)
UNPACKED_FP8 = "fp8 weights are unpacked in each call: compute=fp8 multiplies them as stored, at 1.4 times the error."
OF_TEXT = re.compile(r"(^|\.)(input_blocks|middle_block|output_blocks)\..*attn2\.to_[kv]$")
"""The layers of SD and SDXL whose input is the text: 77 to 154 rows."""
FEW_ROWS = "its input is the text, too few rows to pay for a product in 8 bits: the weight is unpacked in each call"
NARROW = "on {0} fp8 products were measured to be faster from {1} inputs and outputs on: the weight is unpacked"
INT8_UNPACKED = "its int8 weight is unpacked in each call: {0}"
OWN_MATMUL = "{0} has its own matmul: runs in fp32"
OWN_MATMULS = "{0} layers ({1} ...) belong to another loader, which has its own matmul: they run in fp32"
STORAGE_RULE = "the model is already loaded: connect rules on storage to a loader or to Save Model"
NOT_LOOKED_AT = "These results are not checked for NaN, so fp16_safe is used instead of plain fp16: it cannot overflow."


@dataclass(frozen=True)
class ComputePlan:
    """The arithmetic of a model.

    Attributes:
        decisions: layer name -> decision, for the layers that do not simply follow ``activation_dtype``.
        attention: rules that ask for fp32 in the attention of blocks, which no plan knows by name.
        fallback: the plan from the first result on that is not finite, where ``auto`` took plain fp16.
        instead: why the model does not compute in fp16, in which it came; empty where it came in another dtype.
    """

    choice: Choice[ComputeOption]
    decisions: Mapping[str, LayerPlan]
    fp8_matmul: bool = False
    without_effect: tuple[WithoutEffect, ...] = ()
    notes: tuple[str, ...] = ()
    attention: tuple[Rule, ...] = ()
    fallback: "ComputePlan | None" = None
    instead: str = ""

    @classmethod
    def of_layers(cls, decisions: Mapping[str, LayerPlan]) -> "ComputePlan":
        """Plan these layers alone, whatever the model around them was planned to compute in."""
        return cls(Choice(FP16.compute, FP16.compute), decisions)

    @property
    def is_safe(self) -> bool:
        """True if the whole model computes as ``fp16_safe``."""
        return self.choice.used == SAFE

    @property
    def is_in_fp32(self) -> bool:
        """True if all values between layers are fp32, which the code of other packs may not
        take."""
        return self.activation_dtype == FP32.name

    @property
    def exchanges(self) -> bool:
        """True if the plan changes any layer or attention."""
        return bool(self.decisions or self.is_safe or self.attention)

    @property
    def unwatched(self) -> "ComputePlan":
        """The plan for a model whose results are not checked: the fallback, if there is one."""
        if self.fallback is None:
            return self
        return replace(self.fallback, choice=replace(self.fallback.choice, reason=NOT_LOOKED_AT))

    @property
    def mixes_fp32_in(self) -> bool:
        """True if single layers return fp32 activations to layers that expect 16 bit."""
        return not self.is_safe and any(decision.stream == "fp32" for decision in self.decisions.values())

    @property
    def ruled(self) -> list[str]:
        """List the modes of the layers that rules compute in another dtype than the option, a mode
        per layer."""
        own = MODES[MODE_OF[self.choice.used]]
        modes = (MODES[decision.mode] for decision in self.decisions.values())
        return [mode.name for mode in modes if not mode.is_8bit and mode.operand != own.operand]

    @property
    def activation_dtype(self) -> ComputeOption:
        """The dtype of activations between layers."""
        return "fp32" if self.is_safe else self.choice.used

    def on_loaded(
        self, facts: ModelFacts, rules: Rules, foreign: Mapping[str, str], held: Mapping[str, str],
        came_in: str = "",
    ) -> "ComputePlan":  # fmt: skip
        """Return this plan for a model in memory, with a list of the rules too late for a loaded model.

        ``foreign``: layer name -> the Python module of its class, for layers of another loader: fp32,
        not ``fp16_safe``. ``held``: layer name -> storage name. ``came_in``: the dtype that the model
        computes in without the self."""
        fallback = self.fallback and self.fallback.on_loaded(facts, rules, foreign, held, came_in)
        asked = ((layer, rules.on(facts.layers).setting("storage", layer.name, layer.cls)) for layer in facts.layers)
        unmet = [found[1] for layer, found in asked if found and found[0] not in (held.get(layer.name), AS_FILE)]
        late = (WithoutEffect(str(rule), STORAGE_RULE) for rule in rules.own if rule in unmet)
        idle = [*self.without_effect, *rules.without_effect(facts.layers), *late]
        moved = {
            name: replace(decision, mode=FP32.name, sums="", reason=Message(OWN_MATMUL, foreign[name]))
            for name, decision in self.decisions.items()
            if name in foreign and decision.mode == MODE_OF[SAFE]
        }
        if moved:
            why = Message(OWN_MATMULS, len(moved), next(iter(moved)))
            idle.append(WithoutEffect(f"compute={SAFE}", why))
        decisions = frozen({**self.decisions, **moved})
        leaves_fp16 = came_in == FP16.name and self.choice.used != FP16.compute
        instead = _instead_of_fp16(self.choice.used, facts) if leaves_fp16 else ""
        return replace(self, decisions=decisions, without_effect=tuple(idle), fallback=fallback, instead=instead)


BY_COMFYUI = ComputePlan(Choice("auto", "auto"), {})
"""The plan of a text encoder, and of a ControlNet that ComfyUI runs as it is: ComfyUI chooses the
arithmetic."""


def _instead_of_fp16(used: str, facts: ModelFacts) -> str:
    why = "ComfyUI does not list fp16 for this model: its activations may overflow, which gives black pictures."
    if FP16.name in facts.supported:
        why = "Above 65504 fp16 overflows, which gives black pictures."
    return joined([Message("Computed in {0}, not in the fp16 that the model was set to.", used), why])


def weight_dtype(compute: ComputeOption) -> ComputeOption:
    """Return the best dtype of unquantized weights of a model that computes in ``compute``."""
    return FP16.compute if compute == SAFE else compute


def choose_compute(facts: ModelFacts, device: Device, compute: ComputeOption) -> Choice[ComputeOption]:
    """Resolve ``compute`` for a model as a whole, without its layers."""
    automatic, reason = auto_compute(device, facts.supported, facts.file_dtype)
    if compute == "auto":
        return Choice(compute, automatic, reason)
    if compute not in WEIGHTS_FOR:
        return Choice(compute, compute)
    if device.capabilities[f"{compute}_matmul"]:
        how = Message("{0} matmul of {1} weights, other operations in {2}", compute, compute, automatic)
        return Choice(compute, automatic, how)
    why = Message("{0} has no {1} matmul: {1} weights are computed in {2}", device.profile.name, compute, automatic)
    return Choice(compute, automatic, why)


def plan_compute(
    facts: ModelFacts, device: Device, compute: ComputeOption, rules: Rules, stored: Mapping[str, str]
) -> ComputePlan:
    """Resolve ``compute`` for a model on a device, layer by layer.

    ``stored``: layer name -> storage of its weight: only fp8 weights can multiply in fp8, and
    quantized weights multiply quantized unless a dtype is requested."""
    choice = choose_compute(facts, device, compute)
    plan = _planned(facts, device, choice, rules, stored)
    if choice.requested not in LEAVES_QUANTIZED or choice.used != FP16.compute:
        return plan
    safe = replace(choice, used=SAFE, reason=OVERFLOWED)
    return replace(plan, fallback=_planned(facts, device, safe, rules, stored))


def _planned(
    facts: ModelFacts, device: Device, choice: Choice[ComputeOption], rules: Rules, stored: Mapping[str, str]
) -> ComputePlan:
    rules = rules.on(facts.layers)
    compute = choice.requested
    in_fp8 = _multiplied_in_fp8(facts, device, compute)
    follower = LayerPlan(mode=MODE_OF[choice.used])
    decisions: dict[str, LayerPlan] = {}
    without_effect = _rules_on_other_layers(facts.layers, rules)
    if compute in WEIGHTS_FOR and not device.capabilities[f"{compute}_matmul"]:
        reason = choose_compute(facts, device, compute).reason
        without_effect.insert(0, WithoutEffect(f"compute={compute}", reason))
    for layer in facts.layers:
        decision, problem = _decide(layer, choice, layer.name in in_fp8, device, rules, stored.get(layer.name, ""))
        following = decision or follower
        sums = rules.setting("accumulation", layer.name, layer.cls) if layer.multiplies else None
        inert = MatmulProfile({following.mode}).why_no_fp16_sums(device) if sums else None
        if sums and not inert:
            decision = replace(following, sums=sums[0])
        if decision:
            decisions[layer.name] = decision
        entries = (problem, WithoutEffect(str(sums[1]), inert) if sums and inert else None)
        without_effect += [entry for entry in entries if entry and entry not in without_effect]
    kinds = WEIGHTS_FOR.get(compute)
    if not without_effect and kinds and not {*kinds} & {*stored.values()}:
        why = Message("no weight of this model is stored in {0}: load it with storage {1}", compute, kinds[0])
        without_effect.append(WithoutEffect(f"compute={compute}", why))
    if any(decision.stream == "fp32" for decision in decisions.values()):
        followers = (layer.name for layer in facts.layers if layer.multiplies and layer.name not in decisions)
        decisions |= dict.fromkeys(followers, follower)
    attention = tuple(rule for rule in rules.all if "attention" in dict(rule.settings))
    multiplies = any(decision.mode == FP8.name for decision in decisions.values())
    if compute in AUTOMATIC and _as_comfyui(device) and {*FP8_NAMES} & {*stored.values()}:
        fp8 = NATIVE_FP8 if multiplies else UNPACKED_FP8
        choice = replace(choice, reason=Message("{0} {1}", choice.reason, fp8))
    unlisted = compute not in (*LEAVES_QUANTIZED, *facts.supported, SAFE, "fp32")
    risk = Message(
        "ComfyUI does not list {0} for this model: its activations may overflow. With fp16_safe they cannot.", compute
    )
    return ComputePlan(
        choice, frozen(decisions), multiplies, tuple(without_effect), (risk,) if unlisted else (), attention
    )


def _multiplied_in_fp8(facts: ModelFacts, device: Device, compute: ComputeOption) -> Container[str]:
    """Return the layers that multiply in fp8 if their weights are in fp8 and no rule decides
    otherwise."""
    if compute == FP8.compute and device.capabilities["fp8_matmul"]:
        return {layer.name for layer in facts.layers}
    return facts.native_fp8 if compute in AUTOMATIC and _as_comfyui(device) else ()


def _as_comfyui(device: Device) -> bool:
    """True if ``auto`` multiplies fp8 weights in fp8 where ComfyUI does; not where these products
    are known as slow."""
    return device.capabilities["fp8_matmul"] and "fp8_matmul_gains" not in device.profile.notes


def _decide(
    layer: LayerSpec, choice: Choice[ComputeOption], in_fp8: bool, device: Device, rules: Rules, storage: str
) -> tuple[LayerPlan | None, WithoutEffect | None]:
    if not layer.multiplies:
        return None, None
    compute, stream = (rules.setting(key, layer.name, layer.cls) for key in ("compute", "stream"))
    product, unpacked = _product_of(layer, choice, in_fp8, device, storage)
    wanted = compute[0] if compute else product or choice.used
    found = compute or stream
    reason = found[1].reason or str(found[1]) if found else unpacked
    problem = None
    if wanted in WEIGHTS_FOR and (why := _why_no_product(wanted, layer, device, storage)):
        # Only a request can be without effect, not int8 weights on a device that has no int8 matmul.
        if compute or choice.requested == FP8.compute:
            problem = WithoutEffect(str(compute[1]) if compute else "compute=fp8", Message("{0}: {1}", layer.name, why))
        wanted = _without(wanted, layer, choice, device, storage)
        reason = why
        compute = None
    row = FORMAT_OF_STORAGE.get(storage)
    follows = wanted == choice.used and choice.used != SAFE and not problem and not unpacked
    if row and row.quantizes_operands and row.mode is not FP8 and wanted != INT8.compute:
        follows = storage not in WEIGHTS_FOR[INT8.compute] and not compute and choice.requested in LEAVES_QUANTIZED
        reason = reason or Message("its {0} weight is dequantized because {1} was requested", storage, choice.requested)
    elif stream and stream[0] != "same":
        follows = False
    if follows:
        return None, problem
    return LayerPlan(mode=MODE_OF[wanted], stream=stream[0] if stream else "same", reason=reason), problem


def _product_of(
    layer: LayerSpec, choice: Choice[ComputeOption], in_fp8: bool, device: Device, storage: str
) -> tuple[RuledCompute | Literal[""], str]:
    """Return the quantized product of a layer without a rule, empty for none; and, if ComfyUI would
    multiply the weight as stored and this plan does not, the reason."""
    if storage in WEIGHTS_FOR[INT8.compute] and choice.requested in LEAVES_QUANTIZED:
        own = INT8.compute
    elif in_fp8 and storage in FP8_NAMES:
        own = FP8.compute
    else:
        return "", ""
    unpacked = _why_unpacked(layer, device, storage) if choice.requested != own else ""
    return ("", unpacked) if unpacked else (own, "")


def _why_unpacked(layer: LayerSpec, device: Device, storage: str) -> str:
    """Return why an 8-bit weight is unpacked unless its product is requested; "" if it multiplies
    as stored."""
    if storage == "int8" and (why := why_int8_is_unpacked(device)):
        return Message(INT8_UNPACKED, why)
    if storage in FP8_NAMES and min(layer.shape) < device.profile.fp8_width:
        return Message(NARROW, device.label, device.profile.fp8_width)
    few = OF_TEXT.search(layer.name) and storage in ("int8", *FP8_NAMES) and device.profile.type != "cpu"
    return FEW_ROWS if few else ""


def _without(
    product: str, layer: LayerSpec, choice: Choice[ComputeOption], device: Device, storage: str
) -> ComputeOption:
    """Return the arithmetic of a layer without the requested product: int8 for an int8 weight, else
    the model's."""
    own = _product_of(layer, choice, False, device, storage)[0] if product != INT8.compute else ""
    return own if own and not _why_no_product(own, layer, device, storage) else choice.used


def _rules_on_other_layers(layers: Sequence[LayerSpec], rules: Rules) -> list[WithoutEffect]:
    """List the user's own compute and stream rules that match only layers without a matmul."""
    found = []
    rules = rules.on(layers)
    for rule in (rule for rule in rules.own if {"compute", "stream"} & dict(rule.settings).keys()):
        matched = [layer for layer in layers if rule in rules.matching(layer.name, layer.cls)]
        if matched and not any(layer.multiplies for layer in matched):
            classes = ", ".join(sorted({layer.cls for layer in matched}))
            found.append(WithoutEffect(str(rule), Message("{0} has no matrix product: it follows the stream", classes)))
    return found


def _why_no_product(product: str, layer: LayerSpec, device: Device, storage: str) -> str | None:
    if storage not in WEIGHTS_FOR[product]:
        return Message("its weight is stored in {0}, not in {1}", storage or "16 bit", product)
    if not device.capabilities[f"{product}_matmul"]:
        why = device.reason(f"{product}_matmul")
        return Message("{0} has no {1} matmul, so the weight is dequantized: {2}", device.profile.name, product, why)
    if product == FP8.compute and any(size % 16 for size in layer.shape):
        shape = " x ".join(map(str, layer.shape))
        return Message("fp8 matmul needs sizes that are multiples of 16; this layer is {0}", shape)
    return None
