"""Diffusion models through ComfyUI's own loaders, in the storage and compute dtype that a plan chose."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import comfy.ops
import comfy.quant_ops
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.dtypes import dtype_named
from ....precision.base.errors import CheckpointError
from ....precision.base.options import ComputeOption, StorageOption
from ....precision.formats.checkpoint import Checkpoint
from ....precision.plan.choice import ATTACHMENT, Choice, LoadRecord, frozen
from ....precision.plan.memory import plan_model
from ....precision.plan.rules import Rules
from ....precision.plan.storage import LoadPlan, bytes_below_16_bit, plan_load
from ..comfyui.attributes import (
    CAST_DTYPE,
    FULL_PRECISION,
    casts_weights,
    dtype_made_for,
    hold_in_dtype,
    quantization_format,
)
from ..comfyui.model_facts import held_storages
from ..comfyui.weights import NORMS
from ..compute.executor import set_compute
from ..lora.patcher import keep_low_rank_unmerged
from .detection import Detected, detect_model
from .devices import (
    compute_device,
    current_device,
    free_device_memory,
    free_host_memory,
    require_held_by_device,
    streams_weights,
)
from .files import open_model
from .lacking import lacking_tensors
from .tensors import load_tensors

CONNECTOR = re.compile(r"^(audio|video)_embeddings_connector\.")
"""Parts of LTX-2 that some publishers put into a file for its text encoder, which runs them
(``enable_compat_mode`` in comfy/text_encoders/lt.py)."""
CONNECTED = "a text encoder without them gives NaN"
logger = logging.getLogger("halfsafe")


def load_diffusion_model(
    path: str, storage: StorageOption, compute: ComputeOption, rules: Rules,
    whole: bool = False, disable_dynamic: bool = False,
) -> ModelPatcher:  # fmt: skip
    """Load the diffusion model in ``path``; also the factory ComfyUI calls to load it again.

    ``whole``: the file is a full checkpoint.

    Raises:
        HalfsafeError: the file cannot be read, is not a known model, or does not fit in memory.
    """
    patcher = load_weights(open_model(path), storage, compute, rules, whole, disable_dynamic)
    # A clone that is loaded again has this record, though ``auto`` might choose another storage then.
    chosen = patcher.attachments[ATTACHMENT].storage.used
    patcher.cached_patcher_init = (load_diffusion_model, (path, chosen, compute, rules, whole))
    return patcher


def load_weights(
    checkpoint: Checkpoint, storage: StorageOption, compute: ComputeOption, rules: Rules,
    whole: bool = False, disable_dynamic: bool = False,
) -> ModelPatcher:  # fmt: skip
    """Make a model of the weights of a file, which are not changed; see :func:`load_diffusion_model`."""
    detected = detect_model(checkpoint, only_diffusion_model=not whole)
    load = prepare(detected, storage, compute, rules, streams_weights(compute_device(), disable_dynamic))
    tensors = dict(load.tensors)
    plan = load.plan.compute
    options = {"metadata": detected.checkpoint.metadata, "disable_dynamic": disable_dynamic}
    options["model_options"] = {"dtype": load.dtype, "custom_operations": operations_for(detected, load)}
    with lacking_tensors(detected.checkpoint.path, complete=detected.complete) as lacking:
        if whole:
            patcher, *_ = comfy.sd.load_state_dict_guess_config(
                tensors, output_vae=False, output_clip=False, **options
            )
        else:
            patcher = comfy.sd.load_diffusion_model_state_dict(tensors, **options)
    lacks = lacking.refuse(patcher.model.diffusion_model, CONNECTOR, CONNECTED)
    hold_as_made(patcher)
    setattr(patcher.model, CAST_DTYPE, dtype_named(plan.activation_dtype))
    settle_quantized(patcher.model.diffusion_model, detected, load, plan.weight_dtype)
    if plan.is_safe:
        hold_norms_in_fp32(patcher.model.diffusion_model.modules())
    set_compute(patcher, plan)
    attach(patcher, record_of(detected, load, lacks), plan.choice)
    return patcher


@dataclass(frozen=True)
class PreparedLoad:
    """A model about to be loaded: its tensors in ComfyUI's format, and the dtype of those that are not quantized.

    ``reasons``: layer -> why its weight is not stored as decided.
    """

    plan: LoadPlan
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype
    notes: Sequence[str]
    reasons: Mapping[str, str]


def prepare(
    detected: Detected, storage: StorageOption, compute: ComputeOption, rules: Rules, streamed: bool = False
) -> PreparedLoad:
    """Plan a model and make its tensors.

    ``streamed``: ComfyUI keeps what stays as in the file there, and streams it to the device.

    Raises:
        NonFiniteWeight: a weight holds NaN or Inf.
        StorageNotHeld: this ComfyUI or the device cannot hold the weights as asked.
        MemoryShortage: the weights do not fit into the host's memory.
    """
    device, checkpoint, formats = current_device(), detected.checkpoint, held_storages()
    free = None if device.simulated else free_device_memory()
    host = free_host_memory() if streamed else None
    plan = plan_load(detected.facts, device, storage, compute, rules, free, formats, streamed_from=host)
    require_held_by_device((decision.storage for decision in plan.decisions.values()), compute_device())
    weights = plan_model(checkpoint, plan, detected.layer_names, detected.prefix, formats, assigned=streamed)
    tensors, notes = load_tensors(checkpoint, weights, read=not streamed)
    layers = detected.layer_names.items()
    reasons = {layer: weights.plans[name].reason for name, layer in layers if weights.plans[name].reason}
    return PreparedLoad(plan, tensors, dtype_named(weights.dtype), [*weights.notes, *notes], reasons)


def quantized_layers(tensors: dict[str, torch.Tensor], prefix: str) -> list[str]:
    names = [name for name in tensors if name.endswith(".comfy_quant") and name.startswith(prefix)]
    return [name[len(prefix) :].removesuffix(".comfy_quant") for name in names]


def operations_for(detected: Detected, load: PreparedLoad) -> Any:
    """Choose ComfyUI's operations. Its quantized ones give their dtype to weights that are not quantized as well."""
    quantized = bool(quantized_layers(load.tensors, detected.prefix))
    computed = load.dtype if quantized else dtype_named(load.plan.compute.activation_dtype)
    config = SimpleNamespace(quant_config={"mixed_ops": True} if quantized else None)
    return comfy.ops.pick_operations(load.dtype, computed, load_device=compute_device(), model_config=config)


def hold_as_made(patcher: ModelPatcher) -> None:
    """Cast the weights of a static model to the dtype that its layers were made for.

    While dynamic VRAM is on, ComfyUI gives a Linear or an Embedding a copy of the file's tensor in the file's dtype
    (``_lazy_load_from_state_dict`` in comfy/ops.py), also in a model that it does not stream, whose layers may not
    cast.
    """
    if patcher.is_dynamic() or not getattr(comfy.memory_management, "aimdo_enabled", False):
        return
    for layer in patcher.model.modules():
        for name, parameter in [*layer.named_parameters(recurse=False)]:
            dtype = dtype_made_for(layer, name)
            if dtype not in (None, parameter.dtype) and not isinstance(parameter, comfy.quant_ops.QuantizedTensor):
                hold_in_dtype(layer, name, dtype)


def settle_quantized(model: torch.nn.Module, detected: Detected, load: PreparedLoad, unpacked_to: str) -> None:
    """Have quantized weights unpack to a dtype, whatever others are held in, and multiply as planned.

    In inference mode, in which ComfyUI runs nodes, no data are copied.

    Raises:
        CheckpointError: ComfyUI does not hold a weight quantized that was given to it so.
    """
    layers, dtype = quantized_layers(load.tensors, detected.prefix), dtype_named(unpacked_to)
    modules = dict(model.named_modules()) if layers else {}
    for layer in layers:
        module = modules.get(detected.layer_names.get(f"{detected.prefix}{layer}.weight", ""), model)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, comfy.quant_ops.QuantizedTensor):
            problem = "is quantized, but ComfyUI did not load it as such"
            advice = "Keep this layer in 16 bit with a rule."
            raise CheckpointError(detected.checkpoint.path, problem, f"{layer}.weight", advice)
        # ComfyUI's fp8 matmul clips activations at 448 where a file has no scale for them.
        if quantization_format(module).startswith("float8"):
            setattr(module, FULL_PRECISION, True)
        if weight.dtype != dtype:
            module.weight = torch.nn.Parameter(weight.to(dtype=dtype), requires_grad=False)


def hold_norms_in_fp32(modules: Iterable[torch.nn.Module]) -> None:
    """Hold the parameters of norms over an fp32 stream in its dtype, which ComfyUI would cast at each call.

    They are the model's own, not a copy: LoRAs and hooks change them as any other weight.
    """
    for module in modules:
        if isinstance(module, NORMS) and casts_weights(module):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    hold_in_dtype(module, name, torch.float32)


def record_of(detected: Detected, load: PreparedLoad, notes: Sequence[str] = ()) -> LoadRecord:
    decisions, weights = load.plan.decisions.items(), detected.checkpoint.weights.items()
    inside = [weight for name, weight in weights if name.startswith(detected.prefix)]
    return LoadRecord(
        file=detected.checkpoint.path,
        dialects=detected.checkpoint.dialects,
        storage=load.plan.storage,
        reasons=frozen({**{name: decision.reason for name, decision in decisions if decision.reason}, **load.reasons}),
        kept=frozen({name: decision.reason for name, decision in decisions if decision.kept}),
        asked=frozen({name: decision.storage for name, decision in decisions if decision.storage != "as_file"}),
        without_effect=load.plan.without_effect,
        notes=(*detected.checkpoint.notes, *load.notes, *notes),
        native_fp8=detected.facts.native_fp8,
        below_16_bit=bytes_below_16_bit(inside) if detected.checkpoint.dialects else 0,
    )


def attach(patcher: ModelPatcher, record: LoadRecord, compute: Choice | None = None) -> None:
    """Keep with a loaded model what was decided for its file; its LoRAs stay out of 8-bit weights."""
    patcher.set_attachments(ATTACHMENT, record)
    keep_low_rank_unmerged(patcher)
    tell(record, compute)


def tell(record: LoadRecord, compute: Choice | None = None) -> None:
    """Log what was decided for a file."""
    storage, arithmetic = str(record.storage).removesuffix("."), f"; compute {compute}" if compute else ""
    logger.info("Halfsafe: %s: storage %s%s", record.file, storage, arithmetic)
    for note in record.notes:
        logger.info("Halfsafe: %s: %s", record.file, note)
    for idle in record.without_effect:
        logger.warning("Halfsafe: %s: %s has no effect: %s", record.file, idle.setting, idle.reason)
