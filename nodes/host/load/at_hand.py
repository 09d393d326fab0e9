"""Quantize a model in memory, from any loader, with its patches merged: a new model beside the one that came in; and
offer it where a device gains from it."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, cast, get_args

from comfy.model_patcher import ModelPatcher

from ....precision.base.dtypes import FP8_DTYPES, QUANTIZED_NAMES, dtype_named, name_of
from ....precision.base.errors import HalfsafeError, StorageNotHeld
from ....precision.base.layer_names import plain_name
from ....precision.base.message import Message, joined
from ....precision.base.options import ComputeOption
from ....precision.base.text import listed, size_text
from ....precision.devices.measurements import told as published
from ....precision.devices.memory import require_memory
from ....precision.formats.checkpoint import StoredWeight, read_checkpoint
from ....precision.formats.comfy_format import made_here, tensors_made
from ....precision.formats.registry import FORMAT_OF_STORAGE
from ....precision.make.weight_errors import measuring_errors, told_again
from ....precision.plan.auto import UNQUANTIZED, why_int8_is_slow
from ....precision.plan.choice import Choice, frozen
from ....precision.plan.layers import plan_storage, require_held
from ....precision.plan.load import ModelPlan
from ....precision.plan.nvfp4 import nvfp4_doubts
from ....precision.plan.rules import Rules
from ....precision.plan.storage import bytes_below_16_bit
from ....precision.report.result import IN_INT8, Result
from ..comfyui.execution import is_compiled, is_on_several_devices
from ..comfyui.layers import DIFFUSION_MODEL, activation_dtype, layers_of
from ..comfyui.model_facts import bytes_by_storage, held_storages, model_facts, record_of
from .detection import narrower_in_file
from .devices import compute_device, current_device, device_at, free_host_memory, quantizing_device
from .identity import metadata_of, source_path_of
from .models import attach, load_onto
from .save import LiveWeights, plan_live_weights
from .tensors import byte_progress

StorageAtHand = Literal["as loaded", "int8", "fp8_e4m3fn", "w6a8", "w4a8", "nvfp4", "mxfp8"]
STORAGES_AT_HAND: tuple[StorageAtHand, ...] = get_args(StorageAtHand)
AS_LOADED: StorageAtHand = "as loaded"
KEPT = "storage={0} changes nothing: {1}"
ALREADY = "the weights are quantized already"
NO_LAYER = "the rules and the format keep every layer as it is"


def quantized_at_hand(
    patcher: ModelPatcher, storage: StorageAtHand, rules: Rules, disable_dynamic: bool = False
) -> tuple[ModelPatcher, str]:
    """Return a model whose weights are quantized to ``storage``, with the patches of ``patcher`` merged, and sentences
    on the result. ``patcher`` and its model are not changed. Its record is that of a loader with this storage.

    Layers that are quantized already keep their storage. The weights are made one after another.

    Raises:
        HalfsafeError: the weights are packed in another loader's format, or code on the model would go on running the
            old weights.
        StorageNotHeld: this ComfyUI or the device does not support the storage.
        MemoryShortage: the quantized weights do not fit in the host's memory.
        NonFiniteWeight: a weight holds NaN or Inf.
    """
    _refuse_bound_to_weights(patcher)
    require_held([storage], held_storages(), device_at(compute_device()))
    name = source_path_of(patcher) or type(patcher.model).__name__
    weights, plans, merged = plan_live_weights(patcher, name, storage, rules, keeps_quantized=True)
    stored = weights.stored
    new = {key for key, plan in plans.items() if plan.stored in QUANTIZED_NAMES and not stored[key].quantized}
    if not new:
        quantized = any(weight.quantized for weight in stored.values())
        return patcher, Message(KEPT, storage, ALREADY if quantized else NO_LAYER)
    size = sum(plans[key].bytes for key in new)
    others = sum(plans[key].bytes for key in {*weights.patched, *weights.unpacking} - new)
    require_memory(size + others, f"storage={storage}", free_host_memory())
    progress = byte_progress(stored.values())
    errors: dict[str, float] = {}
    with quantizing_device() as device:
        made = (device.weights if device else made_here)(weights, plans, name)
        made = measuring_errors(made, plans, errors, all_changed=False)
        tensors = dict(tensors_made(made, lambda _, done: progress(done)))
    checkpoint = read_checkpoint(tensors, metadata_of(patcher, None, None), name)
    computed = cast(ComputeOption, name_of(activation_dtype(patcher)))
    clone = load_onto(patcher, checkpoint, "as_file", computed, Rules(), disable_dynamic=disable_dynamic)
    clone.patches = {}  # merged
    clone.cached_patcher_init = (_again, (patcher, storage, rules))
    record = cast(ModelPlan, record_of(clone))
    texts: list[str] = [Message("{0} layers were quantized to {1}, {2}.", len(new), storage, size_text(size))]
    texts += [Message("The patches of {0} weights were merged.", len(merged))] if merged else []
    doubts = nvfp4_doubts(weights.shapes, plans.values())
    costs = (*told_again(plans, errors, merged), *record.costs, *doubts)
    by_layer = ((layer, own, plans.get(f"{layer}.weight", own)) for layer, own in record.layers.items())
    layers = {layer: replace(own, why_stored=as_made.why_stored, kept=as_made.kept) for layer, own, as_made in by_layer}
    below = bytes_below_16_bit(stored.values())
    choice = Choice(storage, storage, joined(texts))
    attach(clone, replace(record, storage=choice, layers=frozen(layers), costs=costs, below_16_bit=below))
    return clone, joined([*texts, *costs])


def held_on_device(patcher: ModelPatcher) -> ModelPatcher:
    """Return a model whose quantized weights the device unpacks: ``patcher``, or on a Mac a model
    whose fp8 weights without a scale are ComfyUI's quantized ones of the same bytes.

    ComfyUI's layers cast weights without a scale themselves, which torch does not do there;
    quantized ones it unpacks by comfy-kitchen (``metal.py``). Patches stay patches.

    Raises:
        StorageNotHeld: the device cannot unpack the weights.
        HalfsafeError: code on the model would go on running the old weights.
    """
    device = device_at(compute_device())
    held = bytes_by_storage(patcher)
    if device.simulated or held.keys() <= {*UNQUANTIZED}:
        return patcher
    refused = ((storage, device.refuses(storage)) for storage in held if storage in QUANTIZED_NAMES)
    if found := next((Message("{0} weights: {1}", storage, why) for storage, why in refused if why), ""):
        advice = "Load the file with Load Diffusion Model (Halfsafe), which unpacks such weights to 16 bit."
        raise StorageNotHeld(found, advice)
    if compute_device().type != "mps" or not any(weight.dtype in FP8_DTYPES for weight in patcher.model.parameters()):
        return patcher
    if bound := _bound_to_weights(patcher):
        problem = Message(
            "ComfyUI cannot cast this model's fp8 weights here, and {0} holds its modules.", listed(bound)
        )
        advice = (
            "Connect the node that does this behind Halfsafe, or load the file with Load Diffusion Model (Halfsafe)."
        )
        raise HalfsafeError(problem, advice)
    name = source_path_of(patcher) or type(patcher.model).__name__
    tensors = {key: tensor.cpu() for key, tensor in LiveWeights(patcher).tensors.items()}
    checkpoint = read_checkpoint(tensors, metadata_of(patcher, None, None), name)
    computed = cast(ComputeOption, name_of(activation_dtype(patcher)))
    clone = load_onto(patcher, checkpoint, "as_file", computed, Rules())
    clone.cached_patcher_init = (held_on_device, (patcher,))
    return clone


def offered_in_int8(patcher: ModelPatcher, rules: Rules) -> dict[str, tuple[str]]:
    """Make the ui output that says what ``storage=int8`` would give a model on this device, with a button that sets it.

    Empty where int8 is not faster than 16 bits, or not held; for a model that is quantized already, or packed in
    another loader's format; and for one whose storage cannot be changed.
    """
    device = current_device()
    sizes = bytes_by_storage(patcher)
    if why_int8_is_slow(device) or "int8" not in held_storages() or not sizes.keys() <= {*UNQUANTIZED}:
        return {}
    modules = dict(layers_of(patcher))
    plans = plan_storage(model_facts(patcher).layers, "int8", rules)
    made = {modules[name].weight: plan.storage for name, plan in plans.items() if plan.storage in QUANTIZED_NAMES}
    if not made or _bound_to_weights(patcher):
        return {}
    before = sum(sizes.values())
    weights = {plain_name(name): weight for name, weight in patcher.model.diffusion_model.named_parameters()}
    held = {name: StoredWeight(name, weight) for name, weight in weights.items()}
    of_file = narrower_in_file(patcher, held)
    after = 0
    for name, weight in weights.items():
        plain = weight.numel() * dtype_named(of_file[name]).itemsize if name in of_file else weight.nbytes
        after += FORMAT_OF_STORAGE[made[weight]].stored_bytes(*weight.shape) if weight in made else plain
    why, speed = device.reason("int8_matmul_gains"), published(device.profile.name, "int8", brief=True)
    told = joined([Message(IN_INT8, before=size_text(before), after=size_text(after)), why])
    return Result(told, text=told, use={"storage": "int8"}, sizes=(before, after), speed=speed).ui()


def _again(patcher: ModelPatcher, storage: StorageAtHand, rules: Rules, disable_dynamic: bool = False) -> ModelPatcher:
    """Quantize once more: ComfyUI's factory of a model for a static clone, or for another device."""
    return quantized_at_hand(patcher, storage, rules, disable_dynamic)[0]


def _refuse_bound_to_weights(patcher: ModelPatcher) -> None:
    """Raise HalfsafeError for code on a model that holds its modules, and would run them instead of new ones."""
    if bound := _bound_to_weights(patcher):
        problem = Message("storage cannot be changed here: {0} holds this model's modules.", listed(bound))
        raise HalfsafeError(problem, "Connect the node that does this behind Halfsafe, or use storage=as loaded.")


def _bound_to_weights(patcher: ModelPatcher) -> list[str]:
    bound = [name for name in patcher.object_patches if name.startswith(DIFFUSION_MODEL)]
    bound += [*patcher.injections]
    if is_compiled(patcher):
        bound.append("torch.compile")
    if is_on_several_devices(patcher):
        bound.append("MultiGPU")
    return bound
