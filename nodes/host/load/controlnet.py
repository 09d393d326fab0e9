"""Load ControlNets by ComfyUI's own loader, then convert them to the planned storage and compute dtype."""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import comfy.controlnet
import comfy.model_management
import comfy.ops
import comfy.supported_models
import torch
from comfy.controlnet import ControlBase, ControlNet
from comfy.model_base import BaseModel
from comfy_execution.progress import get_progress_state

from ....precision.base.dtypes import dtype_named
from ....precision.base.errors import CheckpointError
from ....precision.base.message import Message
from ....precision.base.options import ComputeOption, StorageOption
from ....precision.devices.memory import require_memory
from ....precision.formats.checkpoint import Checkpoint
from ....precision.formats.comfy_format import check_finite
from ....precision.plan.auto import UNQUANTIZED
from ....precision.plan.choice import Choice, WithoutEffect
from ....precision.plan.facts import ModelFacts, file_dtype
from ....precision.plan.load import ModelPlan
from ....precision.plan.rules import Rules
from ..comfyui.attributes import set_control_dtype
from ..comfyui.model_facts import keep_record
from ..compute.control import PlannedControl
from . import detection, models
from .devices import free_host_memory
from .files import open_model
from .lacking import lacking_tensors

DIFFERENCE = "difference"
AS_IT_IS = ("auto", "as_file")
WHY_OWN = {
    "ControlLora": "a ControlLora uses the layers of the model it is applied to, in their dtype",
    "T2IAdapter": "a T2I adapter is small, runs once per image and has no layers that ComfyUI can quantize",
}
SHUFFLE = ("_shuffle", "_shuffle_fp16")
FROM_THE_MODEL = re.compile(r"^(x_embedder|orig_y_embedder)\.")
"""Parts of an SD3.5 ControlNet that it gets from the model when it runs."""
_runs: weakref.WeakKeyDictionary[BaseModel, tuple[weakref.ref, weakref.WeakKeyDictionary]] = weakref.WeakKeyDictionary()
"""A model -> the prompt of its last runs, as ComfyUI's progress registry of it, and the ControlNets of those runs."""


@dataclass(frozen=True, eq=False)
class LoadedControl:
    """A ControlNet that was loaded here, with all of its copies.

    ``kind``: the name of ComfyUI's class. ``planned``: its planned model; None if ComfyUI runs it as it is.
    """

    kind: str
    record: ModelPlan
    planned: PlannedControl | None

    @staticmethod
    def of(control: ControlNet) -> LoadedControl:
        """Return the record of a ControlNet that was loaded here, also of a copy."""
        return vars(control)["halfsafe"]

    @staticmethod
    def used_with(model: BaseModel) -> list[LoadedControl]:
        """Return the ControlNets still in use that a model was sampled with, in the order of their
        first runs."""
        return list(_runs[model][1]) if model in _runs else []


def load_control_net(path: str, storage: StorageOption, compute: ComputeOption, rules: Rules) -> ControlBase:
    """Load any kind of control file that ComfyUI's loader knows.

    ControlLoras and T2I adapters are loaded as ComfyUI does it; the log and the report say so.

    Raises:
        CheckpointError: the file cannot be read, is no control file, or holds a bad weight.
        MemoryShortage: it does not fit.
    """
    checkpoint = open_model(path)
    if DIFFERENCE in checkpoint.weights:
        problem = "a ControlNet stored as differences to a model's weights"
        raise CheckpointError(path, problem, DIFFERENCE, "Load it with ComfyUI's DiffControlNetLoader.")
    control = _made_by_core(checkpoint)
    zeros = checkpoint.zero_notes()
    checkpoint = replace(checkpoint, notes=[*checkpoint.notes, *zeros])
    cls = type(control).__name__
    if cls in WHY_OWN:
        loaded = LoadedControl(cls, _own_record(checkpoint, WHY_OWN[cls], storage, compute), None)
        models.tell(loaded.record)
    else:
        loaded = _plan(control, checkpoint, storage, compute, rules)
    return _follow(control, loaded)


def _made_by_core(checkpoint: Checkpoint) -> ControlBase:
    """Have ComfyUI load a file, quantized weights unpacked to 16 bit."""
    held = file_dtype(checkpoint)
    dtype = dtype_named(held) if held in UNQUANTIZED else torch.bfloat16
    needed = sum(prod(weight.shape) for weight in checkpoint.weights.values()) * dtype.itemsize
    require_memory(needed, Message("Loading {0}", checkpoint.path), free_host_memory())
    tensors = detection.stored_tensors(checkpoint, unpacked=True)
    check_finite(tensors, checkpoint.path)
    options: dict[str, Any] = {"dtype": dtype, "custom_operations": comfy.ops.manual_cast}
    options["global_average_pooling"] = Path(checkpoint.path).stem.endswith(SHUFFLE)
    try:
        with lacking_tensors(checkpoint.path) as lacking:
            control = comfy.controlnet.load_controlnet_state_dict(tensors, model_options=options)
    except CheckpointError:
        raise
    except Exception as error:  # a file of another kind fails in as many ways as the loader has lines
        raise _unknown(checkpoint, Message(", it raised {0}: {1}", type(error).__name__, error)) from error
    if control is None:
        raise _unknown(checkpoint)
    if hasattr(control, "control_model"):
        lacking.refuse(control.control_model, unless=FROM_THE_MODEL, fill=0.0)
    return control


def _unknown(checkpoint: Checkpoint, why: str = "") -> CheckpointError:
    advice = "Check that it is a ControlNet, ControlLora or T2I adapter, and whether a newer ComfyUI supports it."
    problem = Message("ComfyUI's loader does not know this ControlNet{0}", why)
    return CheckpointError(checkpoint.path, problem, advice=advice)


def _own_record(checkpoint: Checkpoint, why: str, storage: StorageOption, compute: ComputeOption) -> ModelPlan:
    asked = {"storage": storage, "compute": compute}
    idle = tuple(WithoutEffect(f"{name}={value}", why) for name, value in asked.items() if value not in AS_IT_IS)
    choice = Choice(storage, "as_file", why)
    notes = (*checkpoint.notes,)
    return ModelPlan(choice, without_effect=idle, notes=notes, file=checkpoint.path, dialects=checkpoint.dialects)


def _plan(
    control: ControlNet, checkpoint: Checkpoint, storage: StorageOption, compute: ComputeOption, rules: Rules
) -> LoadedControl:
    module = control.control_model
    facts = detection.detect_control(checkpoint, module)
    plan, tensors = models.prepare(facts, storage, compute, rules)
    arithmetic = plan.compute.unwatched
    _store(module, facts, plan, tensors)
    models.settle_quantized(module, facts, plan)
    module.dtype = dtype_named(arithmetic.activation_dtype)  # ComfyUI casts inputs to it (``get_control``)
    set_control_dtype(control, module.dtype)
    planned = PlannedControl(module, arithmetic, module.dtype, control.load_device)
    keep_record(planned.current_patcher, plan)
    models.tell(plan, arithmetic.choice)
    return LoadedControl(type(module).__name__, plan, planned)


def _store(module: torch.nn.Module, facts: ModelFacts, plan: ModelPlan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a model its tensors as planned, and ComfyUI's quantized layers for quantized weights."""
    layers = [facts.names[name] for name in plan.declared(facts.prefix)]
    operations = models.operations_for(facts, plan)
    dtype = dtype_named(plan.dtype)
    for layer in layers:
        plain = module.get_submodule(layer)
        inside = f"{layer}."
        made = operations.Linear(plain.in_features, plain.out_features, plain.bias is not None, "cpu", dtype)
        made.load_state_dict({n.removeprefix(inside): it for n, it in tensors.items() if n.startswith(inside)})
        parent, _, leaf = layer.rpartition(".")
        setattr(module.get_submodule(parent), leaf, made)
    for name, parameter in module.named_parameters():
        if name.rpartition(".")[0] not in layers:
            parameter.data = tensors[name].to(dtype)
    # Dynamic VRAM casts weights to the dtype that their layers were made for.
    comfy.model_management.archive_model_dtypes(module)


def _follow(control: ControlNet, loaded: LoadedControl) -> ControlNet:
    """Note which models a ControlNet and its copies run with, by methods on the objects themselves.

    An object holds its methods, which hold the object: it is freed by the garbage collection after its last use.
    """

    def pre_run(model: BaseModel, *args: Any) -> None:
        # ``pre_run_control`` in comfy/samplers.py; the call of a ControlNet's own model does not say which model it is
        # for. A new prompt begins anew.
        prompt = get_progress_state()
        if model not in _runs or _runs[model][0]() is not prompt:
            _runs[model] = weakref.ref(prompt), weakref.WeakKeyDictionary()
        _runs[model][1][loaded] = None
        if loaded.planned:
            loaded.planned.compute.begin_run()
        type(control).pre_run(control, model, *args)

    # Its class stays ComfyUI's: other packs ask for ``type(control) == ControlNet``.
    vars(control).update(halfsafe=loaded, pre_run=pre_run, copy=lambda: _follow(type(control).copy(control), loaded))
    return control
