"""Write a loaded model to a file, its LoRAs merged."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from typing import NamedTuple

import comfy.lora
import comfy.quant_ops
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.dtypes import QUANTIZED_NAMES, dtype_named
from ....precision.base.errors import HalfsafeError
from ....precision.base.layer_names import plain_name
from ....precision.base.message import Message
from ....precision.base.text import listed, size_text
from ....precision.files.safetensors_file import write_safetensors
from ....precision.formats.card import Provenance
from ....precision.formats.checkpoint import StoredWeight, read_checkpoint
from ....precision.formats.comfy_format import made_here, tensors_made
from ....precision.formats.layer_plan import AS_FILE, LayerPlan
from ....precision.formats.readers import MODEL, Reading
from ....precision.formats.registry import FORMAT_OF_STORAGE
from ....precision.make.calibrated import CalibratedRounding
from ....precision.make.calibration import CalibrationData
from ....precision.make.weight_errors import measuring_errors, told_again
from ....precision.plan.facts import LayerSpec
from ....precision.plan.layers import plan_storage, plan_weights, require_held
from ....precision.plan.nvfp4 import nvfp4_doubts
from ....precision.plan.rules import Rules
from ....precision.report.model_card import add_model_card
from ..comfyui.layers import DIFFUSION_MODEL, modules_of
from ..comfyui.model_facts import foreign_layers, held_storages, storage_of
from ..comfyui.page import show_progress
from ..lora.low_rank import is_left_out
from .detection import narrower_in_file
from .devices import compute_device, make_room_to_quantize
from .files import output_path
from .identity import marks_of, metadata_of, source_of_model
from .tensors import byte_progress

BYPASS = "bypass_lora"
NOT_SMALLER = "The weights take {0}, no less than in the model's file ({1})."
PACKED = "Layer '{0}' and {1} more are packed in another loader's format ({2})."
Unpack = Callable[[], torch.Tensor]
"""Return the values of a weight or bias in fp32."""
logger = logging.getLogger("halfsafe")


class Saved(NamedTuple):
    """A file that was written: its name below the output folder, its bytes, those of its weights by storage, and those
    ``before``, in the model's file; sentences on weights that were quantized ``again``, on its storage and its model
    card."""

    name: str
    bytes: int
    by_storage: Mapping[str, int]
    before: int
    again: Sequence[str] = ()
    notes: Sequence[str] = ()


class LiveWeights(Mapping[str, StoredWeight]):
    """The weights of a model in memory; a patched weight is computed in fp32 at each access.

    ``in_file``: name -> storage in the model's file, of the weights that ComfyUI holds in a wider one.
    ``patched``: the names of patched weights, ``unfit``: of those that all or some patches do not fit, and
    ``passed_over``: of those whose patches ComfyUI does not apply. ``tensors``: the tensors before patches.
    ``unpacking``: name -> function of the weights that another pack's layer unpacks.
    """

    def __init__(self, patcher: ModelPatcher):
        self._patcher = patcher
        self.unpacking = dict(_unpacking_layers(patcher.model))
        self.tensors = _unpatched(patcher, self.unpacking)
        read = read_checkpoint(self.tensors, {}, type(patcher.model).__name__)
        self.stored = dict(read.weights)
        self.in_file = narrower_in_file(patcher, self.stored)
        self.stored.update(marks_of(patcher))
        self.patched = set[str]()
        self.unfit = list[str]()
        self.passed_over = list[str]()
        beside_modules = _beside_modules(patcher.model.diffusion_model)
        for name, weight in self.stored.items():
            patches = patcher.patches.get(DIFFUSION_MODEL + name, [])
            if patches and name in beside_modules:
                self.passed_over.append(name)
                continue
            left_out = [is_left_out(patch, weight.shape) for patch in patches]
            if any(left_out):
                self.unfit.append(name)
            if not all(left_out):
                self.patched.add(name)

    def __getitem__(self, name: str) -> StoredWeight:
        weight = self.stored[name]
        key = DIFFUSION_MODEL + name
        if name in self.unpacking:
            weight = weight.with_values(self.unpacking[name]())
        weight = weight.moved("cpu")
        if name not in self.patched:
            return weight
        base = weight.dequantize(torch.float32).clone()
        return weight.with_values(comfy.lora.calculate_weight(self._patcher.patches[key], base, key))

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of each weight."""
        return {name: weight.shape for name, weight in self.stored.items()}

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)

    def keep_storage(self, name: str, quantizable: bool) -> str:
        """Return the storage to request so that a weight keeps its storage: a patched or unpacked weight is made in
        fp32, and ComfyUI may hold a weight in a wider dtype than its file.

        A weight in a storage that nothing here writes is rounded by comfy-kitchen at once.
        """
        weight = self.stored[name]
        if name in self.in_file:
            return self.in_file[name]
        if name not in self.patched and name not in self.unpacking:
            return AS_FILE
        if weight.format.can_write:
            fits = quantizable and weight.storage in FORMAT_OF_STORAGE
            return weight.storage if fits or not weight.quantized else "bf16"
        held = comfy.utils.get_attr(self._patcher.model, DIFFUSION_MODEL + name)
        merged = self[name].data.to(compute_device(), held.dtype)
        parts = held.requantize_from_float(merged, scale="recalculate").state_dict(name)
        tensors = {leaf: parts.get(f"{weight.layer}.{leaf}", tensor) for leaf, tensor in weight.tensors.items()}
        self.stored[name] = replace(weight, data=parts[name], tensors=tensors).moved("cpu")
        self.patched.remove(name)
        return AS_FILE


def _unpacking_layers(model) -> Iterator[tuple[str, Unpack]]:
    """Yield (name, function) for each weight and bias that a layer of ComfyUI-GGUF unpacks itself,
    by its name in the diffusion model. Its patches, which ComfyUI-GGUF keeps on the tensor while
    the model is loaded, are left out."""
    for name, module in modules_of(model).items():
        get_weight = getattr(module, "get_weight", None)
        if get_weight is None or not getattr(module, "is_ggml_quantized", bool)():
            continue
        for leaf, tensor in module.named_parameters(recurse=False):
            yield f"{name}.{leaf}", partial(_unpacked_by, get_weight, tensor)


def _unpacked_by(get_weight: Callable, tensor: torch.Tensor) -> torch.Tensor:
    patches, tensor.patches = getattr(tensor, "patches", []), []
    try:
        return get_weight(tensor, torch.float32).as_subclass(torch.Tensor)
    finally:
        tensor.patches = patches


def _beside_modules(network: torch.nn.Module) -> set[str]:
    """Return the names of parameters that ComfyUI does not patch, as Wan's modulations: of modules that hold modules
    with parameters (``_load_list`` in comfy/model_patcher.py). A file has them as the picture has."""
    names: set[str] = set()
    for prefix, module in network.named_modules():
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if own and len(own) < sum(1 for _ in module.parameters()):
            names |= {plain_name(f"{prefix}.{name}".removeprefix(".")) for name in own}
    return names


def _unpatched(patcher: ModelPatcher, unpacking: Mapping[str, Unpack]) -> dict[str, torch.Tensor]:
    """Return the diffusion model's tensors before any LoRA, wherever the model is loaded; for those that their layers
    unpack, a tensor without data of the same shape."""
    with patcher.use_ejected():
        tensors = patcher.model.diffusion_model.state_dict()
    # What ComfyUI-GGUF's layers give here is for the estimate of memory alone (``ggml_save_to_state_dict`` in ops.py).
    layers = {name.rpartition(".")[0] for name in unpacking}
    made_up = {f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias", "temp.weight")}
    tensors = {name: tensor for name, tensor in tensors.items() if name not in made_up}
    for name in unpacking:
        shape = tuple(comfy.utils.get_attr(patcher.model.diffusion_model, name).shape)
        tensors[name] = torch.empty(shape, dtype=torch.float16, device="meta")
    # ComfyUI-GGUF's GGMLTensor makes no tensor of a size that is a number (its new_empty in ops.py).
    state = {plain_name(name): tensor.detach().as_subclass(torch.Tensor) for name, tensor in tensors.items()}
    for key, backup in patcher.backup.items():
        if key.startswith(DIFFUSION_MODEL):
            name = plain_name(key.removeprefix(DIFFUSION_MODEL))
            weight = backup.weight
            quantized = isinstance(weight, comfy.quant_ops.QuantizedTensor)
            state.update(weight.state_dict(name) if quantized else {name: weight})
    return state


def save_model(
    patcher: ModelPatcher,
    filename_prefix: str,
    storage: str,
    rules: Rules,
    prompt: dict | None,
    extra: dict | None,
    calibration: CalibrationData | None = None,
    card: bool = True,
) -> Saved:
    """Save the diffusion model below ComfyUI's output folder.

    ``calibration``: of this model; its quantized weights are rounded by it. ``card``: write a model card beside the
    file.

    Raises:
        HalfsafeError: the disk is full, the model holds NaN or Inf, it has a LoRA that cannot be merged, or the
            calibration is of another model.
    """
    if BYPASS in patcher.injections:
        raise HalfsafeError(
            ("A bypass LoRA is applied at run time, so there is nothing merged to save."), "Use a normal LoRA loader."
        )
    if not filename_prefix.strip("/ "):
        raise HalfsafeError("The filename prefix is empty.", "Give the file a name, such as diffusion_models/my_model.")
    path, name = output_path(filename_prefix)
    if calibration:
        make_room_to_quantize()
    weights, plans, merged = plan_live_weights(patcher, name, AS_FILE if storage == "auto" else storage, rules)
    before = _bytes_in_file(weights)
    metadata = metadata_of(patcher, prompt, extra)
    lines = [str(rule) for rule in rules.own]
    provenance = Provenance(source_of_model(patcher), storage, rules.names, lines, len(merged), unfit=weights.unfit)
    rounding = _rounding(patcher, calibration, weights, plans, provenance.source) if calibration else None
    provenance = replace(provenance, calibration=rounding.noted() if rounding else {})
    formats = Counter(FORMAT_OF_STORAGE[plan.stored] for plan in plans.values() if plan.declared)
    readings = [Reading(MODEL, formats)] if formats else []
    metadata |= provenance.card_entry(plans.values(), readings)
    made = (rounding.made if rounding else made_here)(weights, plans, name)
    errors: dict[str, float] = {}
    made = measuring_errors(made, plans, errors, all_changed=card)
    specs = [spec for plan in plans.values() for spec in plan.specs]
    progress = byte_progress(weights.stored.values())
    write_safetensors(path, specs, tensors_made(made, lambda name, size: progress(size)), metadata)
    for reading in readings:
        logger.info("Halfsafe: %s: %s", name, reading.text)
    by_storage: Counter[str] = Counter()
    for plan in plans.values():
        by_storage[plan.stored] += plan.bytes
    size = os.path.getsize(path)
    again, doubts = told_again(plans, errors, merged), nvfp4_doubts(weights.shapes, plans.values())
    rounded = [rounding.text()] if rounding else []
    told = [*doubts, *rounded, *_not_smaller(weights, plans, before)]
    if card:
        notes = [*again, *doubts]
        told.append(add_model_card(path, provenance, "", plans, errors, "diffusion_models", readings, notes))
    for note in (*again, *told):
        logger.info("Halfsafe: %s: %s", name, note)
    return Saved(name, size, dict(by_storage.most_common()), before, again, told)


def _bytes_in_file(weights: LiveWeights) -> int:
    """Return what the weights take in the model's file, or, if that is not known, in memory."""
    held = sum(weight.bytes for name, weight in weights.stored.items() if name not in weights.in_file)
    return held + sum(dtype_named(own).itemsize * prod(weights.shapes[name]) for name, own in weights.in_file.items())


def _not_smaller(weights: LiveWeights, plans: Mapping[str, LayerPlan], before: int) -> list[str]:
    """Return a sentence if newly quantized weights and all others take no less than ``before``."""
    new = any(plan.stored in QUANTIZED_NAMES and not weights.stored[name].quantized for name, plan in plans.items())
    after = sum(plan.bytes for plan in plans.values())
    return [Message(NOT_SMALLER, size_text(after), size_text(before))] if new and after >= before else []


def plan_live_weights(
    patcher: ModelPatcher, name: str, storage: str, rules: Rules, keeps_quantized: bool = False
) -> tuple[LiveWeights, Mapping[str, LayerPlan], set[str]]:
    """Plan the weights of a model in memory in a storage, patches merged. Returns the weights, their plans and the
    names of patched weights.

    ``name``: the model, in messages. ``keeps_quantized``: layers that are quantized already keep their storage.

    Raises:
        HalfsafeError: the weights are packed in another loader's format.
        StorageNotHeld: this ComfyUI does not support a storage.
    """
    _refuse_foreign(patcher)
    weights = LiveWeights(patcher)
    merged = {*weights.patched}
    if weights.passed_over:
        over = len(weights.passed_over), listed(weights.passed_over)
        logger.warning(
            "Halfsafe: %s: ComfyUI does not patch %d weights, so their patches are left out: %s", name, *over
        )
    if weights.unfit:
        unfit = len(weights.unfit), listed(weights.unfit)
        logger.warning("Halfsafe: %s: patches that do not fit %d weights are left out: %s", name, *unfit)
    layers = plan_storage(_layers(patcher, weights), storage, rules)
    require_held((own.storage for own in layers.values()), held_storages())
    by_name = {f"{layer}.weight": own for layer, own in layers.items()}
    if keeps_quantized:
        quantized = (tensor for tensor in by_name if weights.stored[tensor].quantized)
        by_name |= {tensor: replace(by_name[tensor], storage=AS_FILE) for tensor in quantized}
    for tensor in weights.stored:
        own = by_name.get(tensor, LayerPlan())
        if own.storage == AS_FILE:
            by_name[tensor] = replace(own, storage=weights.keep_storage(tensor, own.quantizable))
    plans = plan_weights(weights, by_name, name)
    network = patcher.model.diffusion_model
    before = {tensor: weights.stored[tensor].storage for tensor in merged if weights.stored[tensor].quantized}
    before |= {tensor: storage_of(comfy.utils.get_attr(network, tensor)) for tensor in weights.unpacking}
    again = {tensor: storage for tensor, storage in before.items() if plans[tensor].declared}
    return weights, plans | {tensor: replace(plans[tensor], again=own) for tensor, own in again.items()}, merged


def _rounding(
    patcher: ModelPatcher, calibration: CalibrationData, weights: LiveWeights, plans: Mapping[str, LayerPlan], source
) -> CalibratedRounding:
    name = str(source.get("file") or type(patcher.model).__name__)
    rounding = CalibratedRounding(calibration, weights.stored, plans, source, name, device=compute_device())
    started = rounding.start()
    logger.info("Halfsafe: %s", started)
    show_progress(started)
    return rounding


def _refuse_foreign(patcher: ModelPatcher) -> None:
    unpacking = {name for name, _ in _unpacking_layers(patcher.model)}
    foreign = {name: cls for name, cls in foreign_layers(patcher).items() if f"{name}.weight" not in unpacking}
    if foreign:
        first, cls = next(iter(foreign.items()))
        problem = Message(PACKED, first, len(foreign) - 1, cls)
        raise HalfsafeError(problem, "Load the model from a .safetensors file and save that.")


def _layers(patcher: ModelPatcher, weights: LiveWeights) -> list[LayerSpec]:
    classes = {name: type(module).__name__ for name, module in modules_of(patcher.model).items()}
    stored = (
        (name.removesuffix(".weight"), weight) for name, weight in weights.stored.items() if name.endswith(".weight")
    )
    return [LayerSpec(name, classes[name], weight.shape) for name, weight in stored if name in classes]
