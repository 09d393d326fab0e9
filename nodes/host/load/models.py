"""Diffusion models through ComfyUI's own loaders, in the storage and compute dtype that a plan chose."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import comfy.ops
import comfy.quant_ops
import comfy.sd
import torch

from ....precision.devices.memory import require_memory
from ....precision.dtypes import FP8_DTYPES, QUANTIZED_NAMES, dtype_named
from ....precision.errors import CheckpointError
from ....precision.formats import comfy_state
from ....precision.formats.checkpoint import Checkpoint, StoredWeight
from ....precision.formats.comfy_format import can_be_quantized, exceeds_fp16
from ....precision.formats.registry import FORMATS
from ....precision.plan.choice import ATTACHMENT, LoadRecord, frozen
from ....precision.plan.held import held_dtype, unpacked_dtype, weight_bytes
from ....precision.plan.rules import Rules
from ....precision.plan.storage import LoadPlan, plan_load
from ..lora.beside import keep_low_rank_beside
from ..run.compute import set_compute
from .detection import Detected, detect_model
from .devices import compute_device, current_device, free_device_memory, free_host_memory
from .files import check_quantized_shapes, of_fitting_shapes, open_model
from .progress import byte_progress

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

logger = logging.getLogger("halfsafe")


def load_diffusion_model(path: str, storage: str, compute: str, rules: Rules, disable_dynamic: bool = False) -> ModelPatcher:
    """Load the diffusion model in ``path``; also the factory ComfyUI calls to load it again.

    Raises:
        HalfsafeError: the file cannot be read, is not a known model, or does not fit in memory.
    """
    patcher = load_weights(open_model(path), storage, compute, rules, disable_dynamic)
    patcher.cached_patcher_init = (load_diffusion_model, (path, storage, compute, rules))
    return patcher


def load_weights(checkpoint: Checkpoint, storage: str, compute: str, rules: Rules, disable_dynamic: bool = False) -> ModelPatcher:
    """Make a model of the weights of a diffusion model, which are not changed; see :func:`load_diffusion_model`."""
    detected = detect_model(checkpoint, only_diffusion_model=True)
    load = prepare(detected, storage, compute, rules)
    with of_fitting_shapes(checkpoint.path):
        patcher = comfy.sd.load_diffusion_model_state_dict(
            dict(load.tensors),
            model_options=operations_for(detected, load),
            metadata=detected.checkpoint.metadata,
            disable_dynamic=disable_dynamic,
        )
    _finish(patcher, detected, load)
    return patcher


def load_checkpoint_model(path: str, storage: str, compute: str, rules: Rules, disable_dynamic: bool = False) -> ModelPatcher:
    """Load the diffusion model of a full checkpoint; see :func:`load_diffusion_model`."""
    detected = detect_model(open_model(path), only_diffusion_model=False)
    load = prepare(detected, storage, compute, rules)
    with of_fitting_shapes(path):
        patcher, *_ = comfy.sd.load_state_dict_guess_config(
            dict(load.tensors),
            output_vae=False,
            output_clip=False,
            model_options=operations_for(detected, load),
            metadata=detected.checkpoint.metadata,
            disable_dynamic=disable_dynamic,
        )
    _finish(patcher, detected, load)
    patcher.cached_patcher_init = (load_checkpoint_model, (path, storage, compute, rules))
    return patcher


@dataclass(frozen=True)
class PreparedLoad:
    """A model about to be loaded: its tensors in ComfyUI's format, and the dtype of those that are not quantized."""

    plan: LoadPlan
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype
    notes: list[str]


def prepare(detected: Detected, storage: str, compute: str, rules: Rules) -> PreparedLoad:
    device, checkpoint = current_device(), detected.checkpoint
    free = None if device.simulated else free_device_memory()
    plan = plan_load(detected.facts, device, storage, compute, rules, free)
    storages = _storages(detected, plan)
    plans = comfy_state.plan_weights(checkpoint.weights, storages, checkpoint.path)
    inside = {name: weight for name, weight in checkpoint.weights.items() if name.startswith(detected.prefix)}
    made = {name: plans[name].storage for name in inside}
    held = held_dtype(inside, made, plan)
    require_memory(weight_bytes(inside, made, held), f"Loading {checkpoint.path}", free_host_memory())
    kept = (weight for name, weight in inside.items() if made[name] not in QUANTIZED_NAMES and not weight.encoding)
    if held == "fp16" and any(exceeds_fp16(weight, checkpoint.path) for weight in kept):
        held = "bf16"
    tensors, otherwise = comfy_state.state_dict(checkpoint, storages, byte_progress(checkpoint.weights.values()), plans)
    notes = [*_too_new_notes(detected, plan), *(f"{name}: {note}" for name, note in otherwise)]
    return PreparedLoad(plan, tensors, dtype_named(held), notes)


def _storages(detected: Detected, plan: LoadPlan) -> dict[str, str]:
    """Choose the storage of each weight in the file; those in fp8 that ComfyUI cannot hold go to 16 bit."""
    quantizable = {layer.name for layer in detected.facts.layers if can_be_quantized(layer.cls, len(layer.shape))}

    def storage(name: str, weight: StoredWeight) -> str:
        layer = detected.layer_names.get(name, "")
        wanted = plan.decisions[layer].storage if layer in plan.decisions else "as_file"
        if weight.encoding is None and weight.data.dtype in FP8_DTYPES:
            return wanted if layer in quantizable or not name.startswith(detected.prefix) else unpacked_dtype(plan)
        if wanted == "as_file" and _too_new(weight):
            return unpacked_dtype(plan)
        return comfy_state.storage_to_make(weight, wanted)

    return {weight.layer: storage(name, weight) for name, weight in detected.checkpoint.weights.items()}


def _too_new(weight: StoredWeight) -> str:
    """The format of a weight that this ComfyUI does not have, whose own loader fails on it with a KeyError; or ""."""
    declared = "" if weight.encoding is None else weight.encoding.format
    return "" if declared in comfy.quant_ops.QUANT_ALGOS else declared


def _too_new_notes(detected: Detected, plan: LoadPlan) -> list[str]:
    counts = Counter(_too_new(weight) for weight in detected.checkpoint.weights.values())
    unpacked = f"were unpacked to {unpacked_dtype(plan)}"
    return [f"{n} layers in {name}, which ComfyUI has from {FORMATS[name].since} on, {unpacked}." for name, n in counts.items() if name]


def quantized_layers(tensors: dict[str, torch.Tensor], prefix: str) -> list[str]:
    names = (name[len(prefix) :] for name in tensors if name.startswith(prefix))
    return [name.removesuffix(".comfy_quant") for name in names if name.endswith(".comfy_quant")]


def operations_for(detected: Detected, load: PreparedLoad) -> dict:
    """Choose ComfyUI's operations. Its quantized ones give their dtype to weights that are not quantized as well."""
    quantized = bool(quantized_layers(load.tensors, detected.prefix))
    computed = load.dtype if quantized else dtype_named(load.plan.compute.activation_dtype)
    config = SimpleNamespace(quant_config={"mixed_ops": True} if quantized else None)
    operations = comfy.ops.pick_operations(load.dtype, computed, load_device=compute_device(), model_config=config)
    return {"dtype": load.dtype, "custom_operations": operations}


def _finish(patcher: ModelPatcher, detected: Detected, load: PreparedLoad) -> None:
    model, plan = patcher.model, load.plan
    model.manual_cast_dtype = dtype_named(plan.compute.activation_dtype)
    modules = dict(model.diffusion_model.named_modules())
    check_quantized(detected, modules, quantized_layers(load.tensors, detected.prefix))
    check_quantized_shapes(model.diffusion_model, detected.checkpoint.path)
    compute_in_full_precision(modules)
    unpack_to(modules, dtype_named(plan.compute.weight_dtype))
    set_compute(patcher, plan.compute)
    keep_low_rank_beside(patcher)
    notes = [*weightless_note(detected), *load.notes]
    patcher.set_attachments(ATTACHMENT, record_of(detected, plan, notes))
    storage = str(plan.storage).removesuffix(".")
    logger.info("Halfsafe: %s: storage %s; compute %s", detected.checkpoint.path, storage, plan.compute.choice)


def weightless_note(detected: Detected) -> list[str]:
    if not detected.missing:
        return []
    names = ", ".join(detected.missing)
    note = f"The file has no weight for {len(detected.missing)} layers, which hold arbitrary numbers: {names}."
    logger.warning("Halfsafe: %s: %s", detected.checkpoint.path, note)
    return [note]


def check_quantized(detected: Detected, modules: dict, layers: list[str]) -> None:
    for layer in layers:
        module = modules.get(detected.layer_names.get(f"{detected.prefix}{layer}.weight", ""))
        if not isinstance(getattr(module, "weight", None), comfy.quant_ops.QuantizedTensor):
            problem = "is quantized, but ComfyUI did not load it as such"
            raise CheckpointError(detected.checkpoint.path, problem, f"{layer}.weight", "Keep this layer in 16 bit with a rule.")


def compute_in_full_precision(modules: dict) -> None:
    """Turn ComfyUI's own fp8 matmul off: it clips activations at 448 where a file has no scale for them. Ours is planned."""
    for module in modules.values():
        if str(getattr(module, "quant_format", None)).startswith("float8"):
            module._full_precision_mm = True


def unpack_to(modules: dict, dtype: torch.dtype) -> None:
    """Have quantized weights unpack to ``dtype``, whatever those that are not quantized are held in. Copies no data."""
    for module in modules.values():
        weight = getattr(module, "weight", None)
        if isinstance(weight, comfy.quant_ops.QuantizedTensor) and weight.dtype != dtype:
            module.weight = torch.nn.Parameter(weight.to(dtype=dtype), requires_grad=False)


def record_of(detected: Detected, plan: LoadPlan, notes: list[str]) -> LoadRecord:
    decisions = plan.decisions.items()
    return LoadRecord(
        file=detected.checkpoint.path,
        dialect=detected.checkpoint.dialect,
        storage=plan.storage,
        reasons=frozen({name: decision.reason for name, decision in decisions if decision.reason}),
        kept=frozen({name: decision.reason for name, decision in decisions if decision.kept}),
        asked=frozen({name: decision.storage for name, decision in decisions if decision.storage != "as_file"}),
        without_effect=plan.without_effect,
        notes=(*detected.checkpoint.notes, *notes),
        metadata=frozen(detected.checkpoint.metadata),
    )
