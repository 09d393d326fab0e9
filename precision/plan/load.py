"""Plan a load: the storage option, every layer, the dtype of the other weights, and the memory they
take.

Loaders, report and page read the plan. What changes it afterwards is listed in
``docs/internals/decisions.md``, "One plan per layer".
"""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod

from ..base.dtypes import QUANTIZED_NAMES, dtype_named
from ..base.message import Message
from ..base.options import ComputeOption, StorageOption
from ..formats.checkpoint import Checkpoint, StoredWeight
from ..formats.comfy_format import exceeds_fp16, stays
from ..formats.layer_plan import AS_FILE, LayerPlan
from .auto import BLOCKS, why_slow
from .choice import Choice, WithoutEffect, frozen
from .compute import BY_COMFYUI, ComputePlan, choose_compute, plan_compute, weight_dtype
from .facts import ModelFacts, facts_of, layer_specs, most
from .layers import LoadTarget, notes_on, plan_storage, plan_weights
from .nvfp4 import nvfp4_doubts, shapes_by_weight
from .rules import TEXT_ENCODER_RULES, Rules
from .storage import bytes_below_16_bit, choose_encoder_storage, choose_storage

UNPACKED = "{0} layers in {1}, which needs ComfyUI {2}, were unpacked to {3}."
LOADED_IN = "{0} weights in {1} were loaded in {2}: {3}"
UNPACKED_BLOCKS = "{0} layers in {1} are dequantized in each call, which takes longer than 16-bit weights: {2}"


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a load, kept with the model.

    Attributes:
        storage: the storage option as resolved.
        layers: layer name -> plan.
        compute: the arithmetic.
        weights: tensor name -> plan, in the order of the file; the plan of a layer's weight is also in ``layers``.
        dtype: the dtype of the weights that are not quantized; ComfyUI has one for them all.
        allocated: bytes allocated in host memory; all other bytes are memory-mapped and can be evicted.
        notes: what was repaired in the file, what was unpacked, and what is not stored as requested.
        costs: what the storage costs beside bytes: weights quantized again, or dequantized in each call; doubts of a
            family. They are told with the bytes.
        native_fp8: as of :class:`~halfsafe.precision.plan.facts.ModelFacts`.
        below_16_bit: the bytes that the file's quantized weights save compared with 16 bit.
    """

    storage: Choice
    layers: Mapping[str, LayerPlan] = field(default_factory=dict)
    compute: ComputePlan = BY_COMFYUI
    weights: Mapping[str, LayerPlan] = field(default_factory=dict)
    dtype: str = ""
    allocated: int = 0
    without_effect: tuple[WithoutEffect, ...] = ()
    notes: tuple[str, ...] = ()
    costs: tuple[str, ...] = ()
    file: str = ""
    dialects: tuple[str, ...] = ()
    native_fp8: Container[str] = frozenset()
    below_16_bit: int = 0

    def declared(self, prefix: str) -> list[str]:
        """List the tensors below a prefix that ComfyUI will hold quantized, by their names in the
        file."""
        return [name for name, plan in self.weights.items() if plan.declared and name.startswith(prefix)]

    @cached_property
    def reasons(self) -> Mapping[str, str]:
        """Layer name -> why the layer is stored as it is."""
        reasons = {name: plan.note or plan.why_stored for name, plan in self.layers.items()}
        return {name: reason for name, reason in reasons.items() if reason}

    @cached_property
    def kept(self) -> Mapping[str, str]:
        """Layer name -> why the layer is not in 8 bits although requested."""
        return {name: plan.why_stored for name, plan in self.layers.items() if plan.kept}

    @cached_property
    def asked(self) -> Mapping[str, str]:
        """Layer name -> the storage requested, for the layers that were not to stay as in the
        file."""
        return {name: plan.asked for name, plan in self.layers.items() if plan.asked != AS_FILE}


def plan_load(
    facts: ModelFacts, storage: StorageOption, compute: ComputeOption, rules: Rules, target: LoadTarget
) -> ModelPlan:
    """Resolve ``storage`` and ``compute`` for a model, layer by layer.

    Without a file in ``facts`` the storages are those requested, and no tensor is planned.

    Raises:
        NonFiniteWeight, StorageNotHeld, CheckpointError: as of :func:`~halfsafe.precision.plan.layers.plan_weights`.
    """
    computed = choose_compute(facts, target.device, compute)
    choice, layers = choose_storage(facts, storage, computed, rules, target)
    plan = ModelPlan(choice, layers, without_effect=tuple(rules.without_effect(facts.layers)))
    storages = {n: facts.file_dtype if own.storage == AS_FILE else own.storage for n, own in layers.items()}
    if facts.checkpoint.weights:
        plan = _with_tensors(plan, facts, target, weight_dtype(computed.used))
        storages = {name: own.stored for name, own in plan.layers.items()}
    arithmetic = plan_compute(facts, target.device, compute, rules, storages)
    decided = {name: plan.layers[name].with_arithmetic(own) for name, own in arithmetic.decisions.items()}
    costs = (*plan.costs, *nvfp4_doubts(shapes_by_weight(facts.layers), plan.layers.values()))
    return replace(plan, compute=arithmetic, layers=frozen({**plan.layers, **decided}), costs=costs)


def _with_tensors(plan: ModelPlan, facts: ModelFacts, target: LoadTarget, computed: str) -> ModelPlan:
    """Complete a plan with the tensors of the model's file. ``computed``: the best dtype of
    unquantized weights."""
    checkpoint = facts.checkpoint
    inside = facts.inside
    target = replace(target, unpacked=_unpacked_dtype(computed), only_linear=True)
    weights = _planned(plan, facts, target)
    first = _common_dtype(plan, inside, weights, computed)
    no_bf16 = target.device.refuses("bf16")
    dtype = computed if first == "bf16" and no_bf16 else first
    cast = (weight for name, weight in inside.items() if not weights[name].declared)
    if dtype == "fp16" and any(exceeds_fp16(weight, checkpoint.path) for weight in cast):
        dtype = "bf16"
    if dtype == "bf16" and no_bf16:
        dtype = "fp32"
    told: list[str] = []
    if dtype != first and no_bf16:
        told.append(Message("Weights in {0} were loaded in {1}: {2}.", first, dtype, no_bf16))
    planned = _in_memory(plan, facts, weights, target, dtype)
    elsewhere = {name: weight for name, weight in checkpoint.weights.items() if name not in inside}
    others = plan_weights(elsewhere, {}, checkpoint.path)
    below = bytes_below_16_bit(inside.values()) if checkpoint.dialects else 0
    weights = {**planned.weights, **others}
    return replace(planned, weights=frozen(weights), notes=(*planned.notes, *told), below_16_bit=below)


def plan_encoder(checkpoint: Checkpoint, storage: str, default: str, target: LoadTarget) -> ModelPlan:
    """Plan a text encoder's file. ``default``: the dtype ComfyUI keeps text encoders in.

    Raises:
        NonFiniteWeight, StorageNotHeld, CheckpointError: as of :func:`~halfsafe.precision.plan.layers.plan_weights`.
    """
    layers = layer_specs(checkpoint)
    facts = facts_of(checkpoint, "", layers, (), {f"{layer.name}.weight": layer.name for layer in layers})
    choice = choose_encoder_storage(facts, storage, default, target)
    plan = ModelPlan(choice, plan_storage(layers, choice.used, Rules(presets=TEXT_ENCODER_RULES)))
    # ComfyUI casts embeddings of fp8, which torch does not do on MPS; Linear weights it unpacks.
    on_mps = target.device.profile.type == "mps"
    target = replace(target, unpacked=_unpacked_dtype(default), only_linear=on_mps)
    dtype = default if choice.used in (*QUANTIZED_NAMES, AS_FILE) else choice.used
    planned = _in_memory(plan, facts, _planned(plan, facts, target), target, dtype)
    return replace(planned, below_16_bit=bytes_below_16_bit(checkpoint.weights.values()))


def _unpacked_dtype(computed: str) -> str:
    """Return the dtype for weights that leave 8 bits or fewer: 16-bit, also if the model computes
    in fp32."""
    return computed if dtype_named(computed).itemsize == 2 else "bf16"


def _planned(plan: ModelPlan, facts: ModelFacts, target: LoadTarget) -> dict[str, LayerPlan]:
    """Plan the tensors of a model, by tensor name, after its layers were planned by name."""
    by_name = {name: plan.layers[layer] for name, layer in facts.names.items() if layer in plan.layers}
    return plan_weights(facts.inside, by_name, facts.checkpoint.path, target)


def _common_dtype(
    plan: ModelPlan, inside: Mapping[str, StoredWeight], weights: Mapping[str, LayerPlan], computed: str
) -> str:
    """Return the dtype of the weights that are not quantized; ComfyUI has one for them all.

    A dtype that rules request for all layers, or that is the storage, is that dtype. In a model
    with quantized weights the others are converted to the dtype they are computed in, unless that
    is wider than in the file: ComfyUI casts such weights at each use."""
    by_rules = {own.storage for own in plan.layers.values()}
    used = plan.storage.used
    candidates = [*by_rules, used] if len(by_rules) == 1 else [used]
    for requested in candidates:
        if requested not in (AS_FILE, *QUANTIZED_NAMES):
            return requested
    sizes: Counter[str] = Counter()
    for name, weight in inside.items():
        if weights[name].storage == AS_FILE and not weight.quantized and weight.is_number:
            sizes[weight.storage] += prod(weight.shape)
    if not sizes:
        return _unpacked_dtype(computed)
    own = most(sizes)
    untouched = used == AS_FILE and not any(_is_quantized(weight, weights[name]) for name, weight in inside.items())
    return own if untouched or dtype_named(computed).itemsize > dtype_named(own).itemsize else computed


def _in_memory(
    plan: ModelPlan, facts: ModelFacts, weights: dict[str, LayerPlan], target: LoadTarget, dtype: str
) -> ModelPlan:
    """Complete a plan with planned tensors: layers, notes, and the memory they take."""
    inside = facts.inside
    file = facts.checkpoint
    kinds = Counter([weight.format for weight in inside.values()])
    unknown = [(kind, count) for kind, count in kinds.items() if not kind.is_held_by(target.formats)]
    notes = [Message(UNPACKED, count, kind.title, kind.since, target.unpacked) for kind, count in unknown]
    as_file = Counter(w.storage for name, w in inside.items() if weights[name].asked == AS_FILE and w.quantized)
    refused = ((storage, count, target.refuses(storage)) for storage, count in as_file.items())
    notes += [Message(LOADED_IN, count, storage, dtype, why) for storage, count, why in refused if why]
    blocks = Counter(own.stored for name, own in weights.items() if own.stored in BLOCKS and name in inside)
    slow = ((count, storage, why_slow(storage, target.device)) for storage, count in blocks.items())
    quantized = {name for name, weight in inside.items() if _is_quantized(weight, weights[name])}
    allocated = 0
    for name, weight in inside.items():
        own = weights[name]
        is_cast = name not in quantized and (weight.is_number or weight.quantized)
        linear = is_cast and bool(quantized) and own.quantizable
        # In a model with quantized layers, ComfyUI's Linear casts (``_load_quantized_module`` in comfy/ops.py).
        kept = weight.storage == dtype if linear else target.streams or name in quantized
        if not (kept and stays(weight, own.storage)):
            allocated += prod(weight.shape) * dtype_named(dtype).itemsize if is_cast else own.bytes
        if is_cast and own.stored != dtype:
            weights[name] = replace(own, stored=dtype)
    completed = {layer: weights[name] for name, layer in facts.names.items() if name in weights}
    return replace(
        plan,
        layers=frozen({**plan.layers, **completed}),
        weights=frozen(weights),
        dtype=dtype,
        allocated=allocated,
        notes=(*file.notes, *notes, *notes_on(weights)),
        costs=tuple(Message(UNPACKED_BLOCKS, *told) for told in slow if told[-1]),
        file=file.path,
        dialects=file.dialects,
        native_fp8=facts.native_fp8,
    )


def _is_quantized(weight: StoredWeight, plan: LayerPlan) -> bool:
    return plan.storage in QUANTIZED_NAMES or (plan.storage == AS_FILE and weight.quantized)
