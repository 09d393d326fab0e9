"""Diffusion models through ComfyUI's own loaders, in the storage and compute dtype that a plan chose."""

from __future__ import annotations

import logging
from collections import Counter
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
from ....precision.formats.checkpoint import StoredWeight
from ....precision.formats.comfy_format import can_be_quantized
from ....precision.formats.encodings import SINCE
from ....precision.plan.choice import LoadRecord, frozen
from ....precision.plan.rules import Rules
from ....precision.plan.storage import LoadPlan, plan_load, weight_bytes
from ..run.compute import set_compute
from ..run.patcher import keep_low_rank_beside
from .detection import Detected, detect_model
from .devices import compute_device, current_device, free_device_memory, free_host_memory
from .files import open_model
from .progress import byte_progress

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

ATTACHMENT = "halfsafe"
logger = logging.getLogger("halfsafe")


def load_diffusion_model(path: str, storage: str, compute: str, rules: Rules, disable_dynamic: bool = False) -> ModelPatcher:
    """Load the diffusion model in ``path``; also the factory ComfyUI calls to load it again.

    Raises:
        HalfsafeError: the file cannot be read, is not a known model, or does not fit in memory.
    """
    detected = detect_model(open_model(path), only_diffusion_model=True)
    plan, tensors, notes = _prepare(detected, storage, compute, rules)
    patcher = comfy.sd.load_diffusion_model_state_dict(
        dict(tensors),
        model_options=_model_options(detected, plan, tensors),
        metadata=detected.checkpoint.metadata,
        disable_dynamic=disable_dynamic,
    )
    _finish(patcher, detected, plan, tensors, notes)
    patcher.cached_patcher_init = (load_diffusion_model, (path, storage, compute, rules))
    return patcher


def load_checkpoint_model(path: str, storage: str, compute: str, rules: Rules, disable_dynamic: bool = False) -> ModelPatcher:
    """Load the diffusion model of a full checkpoint; see :func:`load_diffusion_model`."""
    detected = detect_model(open_model(path), only_diffusion_model=False)
    plan, tensors, notes = _prepare(detected, storage, compute, rules)
    patcher, *_ = comfy.sd.load_state_dict_guess_config(
        dict(tensors),
        output_vae=False,
        output_clip=False,
        model_options=_model_options(detected, plan, tensors),
        metadata=detected.checkpoint.metadata,
        disable_dynamic=disable_dynamic,
    )
    _finish(patcher, detected, plan, tensors, notes)
    patcher.cached_patcher_init = (load_checkpoint_model, (path, storage, compute, rules))
    return patcher


def _prepare(detected: Detected, storage: str, compute: str, rules: Rules) -> tuple[LoadPlan, dict, list[str]]:
    device = current_device()
    free = None if device.simulated else free_device_memory()
    plan = plan_load(detected.facts, device, storage, compute, rules, free)
    needed = weight_bytes(detected.checkpoint, plan, detected.prefix)
    require_memory(needed, f"Loading {detected.checkpoint.path}", free_host_memory())
    progress = byte_progress(detected.checkpoint.weights.values())
    tensors, notes = comfy_state.state_dict(detected.checkpoint, _storages(detected, plan), progress)
    return plan, tensors, [*_too_new_notes(detected, plan), *(f"{name}: {note}" for name, note in notes)]


def _storages(detected: Detected, plan: LoadPlan) -> dict[str, str]:
    """Choose the storage of each weight in the file; fp8 weights that ComfyUI cannot hold go to the compute dtype."""
    quantizable = {layer.name for layer in detected.facts.layers if can_be_quantized(layer.cls, len(layer.shape))}

    def storage(name: str, weight: StoredWeight) -> str:
        layer = detected.layer_names.get(name, "")
        wanted = plan.decisions[layer].storage if layer in plan.decisions else "as_file"
        if weight.encoding is None and weight.data.dtype in FP8_DTYPES:
            return wanted if layer in quantizable or not name.startswith(detected.prefix) else plan.compute.weight_dtype
        if wanted == "as_file" and _too_new(weight):
            return plan.compute.weight_dtype
        return comfy_state.storage_to_make(weight, wanted)

    return {weight.layer: storage(name, weight) for name, weight in detected.checkpoint.weights.items()}


def _too_new(weight: StoredWeight) -> str:
    """The format of a weight that this ComfyUI does not have, whose own loader fails on it with a KeyError; or ""."""
    declared = "" if weight.encoding is None else weight.encoding.settings["format"]
    return "" if declared in comfy.quant_ops.QUANT_ALGOS else declared


def _too_new_notes(detected: Detected, plan: LoadPlan) -> list[str]:
    counts = Counter(_too_new(weight) for weight in detected.checkpoint.weights.values())
    unpacked = f"were unpacked to {plan.compute.weight_dtype}"
    return [f"{n} layers in {name}, which ComfyUI has from {SINCE[name]} on, {unpacked}." for name, n in counts.items() if name]


def _quantized_layers(tensors: dict[str, torch.Tensor], prefix: str) -> list[str]:
    names = (name[len(prefix) :] for name in tensors if name.startswith(prefix))
    return [name.removesuffix(".comfy_quant") for name in names if name.endswith(".comfy_quant")]


def _model_options(detected: Detected, plan: LoadPlan, tensors: dict[str, torch.Tensor]) -> dict:
    quantized = bool(_quantized_layers(tensors, detected.prefix))
    dtype = dtype_named(plan.compute.weight_dtype) if quantized else _unquantized_dtype(detected, plan)
    computed = dtype if quantized else dtype_named(plan.compute.activation_dtype)
    config = SimpleNamespace(quant_config={"mixed_ops": True} if quantized else None)
    operations = comfy.ops.pick_operations(dtype, computed, load_device=compute_device(), model_config=config)
    return {"dtype": dtype, "custom_operations": operations}


def _unquantized_dtype(detected: Detected, plan: LoadPlan) -> torch.dtype:
    """Choose the dtype of a model without quantized layers: never fp8 without a scale, nor fp16 where a value exceeds it."""
    used = detected.facts.file_dtype if plan.storage.used == "as_file" else plan.storage.used
    if used == "fp16" and comfy_state.first_exceeding_fp16(detected.checkpoint, detected.prefix):
        return torch.bfloat16
    return dtype_named(plan.compute.weight_dtype if used.startswith("fp8") or used in QUANTIZED_NAMES else used)


def _finish(
    patcher: ModelPatcher, detected: Detected, plan: LoadPlan, tensors: dict[str, torch.Tensor], notes: list[str]
) -> None:
    model = patcher.model
    model.manual_cast_dtype = dtype_named(plan.compute.activation_dtype)
    modules = dict(model.diffusion_model.named_modules())
    _check_quantized(detected, modules, _quantized_layers(tensors, detected.prefix))
    _compute_in_full_precision(modules)
    set_compute(patcher, plan.compute)
    keep_low_rank_beside(patcher)
    notes = [*_weightless_note(detected), *notes]
    patcher.set_attachments(ATTACHMENT, _record(detected, plan, notes))
    storage = str(plan.storage).removesuffix(".")
    logger.info("Halfsafe: %s: storage %s; compute %s", detected.checkpoint.path, storage, plan.compute.choice)


def _weightless_note(detected: Detected) -> list[str]:
    if not detected.missing:
        return []
    names = ", ".join(detected.missing)
    note = f"The file has no weight for {len(detected.missing)} layers, which hold arbitrary numbers: {names}."
    logger.warning("Halfsafe: %s: %s", detected.checkpoint.path, note)
    return [note]


def _check_quantized(detected: Detected, modules: dict, layers: list[str]) -> None:
    for layer in layers:
        module = modules.get(detected.layer_names.get(f"{detected.prefix}{layer}.weight", ""))
        if not isinstance(getattr(module, "weight", None), comfy.quant_ops.QuantizedTensor):
            problem = "is quantized, but ComfyUI did not load it as such"
            raise CheckpointError(detected.checkpoint.path, problem, f"{layer}.weight", "Keep this layer in 16 bit with a rule.")


def _compute_in_full_precision(modules: dict) -> None:
    """Turn ComfyUI's own fp8 matmul off: it clips activations at 448 where a file has no scale for them. Ours is planned."""
    for module in modules.values():
        if str(getattr(module, "quant_format", None)).startswith("float8"):
            module._full_precision_mm = True


def _record(detected: Detected, plan: LoadPlan, notes: list[str]) -> LoadRecord:
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
