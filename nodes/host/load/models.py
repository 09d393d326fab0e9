"""Load diffusion models through ComfyUI's own loaders, in the planned storage and compute dtype."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import comfy.ops
import comfy.quant_ops
import comfy.sd
import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.dtypes import dtype_named
from ....precision.base.errors import CheckpointError
from ....precision.base.options import ComputeOption, StorageOption
from ....precision.formats.checkpoint import Checkpoint
from ....precision.plan.choice import Choice
from ....precision.plan.compute import weight_dtype
from ....precision.plan.facts import ModelFacts
from ....precision.plan.layers import LoadTarget
from ....precision.plan.load import ModelPlan, plan_load
from ....precision.plan.rules import Rules
from ..comfyui.attributes import (
    CAST_DTYPE,
    FULL_PRECISION,
    casts_weights,
    dtype_made_for,
    hold_in_dtype,
    quantization_format,
)
from ..comfyui.layers import activation_dtype
from ..comfyui.model_facts import held_storages, keep_record, record_of
from ..comfyui.weights import NORMS
from ..compute.executor import Compute, set_compute
from ..lora.patcher import keep_low_rank_unmerged
from .detection import detect_model
from .devices import (
    compute_device,
    current_device,
    free_device_memory,
    free_host_memory,
    streams_weights,
)
from .files import open_model
from .lacking import lacking_tensors
from .tensors import load_tensors

CONNECTOR = re.compile(r"^(audio|video)_embeddings_connector\.")
"""Parts of LTX-2 that some publishers put into a file for its text encoder, which runs them
(``enable_compat_mode`` in comfy/text_encoders/lt.py)."""
CONNECTED = "a text encoder without them gives NaN"
OF_WEIGHTS = (
    "size", "parent", "patches_uuid", "force_cast_weights", "is_injected", "current_hooks", "hook_backup",
    "hook_patches_backup", "cached_hook_patches", "clone_base_uuid", "is_multigpu_base_clone", "cached_patcher_init",
)  # fmt: skip
"""What a ModelPatcher carries of the weights that it patches, beside the model and the backups of ``model_override``:
``clone`` of comfy/model_patcher.py copies it, because its clones have the same weights."""
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
    patcher = _load_weights(open_model(path), storage, compute, rules, whole, disable_dynamic)
    # A clone that is loaded again has this record, though ``auto`` might choose another storage then.
    chosen = cast(ModelPlan, record_of(patcher)).storage.used
    patcher.cached_patcher_init = (load_diffusion_model, (path, chosen, compute, rules, whole))
    return patcher


def _load_weights(
    checkpoint: Checkpoint, storage: StorageOption, compute: ComputeOption, rules: Rules,
    whole: bool = False, disable_dynamic: bool = False,
) -> ModelPatcher:  # fmt: skip
    """Make a model of the weights of a file, which are not changed; see :func:`load_diffusion_model`."""
    facts = detect_model(checkpoint, only_diffusion_model=not whole)
    plan, tensors = prepare(facts, storage, compute, rules, streams_weights(compute_device(), disable_dynamic))
    arithmetic = plan.compute
    options = {"metadata": checkpoint.metadata, "disable_dynamic": disable_dynamic}
    options["model_options"] = {"dtype": dtype_named(plan.dtype), "custom_operations": operations_for(facts, plan)}
    with lacking_tensors(checkpoint.path, complete=facts.complete) as lacking:
        if whole:
            patcher, *_ = comfy.sd.load_state_dict_guess_config(tensors, output_vae=False, output_clip=False, **options)
        else:
            patcher = comfy.sd.load_diffusion_model_state_dict(tensors, **options)
    lacks = lacking.refuse(patcher.model.diffusion_model, CONNECTOR, CONNECTED)
    hold_as_made(patcher)
    setattr(patcher.model, CAST_DTYPE, dtype_named(arithmetic.activation_dtype))
    settle_quantized(patcher.model.diffusion_model, facts, plan)
    if arithmetic.is_safe:
        hold_norms_in_fp32(patcher.model.diffusion_model.modules())
    set_compute(patcher, arithmetic)
    attach(patcher, replace(plan, notes=(*plan.notes, *lacks)), arithmetic.choice)
    return patcher


def prepare(
    facts: ModelFacts, storage: StorageOption, compute: ComputeOption, rules: Rules, streamed: bool = False
) -> tuple[ModelPlan, dict[str, torch.Tensor]]:
    """Plan a model and make its tensors in ComfyUI's format.

    ``streamed``: unchanged weights stay memory-mapped; ComfyUI streams them to the device.

    Raises:
        NonFiniteWeight: a weight holds NaN or Inf.
        StorageNotHeld: this ComfyUI or the device cannot hold the weights as requested.
        MemoryShortage: the weights do not fit into the host's memory.
    """
    device = current_device()
    host = free_host_memory() if streamed else None
    free = None if device.simulated else free_device_memory()
    plan = plan_load(facts, storage, compute, rules, LoadTarget(device, free, held_storages(), host))
    return load_tensors(facts.checkpoint, plan, read=not streamed)


def operations_for(facts: ModelFacts, plan: ModelPlan) -> Any:
    """Choose ComfyUI's operations. Its quantized ones give their dtype to weights that are not quantized as well."""
    quantized = bool(plan.declared(facts.prefix))
    dtype = dtype_named(plan.dtype)
    computed = dtype if quantized else dtype_named(plan.compute.activation_dtype)
    config = SimpleNamespace(quant_config={"mixed_ops": True} if quantized else None)
    return comfy.ops.pick_operations(dtype, computed, load_device=compute_device(), model_config=config)


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


def settle_quantized(model: torch.nn.Module, facts: ModelFacts, plan: ModelPlan) -> None:
    """Set the dtype that quantized weights dequantize to, whatever dtype other weights have, and turn off ComfyUI's own
    fp8 product.

    In inference mode, in which ComfyUI runs nodes, no data are copied.

    Raises:
        CheckpointError: ComfyUI does not hold a weight quantized that was given to it so.
    """
    names = plan.declared(facts.prefix)
    dtype = dtype_named(weight_dtype(plan.compute.choice.used))
    modules = dict(model.named_modules()) if names else {}
    for name in names:
        module = modules.get(facts.names.get(name, ""), model)
        weight = getattr(module, "weight", None)
        if not isinstance(weight, comfy.quant_ops.QuantizedTensor):
            problem = "is quantized, but ComfyUI did not load it as such"
            advice = "Keep this layer in 16 bit with a rule."
            raise CheckpointError(plan.file, problem, name.removeprefix(facts.prefix), advice)
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


def load_onto(
    patcher: ModelPatcher, checkpoint: Checkpoint, storage: StorageOption, compute: ComputeOption, rules: Rules,
    whole: bool = False, disable_dynamic: bool = False,
) -> ModelPatcher:  # fmt: skip
    """Make a model of other weights of the same architecture, and clone a patcher onto it; see :func:`_load_weights`.

    What nodes set on a patcher is the clone's: patches, hooks, wrappers, options. What belongs to weights
    (``OF_WEIGHTS``), the class that loads and patches them, the dtype they are cast to, the record of their load and
    their compute plan are those of the new model. It is static if ``patcher`` is.
    """
    made = _load_weights(checkpoint, storage, compute, rules, whole, disable_dynamic or not patcher.is_dynamic())
    clone = patcher.clone(disable_dynamic=not made.is_dynamic(), model_override=made.get_clone_model_override())
    clone.__class__ = type(made)  # another pack's class, such as ComfyUI-GGUF's, knows its own weights alone
    for name in OF_WEIGHTS:
        if name in vars(made):
            setattr(clone, name, getattr(made, name))
    own = activation_dtype(made)
    if CAST_DTYPE in patcher.object_patches or activation_dtype(patcher) != own:
        clone.object_patches[CAST_DTYPE] = own  # packs may have made layers in the dtype stated before
    keep_record(clone, cast(ModelPlan, record_of(made)))
    set_compute(clone, cast(Compute, Compute.on(made)).plan)
    keep_low_rank_unmerged(clone)
    return clone


def attach(patcher: ModelPatcher, plan: ModelPlan, compute: Choice | None = None) -> None:
    """Attach the plan of a load to its model, log it, and keep LoRAs out of 8-bit weights."""
    keep_record(patcher, plan)
    keep_low_rank_unmerged(patcher)
    tell(plan, compute)


def tell(plan: ModelPlan, compute: Choice | None = None) -> None:
    """Log the plan of a load."""
    storage = str(plan.storage).removesuffix(".")
    arithmetic = f"; compute {compute}" if compute else ""
    logger.info("Halfsafe: %s: storage %s%s", plan.file, storage, arithmetic)
    for note in (*plan.costs, *plan.notes):
        logger.info("Halfsafe: %s: %s", plan.file, note)
    for idle in plan.without_effect:
        logger.warning("Halfsafe: %s: %s has no effect: %s", plan.file, idle.setting, idle.reason)
