"""What a model takes in the host's memory, and what of that is new there: no slice of its file."""

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from math import prod

from ..base.dtypes import QUANTIZED_NAMES, dtype_named
from ..formats.checkpoint import Checkpoint, StoredWeight
from ..formats.comfy_format import AS_FILE, WeightPlan, exceeds_fp16, stays
from .choice import Choice, frozen
from .facts import most
from .storage import LoadPlan, StorageDecision
from .weights import Memory, notes_on, plan_weights


@dataclass(frozen=True)
class MemoryPlan:
    """The weights of a model that will be in memory.

    Attributes:
        plans: tensor name -> plan, in the order of the file.
        dtype: of the weights that are not quantized; ComfyUI has one for them all.
        bytes: what the model takes.
        made: what of that is new in the host's memory, and no slice of the file, whose pages the system drops at need.
        notes: formats that were unpacked because ComfyUI lacks them, and what is not stored as asked.
    """

    plans: Mapping[str, WeightPlan]
    dtype: str
    bytes: int
    made: int
    notes: tuple[str, ...]

    def storage_of(self, weight: StoredWeight) -> str:
        """Name what a weight is held in."""
        plan = self.plans[weight.name]
        return self.dtype if _is_cast(weight, plan) else plan.stored


def unpacked_dtype(computed: str) -> str:
    """Name the dtype for weights that leave 8 bits or fewer: a 16-bit one, also where fp32 is computed in."""
    return computed if dtype_named(computed).itemsize == 2 else "bf16"


def plan_model(
    checkpoint: Checkpoint,
    plan: LoadPlan,
    layers: Mapping[str, str],
    prefix: str,
    formats: Container[str],
    assigned: bool = False,
) -> MemoryPlan:
    """Plan the weights of a file whose model, below ``prefix``, will be loaded as ``plan`` says.

    ``layers``: tensor name -> layer of the model. ``formats``, ``assigned``: of :class:`Memory`.
    """
    inside = {name: weight for name, weight in checkpoint.weights.items() if name.startswith(prefix)}
    decided = {name: plan.decisions[layers[name]] for name in inside if layers.get(name) in plan.decisions}
    linear = {name for name, decision in decided.items() if decision.quantizable}
    unpacked = unpacked_dtype(plan.compute.weight_dtype)
    memory = Memory(formats, unpacked, inside.keys() - linear, linear, assigned, plan.unheld)
    asked = {name: decision.storage for name, decision in decided.items()}
    plans = plan_weights(inside, asked, checkpoint.path, memory)
    others = {name: weight for name, weight in checkpoint.weights.items() if name not in inside}
    plans |= plan_weights(others, {}, checkpoint.path, replace(memory, unheld={}))
    first = common_dtype(inside, plans, plan)
    dtype = plan.compute.weight_dtype if first == "bf16" and plan.no_bf16 else first
    cast = (w for name, w in inside.items() if plans[name].storage not in QUANTIZED_NAMES and w.format is None)
    if dtype == "fp16" and any(exceeds_fp16(weight, checkpoint.path) for weight in cast):
        dtype = "bf16"
    if dtype == "bf16" and plan.no_bf16:
        dtype = "fp32"
    planned = _memory_plan(checkpoint, plans, memory, inside, dtype, asked)
    if dtype == first or not plan.no_bf16:
        return planned
    return replace(planned, notes=(*planned.notes, f"Weights in {first} were loaded in {dtype}: {plan.no_bf16}."))


def plan_encoder(
    checkpoint: Checkpoint,
    choice: Choice,
    decisions: Mapping[str, StorageDecision],
    default: str,
    formats: Container[str],
    assigned: bool = False,
    unheld: Mapping[str, str] = frozen({}),
) -> MemoryPlan:
    """Plan the weights of a text encoder's file, by layer as ``decisions`` say.

    ``choice``: for the whole encoder; where that is no dtype, what is not quantized is in ``default``. The others: of
    :class:`Memory`.
    """
    dtype = default if choice.used in (*QUANTIZED_NAMES, AS_FILE) else choice.used
    named = ((name, decisions.get(weight.layer)) for name, weight in checkpoint.weights.items())
    decided = {name: decision for name, decision in named if decision}
    linear = {name for name, decision in decided.items() if decision.quantizable}
    memory = Memory(formats, unpacked_dtype(default), linear=linear, assigned=assigned, unheld=unheld)
    asked = {name: decision.storage for name, decision in decided.items()}
    plans = plan_weights(checkpoint.weights, asked, checkpoint.path, memory)
    return _memory_plan(checkpoint, plans, memory, checkpoint.weights, dtype, asked)


def common_dtype(weights: Mapping[str, StoredWeight], plans: Mapping[str, WeightPlan], plan: LoadPlan) -> str:
    """Name the dtype of the weights that are not quantized; ComfyUI has one for them all.

    A dtype asked for by rules for all layers, or as storage, is that dtype. Next to quantized weights the others are
    converted to what they are computed in, unless that is wider than they are in the file: ComfyUI casts those at each
    use.
    """
    by_layer = {decision.storage for decision in plan.decisions.values()}
    candidates: list[str] = [plan.storage.used]
    if len(by_layer) == 1:
        candidates = [*by_layer, *candidates]
    for asked in candidates:
        if asked not in (AS_FILE, *QUANTIZED_NAMES):
            return asked
    sizes: Counter[str] = Counter()
    for name, weight in weights.items():
        if weight.is_number and not weight.quantized and plans[name].storage == AS_FILE:
            sizes[weight.storage] += prod(weight.shape)
    if not sizes:
        return unpacked_dtype(plan.compute.weight_dtype)
    own, computed = most(sizes), plan.compute.weight_dtype
    untouched = plan.storage.used == AS_FILE and not any(_is_quantized(weights[name], plans[name]) for name in weights)
    return own if untouched or dtype_named(computed).itemsize > dtype_named(own).itemsize else computed


def _memory_plan(
    checkpoint: Checkpoint,
    plans: dict[str, WeightPlan],
    memory: Memory,
    inside: Mapping[str, StoredWeight],
    dtype: str,
    asked: Mapping[str, str],
) -> MemoryPlan:
    lacking = Counter(weight.format for weight in inside.values() if weight.format and memory.is_unknown(weight))
    unpacked = [
        (f"{count} layers in {kind.title}, which needs ComfyUI {kind.since}, were unpacked to {memory.unpacked}.")
        for kind, count in lacking.items()
    ]
    as_file = (weight for name, weight in inside.items() if asked.get(name, AS_FILE) == AS_FILE)
    counts = Counter(weight.storage for weight in as_file if weight.storage in memory.unheld)
    unpacked += [f"{count} weights in {it} were loaded in {dtype}: {memory.unheld[it]}" for it, count in counts.items()]
    sizes = {name: _bytes(weight, plans[name], dtype) for name, weight in inside.items()}
    quantized = any(_is_quantized(weight, plans[name]) for name, weight in inside.items())
    made = sum(
        sizes[name]
        for name, weight in inside.items()
        if not (stays(weight, plans[name].storage) and _is_kept(weight, plans[name], dtype, memory, quantized))
    )
    notes = (*unpacked, *notes_on({name: plans[name] for name in inside}))
    return MemoryPlan(plans, dtype, sum(sizes.values()), made, notes)


def _is_quantized(weight: StoredWeight, plan: WeightPlan) -> bool:
    return plan.storage in QUANTIZED_NAMES or (plan.storage == AS_FILE and weight.quantized)


def _is_cast(weight: StoredWeight, plan: WeightPlan) -> bool:
    """Tell whether ComfyUI casts a weight, a number and not quantized, to the model's dtype as it loads."""
    return (weight.is_number or weight.quantized) and not _is_quantized(weight, plan)


def _is_kept(weight: StoredWeight, plan: WeightPlan, dtype: str, memory: Memory, quantized: bool) -> bool:
    """Tell whether a model holds the given tensor of a weight.

    Beside quantized layers ComfyUI's Linear casts what is none (``_load_quantized_module`` in comfy/ops.py).
    """
    if not _is_cast(weight, plan):
        return weight.quantized or memory.assigned
    if quantized and weight.name in memory.linear:
        return weight.storage == dtype
    return memory.assigned


def _bytes(weight: StoredWeight, plan: WeightPlan, dtype: str) -> int:
    return prod(weight.shape) * dtype_named(dtype).itemsize if _is_cast(weight, plan) else plan.bytes
