"""What a model's weights are held in once loaded: the dtype of those that are not quantized, and their bytes."""

from collections.abc import Mapping
from math import prod

from ..dtypes import QUANTIZED_NAMES, dtype_named
from ..formats.checkpoint import Checkpoint, StoredWeight
from ..formats.comfy_format import AS_FILE, StoragePlan, specs_of
from ..formats.comfy_state import storage_to_make
from .facts import most
from .storage import LoadPlan


def unpacked_dtype(plan: LoadPlan) -> str:
    """Name the dtype for weights that leave 8 bits or fewer: 16 bit, which holds them, also where fp32 is computed in."""
    return plan.compute.weight_dtype if dtype_named(plan.compute.weight_dtype).itemsize == 2 else "bf16"


def held_dtype(weights: Mapping[str, StoredWeight], storages: Mapping[str, str], plan: LoadPlan) -> str:
    """Name the dtype of the weights that are not quantized; ComfyUI has one for them all.

    A dtype asked for by rules for all layers, or as storage, is that dtype. Beside quantized weights the others are converted
    to what they are computed in, unless that is wider than they are in the file: ComfyUI casts those at each use.

    Args:
        weights: the model's, as the file stores them.
        storages: tensor name -> storage that will be made, ``as_file`` for those not named.
    """
    by_layer = {decision.storage for decision in plan.decisions.values()}
    for asked in [*(by_layer if len(by_layer) == 1 else ()), plan.storage.used]:
        if asked not in (AS_FILE, *QUANTIZED_NAMES):
            return asked
    sizes: dict[str, int] = {}
    for weight in weights.values():
        if weight.is_number and not weight.quantized and storages.get(weight.name, AS_FILE) == AS_FILE:
            sizes[weight.storage] = sizes.get(weight.storage, 0) + prod(weight.shape)
    if not sizes:
        return unpacked_dtype(plan)
    own, computed = most(sizes), plan.compute.weight_dtype
    untouched = plan.storage.used == AS_FILE and not any(_is_quantized(weight, storages) for weight in weights.values())
    return own if untouched or dtype_named(computed).itemsize > dtype_named(own).itemsize else computed


def planned_bytes(checkpoint: Checkpoint, plan: LoadPlan, prefix: str = "") -> int:
    """Count the bytes that the weights below ``prefix`` take in memory once loaded as planned, by the file's header alone."""
    weights = {name: weight for name, weight in checkpoint.weights.items() if name.startswith(prefix)}
    named = ((f"{prefix}{layer}.weight", decision.storage) for layer, decision in plan.decisions.items())
    storages = {name: storage_to_make(weights[name], storage) for name, storage in named if name in weights}
    return weight_bytes(weights, storages, held_dtype(weights, storages, plan))


def weight_bytes(weights: Mapping[str, StoredWeight], storages: Mapping[str, str], dtype: str) -> int:
    """Count the bytes that a model's weights take in memory, those not quantized in ``dtype``; see :func:`held_dtype`."""
    return sum(_bytes(weight, storages, dtype) for weight in weights.values())


def _is_quantized(weight: StoredWeight, storages: Mapping[str, str]) -> bool:
    storage = storages.get(weight.name, AS_FILE)
    return storage in QUANTIZED_NAMES or (storage == AS_FILE and weight.quantized)


def _bytes(weight: StoredWeight, storages: Mapping[str, str], dtype: str) -> int:
    if _is_quantized(weight, storages) or not (weight.is_number or weight.quantized):
        return sum(spec.bytes for spec in specs_of(weight, StoragePlan(storages.get(weight.name, AS_FILE))))
    return prod(weight.shape) * dtype_named(dtype).itemsize
