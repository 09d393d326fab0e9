"""ControlNets through ComfyUI's own loader, in the storage and compute dtype that a plan chose.

ComfyUI's loader tells the kind of a file and renames its tensors for it. It is run twice without the weights: once to
learn which model it builds and which tensor each of its layers gets, and once to build that model with the plan's
operations.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import comfy.cldm.cldm
import comfy.controlnet
import comfy.model_management
import comfy.model_patcher
import comfy.ops
import comfy.supported_models
import torch

from ....precision.arithmetic.linear import kind_of
from ....precision.arithmetic.patching import patched
from ....precision.dtypes import dtype_named
from ....precision.errors import CheckpointError
from ....precision.formats.checkpoint import Checkpoint
from ....precision.formats.comfy_state import check_finite
from ....precision.formats.stored_weight import StoredWeight
from ....precision.plan.choice import Choice, LoadRecord
from ....precision.plan.rules import Rules
from ..run.control import plan_control
from . import detection, models
from .control_runs import loaded_control, note_runs
from .files import open_model
from .quiet import quiet

if TYPE_CHECKING:
    from comfy.controlnet import ControlBase, ControlNet

CLDM = "control_model."
DIFFERENCE = "difference"
AS_IT_IS = ("auto", "as_file")
PLAIN_OPERATIONS = {"custom_operations": comfy.ops.disable_weight_init}
WHY_OWN = {
    "ControlLora": "a ControlLora takes the layers of the model it is used with, in the dtype they have there",
    "T2IAdapter": "a T2I adapter is small, runs once per image and has no layers that ComfyUI can hold quantized",
}
SHUFFLE = ("_shuffle", "_shuffle_fp16")
FROM_THE_MODEL = ("x_embedder.", "orig_y_embedder.")
logger = logging.getLogger("halfsafe")


def load_control_net(path: str, storage: str, compute: str, rules: Rules) -> ControlBase:
    """Load any kind of control file that ComfyUI's loader knows.

    ControlLoras and T2I adapters are loaded as ComfyUI does it; the log and the report say so.

    Raises:
        CheckpointError: the file cannot be read, is no control file, or holds a bad weight.
        MemoryShortage: it does not fit.
    """
    checkpoint = _without_prefix(open_model(path))
    options = {"global_average_pooling": True} if Path(path).stem.endswith(SHUFFLE) else {}
    built = _build(checkpoint, _without_data(checkpoint), PLAIN_OPERATIONS, meta=True)
    if built.tensors:
        control = _planned(checkpoint, built, options, storage, compute, rules)
    else:
        control = _own(checkpoint, options, storage, compute)
    for setting, reason in loaded_control(control).record.without_effect:
        logger.warning("Halfsafe: %s: %s has no effect: %s", path, setting, reason)
    return control


def _without_prefix(checkpoint: Checkpoint) -> Checkpoint:
    """Name the tensors of files in the format of the first ControlNets as all others name them."""
    if DIFFERENCE in checkpoint.weights:
        problem = "a ControlNet that holds the differences to a model's weights"
        raise CheckpointError(checkpoint.path, problem, DIFFERENCE, "Load it with ComfyUI's DiffControlNetLoader.")
    if f"{CLDM}zero_convs.0.0.weight" not in checkpoint.weights:
        return checkpoint
    inside = {name.removeprefix(CLDM): weight for name, weight in checkpoint.weights.items() if name.startswith(CLDM)}
    return replace(checkpoint, weights={name: replace(weight, name=name) for name, weight in inside.items()})


@dataclass
class _Built:
    """What ComfyUI's loader made of the tensors ``given`` to it.

    ``tensors``: what it would have loaded into the model, by the model's names; ``supported``: dtypes the model works
    in.
    """

    given: dict[str, torch.Tensor]
    control: Any = None
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    supported: list[torch.dtype] = field(default_factory=list)


def _build(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor], options: dict, meta: bool = False) -> _Built:
    """Run ComfyUI's loader without loading a weight. ``meta``: build the model without memory for them."""
    built = _Built(tensors)
    try:
        with (
            patched(_stand_ins(built, options.get("dtype", torch.bfloat16), meta)),
            quiet(logging.CRITICAL if meta else logging.NOTSET),
        ):
            built.control = comfy.controlnet.load_controlnet_state_dict(dict(tensors), model_options=options)
    except Exception as error:  # a file of another kind fails in as many ways as the loader has lines
        raise _unknown(checkpoint, error) from error
    return built


def _stand_ins(built: _Built, dtype: torch.dtype, meta: bool) -> Iterator[tuple]:
    """Yield what is put in place of ComfyUI's functions while it builds: no tensor's data is read."""
    make = comfy.cldm.cldm.ControlNet

    def unet_dtype(*args, supported_dtypes=(torch.float16, torch.bfloat16, torch.float32), **kwargs):
        built.supported = built.supported or list(supported_dtypes)
        return dtype

    def loaded(module: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
        built.tensors = dict(tensors)
        return module

    def cldm(**config) -> torch.nn.Module:
        module = make(**config)
        module.__dict__["load_state_dict"] = lambda tensors, strict: loaded(module, tensors) and ([], [])
        return module

    yield comfy.controlnet, "controlnet_load_state_dict", loaded
    yield comfy.cldm.cldm, "ControlNet", cldm
    yield comfy.controlnet, "load_t2i_adapter", lambda *args, **kwargs: None
    # ``load_controlnet_sd35`` in comfy/controlnet.py reads no option for the dtype.
    yield comfy.model_management, "unet_dtype", unet_dtype
    if meta:
        yield comfy.model_management, "unet_offload_device", lambda: torch.device("meta")


def _unknown(checkpoint: Checkpoint, error: Exception | None = None) -> CheckpointError:
    why = f", which fails on it ({type(error).__name__}: {error})" if error else ""
    advice = "Check that it is a ControlNet, ControlLora or T2I adapter, and whether a newer ComfyUI supports it."
    return CheckpointError(checkpoint.path, f"no control file that ComfyUI's loader knows{why}", advice=advice)


def _without_data(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Make a tensor without data for each weight, of its shape; single numbers, which the loader reads, stay."""
    weights = checkpoint.weights.items()
    return {name: weight.data if weight.data.numel() == 1 else _like(weight) for name, weight in weights}


def _like(weight: StoredWeight) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=torch.bfloat16 if weight.quantized else weight.data.dtype, device="meta")


def _plain(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    weights = checkpoint.weights.items()
    return {name: w.dequantize(torch.bfloat16) if w.quantized or w.scale is not None else w.data for name, w in weights}


def _own(checkpoint: Checkpoint, options: dict, storage: str, compute: str) -> ControlBase:
    """Load the kinds that ComfyUI builds without a model of ours, from weights in 16 bit."""
    tensors = _plain(checkpoint)
    check_finite(tensors, checkpoint.path)
    try:
        control = comfy.controlnet.load_controlnet_state_dict(tensors, model_options=options)
    except Exception as error:
        raise _unknown(checkpoint, error) from error
    if control is None:
        raise _unknown(checkpoint)
    why = WHY_OWN[type(control).__name__]
    asked = [f"{name}={value}" for name, value in (("storage", storage), ("compute", compute)) if value not in AS_IT_IS]
    without_effect = tuple((setting, why) for setting in asked)
    choice = Choice(storage, "as_file", why)
    notes = tuple(checkpoint.notes)
    record = LoadRecord(checkpoint.path, checkpoint.dialects, choice, without_effect=without_effect, notes=notes)
    note_runs(control, record)
    logger.info("Halfsafe: %s: loaded as ComfyUI does: %s", checkpoint.path, why)
    return control


def _planned(
    checkpoint: Checkpoint, first: _Built, options: dict, storage: str, compute: str, rules: Rules
) -> ControlNet:
    detected = _detected(_renamed(checkpoint, first), first)
    load = models.prepare(detected, storage, compute, rules)
    built = _build(checkpoint, _without_data(checkpoint), options | models.operations_for(detected, load))
    control, module = built.control, built.control.control_model
    module.__dict__.pop("load_state_dict", None)
    module.load_state_dict(_zeros(first, load) | load.tensors, strict=False)
    patcher, offload_device = comfy.model_patcher.CoreModelPatcher, comfy.model_management.unet_offload_device()
    control.control_model_wrapped = patcher(module, load_device=control.load_device, offload_device=offload_device)
    _finish(control, detected, load)
    return control


def _renamed(checkpoint: Checkpoint, built: _Built) -> Checkpoint:
    """Rename a checkpoint's tensors to the model's names, without what the model has no place for.

    ComfyUI fuses layers of some files with diffusers' names: quantized weights, each with a scale of its own, become
    bf16.
    """
    sources = {id(tensor): name for name, tensor in built.given.items()}
    if all(id(tensor) in sources for tensor in built.tensors.values()):
        weights = {name: replace(checkpoint.weights[sources[id(t)]], name=name) for name, t in built.tensors.items()}
        return replace(checkpoint, weights=_fitting(checkpoint, weights, built))
    fused = _build(checkpoint, _plain(checkpoint), PLAIN_OPERATIONS, meta=True).tensors
    note = "The file has diffusers' names: it was converted to ComfyUI's."
    weights = _fitting(checkpoint, {name: StoredWeight(name, tensor) for name, tensor in fused.items()}, built)
    return replace(checkpoint, weights=weights, notes=[*checkpoint.notes, note])


def _fitting(checkpoint: Checkpoint, weights: dict[str, StoredWeight], built: _Built) -> dict[str, StoredWeight]:
    """Return the weights that the model has a place for.

    Raises:
        CheckpointError: one has another shape than the model's.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in built.control.control_model.state_dict().items()}
    for name, weight in weights.items():
        if shapes.get(name, weight.shape) != weight.shape:
            problem = f"has shape {weight.shape}, ComfyUI's model needs {shapes[name]}"
            raise CheckpointError(checkpoint.path, problem, name, "Check whether a newer ComfyUI supports it.")
    return {name: weight for name, weight in weights.items() if name in shapes}


def _detected(checkpoint: Checkpoint, built: _Built) -> detection.Detected:
    module = built.control.control_model
    # ``load_controlnet_qwen_fun`` in comfy/controlnet.py names none.
    supported = built.supported or comfy.supported_models.QwenImage.supported_inference_dtypes
    config = SimpleNamespace(supported_inference_dtypes=supported)
    names = {name: name.removesuffix(".weight") for name in checkpoint.weights if name.endswith(".weight")}
    facts = detection.facts_of_modules(checkpoint, dict(module.named_modules()), names, "", config)
    of_the_model = FROM_THE_MODEL if isinstance(built.control, comfy.controlnet.ControlNetSD35) else ()
    missing = [name for name in _absent(module, checkpoint.weights) if not name.startswith(of_the_model)]
    return detection.Detected(checkpoint, "", config, facts, names, missing)


def _absent(module: torch.nn.Module, tensors: Mapping[str, object]) -> list[str]:
    return [name for name, part in module.named_modules() if kind_of(part) and f"{name}.weight" not in tensors]


def _zeros(first: _Built, load: models.PreparedLoad) -> dict[str, torch.Tensor]:
    """Make weights of zeros for the layers that the file has none for.

    An SD3.5 ControlNet gets some from the model when it runs.
    """
    # ComfyUI's quantized layers have no weight before they are given one (``_load_quantized_module`` in comfy/ops.py).
    module = first.control.control_model
    shapes = {f"{name}.weight": module.get_submodule(name).weight.shape for name in _absent(module, load.tensors)}
    return {name: torch.zeros(shape, dtype=load.dtype) for name, shape in shapes.items()}


def _finish(control: ControlNet, detected: detection.Detected, load: models.PreparedLoad) -> None:
    modules, plan = dict(control.control_model.named_modules()), load.plan
    arithmetic = plan.compute.unwatched
    models.check_quantized(detected, modules, models.quantized_layers(load.tensors, ""))
    models.compute_in_full_precision(modules)
    models.unpack_to(modules, dtype_named(arithmetic.weight_dtype))
    plan_control(control, arithmetic, dtype_named(arithmetic.activation_dtype))
    record = models.record_of(detected, plan, [*models.weightless_note(detected), *load.notes])
    control.control_model_wrapped.set_attachments(models.ATTACHMENT, record)
    note_runs(control, record)
    storage = str(plan.storage).removesuffix(".")
    logger.info("Halfsafe: %s: storage %s; compute %s", record.file, storage, arithmetic.choice)
    for reason, count in Counter(record.kept.values()).items():
        logger.info("Halfsafe: %s: %d layers kept high: %s", record.file, count, reason)
