"""Detect the model of a state dict by ComfyUI's own detection, and the module class of each of its layers."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import comfy.memory_management
import comfy.model_detection
import comfy.ops
import comfy.supported_models
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.supported_models_base import BASE

from ....precision.base.dtypes import name_of
from ....precision.base.errors import CheckpointError
from ....precision.base.message import Message
from ....precision.base.text import listed
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.formats.checkpoint import Checkpoint, StoredWeight, read_checkpoint
from ....precision.formats.joined import FUSED, JoinedWeights, RowsOf, joined_rows
from ....precision.formats.registry import FORMAT_OF_STORAGE
from ....precision.plan.auto import UNQUANTIZED
from ....precision.plan.facts import LayerSpec, ModelFacts, facts_of
from ..comfyui.attributes import made_when_loaded
from .identity import source_path_of
from .lacking import named_if_lacking

RENAMED = "The file uses diffusers' layer names; they were converted to ComfyUI's."

FAMILIES_OF_CONTROLS = {
    "comfy.ldm.qwen_image": comfy.supported_models.QwenImage,
    "comfy.ldm.flux": comfy.supported_models.Flux,
}
"""The package of a ControlNet's model -> the family whose dtypes it works in;
others work in all, fp16 first."""


def detect_model(checkpoint: Checkpoint, only_diffusion_model: bool) -> ModelFacts:
    """Recognise the diffusion model in a checkpoint.

    ``only_diffusion_model`` drops what is not part of it, and converts diffusers' names to ComfyUI's.

    Raises:
        CheckpointError: ComfyUI does not know this architecture.
    """
    checkpoint, prefix, config = recognised(checkpoint, only_diffusion_model)
    with named_if_lacking(checkpoint.path):
        modules = _modules(config, checkpoint, prefix)
    inside = {name: weight.data for name, weight in checkpoint.weights.items() if name.startswith(prefix)}
    renamed = config.process_unet_state_dict({name[len(prefix) :]: tensor for name, tensor in inside.items()})
    names = _layer_names(inside, renamed)
    # ComfyUI leaves out what its model lacks, too.
    lacking = [name for name in names if names[name] not in modules and checkpoint.weights[name].quantized]
    if lacking:
        checkpoint = _without(checkpoint, lacking)
        names = {name: layer for name, layer in names.items() if name not in lacking}
    complete = all(
        (f"{name}.{leaf}" if name else leaf) in renamed
        for name, module in modules.items()
        for leaf, parameter in module._parameters.items()
        if parameter is not None
    )
    if complete and getattr(comfy.memory_management, "aimdo_enabled", False):
        later = [f"{name}.{leaf}" for name, module in modules.items() for leaf in made_when_loaded(module)]
        complete = all(name.removeprefix(".") in renamed for name in later)
    return _facts_of_modules(checkpoint, modules, names, prefix, config, complete)


def detect_control(checkpoint: Checkpoint, module: torch.nn.Module) -> ModelFacts:
    """Describe the model of a ControlNet that ComfyUI has loaded: its weights, quantized ones as in
    the file.

    ComfyUI renames or fuses layers of files with diffusers' names: those whose format does not hold the result exactly
    stay unpacked.
    """
    quantized = {name: weight for name, weight in checkpoint.weights.items() if weight.quantized}
    own = module.state_dict()
    plain = []
    notes = checkpoint.notes
    if quantized.keys() - own.keys():
        notes = [*notes, RENAMED]
    for name, (sources, order) in diffusers_origins(checkpoint).items():
        if name in own and not quantized.keys().isdisjoint(sources):
            made = joined_rows(name, [checkpoint.weights[source] for source in sources], order)
            quantized |= {} if made is None else {name: made}
            plain += [name] if made is None else []
    notes = [*notes, Message(FUSED, _listed_layers(plain))] if plain else notes
    weights = {name: quantized.get(name, StoredWeight(name, tensor)) for name, tensor in own.items()}
    unpacked = (*checkpoint.unpacked, *plain)
    checkpoint = replace(checkpoint, weights=weights, notes=notes, unpacked=unpacked)
    family = FAMILIES_OF_CONTROLS.get(type(module).__module__.rpartition(".")[0], BASE)
    names = {name: name.removesuffix(".weight") for name in weights if name.endswith(".weight")}
    return _facts_of_modules(checkpoint, dict(module.named_modules()), names, "", family)


def _without(checkpoint: Checkpoint, names: Sequence[str]) -> Checkpoint:
    weights = {name: weight for name, weight in checkpoint.weights.items() if name not in names}
    told = _listed_layers(names)
    note = Message("Quantized layers of the file that the model does not have were ignored: {0}.", told)
    return replace(checkpoint, weights=weights, notes=[*checkpoint.notes, note])


def recognised(checkpoint: Checkpoint, only_diffusion_model: bool = False) -> tuple[Checkpoint, str, Any]:
    """Return a checkpoint as :func:`detect_model` names its tensors, the model's prefix and ComfyUI's config."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(checkpoint.weights)
    if only_diffusion_model:
        checkpoint = _stripped(checkpoint, prefix)
        prefix = ""
    checkpoint = _with_true_shapes(checkpoint, prefix)
    original = checkpoint
    config = _config(checkpoint, prefix)
    if config is None and only_diffusion_model:
        checkpoint = _with_true_shapes(_from_diffusers(checkpoint), "")
        config = _config(checkpoint, "")
    if config is None:
        advice = _hint(original, only_diffusion_model)
        raise CheckpointError(checkpoint.path, "ComfyUI does not recognise this architecture", advice=advice)
    return checkpoint, prefix, config


class _Reads(dict):
    """A dict of tensors that records in ``read`` the names that were looked up."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__(tensors)
        self.read: set[str] = set()

    def __getitem__(self, name):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name, default=None):
        self.read.add(name)
        return super().get(name, default)


def _with_true_shapes(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """Unpack to bf16 the weights by whose shapes ComfyUI tells a model, where several values lie in a byte: it takes
    the shapes of the bytes for those of the layers.

    Raises:
        CheckpointError: such a weight cannot be unpacked here, or the file does not tell its shape.
    """
    packed = {name: it for name, it in checkpoint.weights.items() if it.quantized and it.shape != tuple(it.data.shape)}
    if not packed:
        return checkpoint
    shapes = {name: torch.empty(weight.shape, device="meta") for name, weight in packed.items()}
    tensors = _Reads(stored_tensors(checkpoint) | shapes)
    with named_if_lacking(checkpoint.path):
        config = comfy.model_detection.model_config_from_unet(tensors, prefix, metadata=checkpoint.metadata)
    weights = dict(checkpoint.weights)
    names = [name for name in packed if name in tensors.read]
    if not names or _is_same_model(config, _config(checkpoint, prefix)):  # it counts the rows, which are not packed
        return checkpoint
    for name in names:
        weight, format = packed[name], FORMAT_OF_STORAGE[packed[name].storage]
        why = weight.doubt if format.unpacks else "which this comfy-kitchen cannot unpack"
        if why:
            problem = Message("in {0}, {1}, and ComfyUI detects the architecture from its shape", weight.storage, why)
            advice = Message("Use ComfyUI {0} or later, or another version of the model.", format.since)
            raise CheckpointError(weight.file or checkpoint.path, problem, name, advice)
        weights[name] = weight.unpacked(torch.bfloat16)
    told = _listed_layers(names)
    note = Message("Unpacked to bf16, because ComfyUI detects the architecture from their shapes: {0}.", told)
    unpacked = (*checkpoint.unpacked, *names)
    return replace(checkpoint, weights=weights, notes=[*checkpoint.notes, note], unpacked=unpacked)


def _is_same_model(one, other) -> bool:
    """True if two of ComfyUI's configs, None for an unknown model, are of one model of the same sizes."""
    return type(one) is type(other) and (one is None or one.unet_config == other.unet_config)


def _listed_layers(names: Sequence[str]) -> str:
    """Write the layers of weights for people."""
    return listed([name.removesuffix(".weight") for name in names])


def _stripped(checkpoint: Checkpoint, prefix: str) -> Checkpoint:
    """Keep the tensors below ``prefix``, as ComfyUI detected it, or else below a prefix of all names."""
    for start in (prefix, checkpoint.prefix):
        if not start:
            return checkpoint
        inside = {name[len(start) :]: weight for name, weight in checkpoint.weights.items() if name.startswith(start)}
        if inside:
            weights = {name: replace(weight, name=name) for name, weight in inside.items()}
            return replace(checkpoint, weights=weights)
    return checkpoint


def _config(checkpoint: Checkpoint, prefix: str):
    with named_if_lacking(checkpoint.path):
        return comfy.model_detection.model_config_from_unet(
            stored_tensors(checkpoint), prefix, metadata=checkpoint.metadata
        )


def stored_tensors(checkpoint: Checkpoint, unpacked: bool = False) -> dict[str, torch.Tensor]:
    """Return every tensor by name, as the file holds it, with the scales of ComfyUI's own formats.

    ``unpacked``: weights that have a scale are unpacked to bf16.
    """
    weights = checkpoint.weights
    if unpacked:
        weights = {name: weight.unpacked(torch.bfloat16) for name, weight in weights.items()}
    tensors = {name: weight.data for name, weight in weights.items()}
    for weight in weights.values():
        tensors.update(weight.auxiliary)
    return tensors


def _from_diffusers(checkpoint: Checkpoint) -> Checkpoint:
    """Rename a model to ComfyUI's names. Quantized weights keep their storage, unless they are fused with others and
    the result has no exact form in it; those become bf16."""
    origins = diffusers_origins(checkpoint)
    if not origins:
        return checkpoint
    made = JoinedWeights(checkpoint.weights, origins)
    for sources, order in origins.values():
        if len(sources) > 1 or order is not None:  # NaN is told by the name and file of the part that has it
            for source in sources:
                checkpoint.weights[source].finite_bound(checkpoint.path)
    weights = dict(made)
    plain = [*made.unpacked]
    notes: list[str] = [RENAMED]
    if plain:
        notes.append(Message(FUSED, _listed_layers(plain)))
    notes = [*checkpoint.notes, *notes]
    return replace(checkpoint, weights=weights, notes=notes, unpacked=(*checkpoint.unpacked, *plain))


def diffusers_origins(checkpoint: Checkpoint) -> dict[str, RowsOf]:
    """Map ComfyUI's names of a model with diffusers' names to where their rows come from; empty for any other model.

    ``convert_diffusers_mmdit`` in comfy/model_detection.py moves whole rows alone: it is given their numbers.

    Raises:
        CheckpointError: a part of a fused tensor is missing, which ComfyUI would leave as it finds the memory.
    """
    weights = checkpoint.weights
    rows: dict[str, range] = {}
    numbered: dict[str, torch.Tensor] = {}
    end = 0
    for name, weight in weights.items():
        rows[name] = range(end, end + (weight.shape[0] if weight.shape else 1))
        end = rows[name].stop
        numbers = torch.arange(rows[name].start, end)
        numbered[name] = numbers.view(-1, *[1] * (len(weight.shape) - 1)) if weight.shape else numbers[0]
    converted = comfy.model_detection.convert_diffusers_mmdit(numbered, "")
    if not converted:
        return _unet_origins(checkpoint)
    firsts = torch.tensor([each.start for each in rows.values()])
    names = list(rows)
    taken: set[str] = set()
    origins = {}
    for target, tensor in converted.items():
        numbers = tensor.reshape(-1)
        inside = bool(((numbers >= 0) & (numbers < end)).all())
        at = torch.bucketize(numbers, firsts, right=True) - 1 if inside else numbers[:0]
        sources = [names[i] for i in dict.fromkeys(at.unique_consecutive().tolist())]
        whole = torch.tensor([number for source in sources for number in rows[source]], dtype=numbers.dtype)
        place = whole.argsort()
        if not taken.isdisjoint(sources) or not torch.equal(whole[place], numbers.sort().values):
            problem = Message("lacks a part of {0}, which ComfyUI fuses of several tensors", target)
            raise CheckpointError(checkpoint.path, problem, advice="Download the model again.")
        taken.update(sources)
        order = place[torch.searchsorted(whole[place], numbers)]
        origins[target] = RowsOf(sources, None if torch.equal(whole, numbers) else order)
    return origins


def narrower_in_file(patcher: ModelPatcher, held: Mapping[str, StoredWeight]) -> dict[str, str]:
    """Map each unquantized weight that a model holds in a wider dtype than its file to its storage in the file; empty
    if the file is not known.

    ``held``: the weights of the model, by name.
    """
    path = source_path_of(patcher)
    if not path:
        return {}
    try:
        file = open_checkpoint(path)
        checkpoint = read_checkpoint(file, file.metadata, path)
        checkpoint = _stripped(checkpoint, comfy.model_detection.unet_prefix_from_state_dict(checkpoint.weights))
        found = renamed_by(checkpoint, patcher.model.model_config.process_unet_state_dict).weights
        if 2 * len(found.keys() & held.keys()) < len(held) and (origins := diffusers_origins(checkpoint)):
            found = {**found, **JoinedWeights(checkpoint.weights, origins).outline()}
    except (CheckpointError, OSError):
        return {}
    both = [(name, held[name], own) for name, own in found.items() if name in held]
    plain = [(name, held, own) for name, held, own in both if {held.storage, own.storage} <= {*UNQUANTIZED}]
    return {name: own.storage for name, held, own in plain if own.bytes < held.bytes}


def renamed_by(checkpoint: Checkpoint, process: Callable[[dict], dict]) -> Checkpoint:
    """Rename a checkpoint's tensors as ComfyUI's ``process`` does; tensors made anew are plain."""
    own = {id(weight.data): weight for weight in checkpoint.weights.values()}
    processed = process({name: weight.data for name, weight in checkpoint.weights.items()})
    weights = {
        name: replace(own[id(tensor)], name=name) if id(tensor) in own else StoredWeight(name, tensor)
        for name, tensor in processed.items()
    }
    return replace(checkpoint, weights=weights)


def _unet_origins(checkpoint: Checkpoint) -> dict[str, RowsOf]:
    shapes = {name: torch.empty(weight.shape, device="meta") for name, weight in checkpoint.weights.items()}
    try:
        config = comfy.model_detection.unet_config_from_diffusers_unet(shapes)
    except KeyError:
        config = None
    if config is None:
        return {}
    names = comfy.utils.unet_to_diffusers(config)
    return {name: RowsOf([source]) for source, name in names.items() if source in shapes}


def _facts_of_modules(
    checkpoint: Checkpoint,
    modules: Mapping[str, torch.nn.Module],
    names: Mapping[str, str],
    prefix: str,
    config,
    complete: bool = False,
) -> ModelFacts:
    """Collect the facts of a model of these modules; ``config``: ComfyUI's, of its architecture."""
    layers = [
        LayerSpec(layer, _class_of(modules[layer]), checkpoint.weights[name].shape)
        for name, layer in names.items()
        if layer in modules
    ]
    supported = [name_of(dtype) for dtype in config.supported_inference_dtypes]
    return facts_of(checkpoint, prefix, layers, supported, names, complete)


def _class_of(module: torch.nn.Module) -> str:
    """Return a module's class name; torch's own Linear, which cannot hold a quantized weight, with its package."""
    return "torch.nn.Linear" if type(module) is torch.nn.Linear else type(module).__name__


def _layer_names(inside: dict[str, torch.Tensor], renamed: dict[str, torch.Tensor]) -> dict[str, str]:
    """Map each ``.weight`` of the file to its layer, named as ComfyUI names this family's tensors while loading."""
    by_tensor = {id(tensor): name for name, tensor in renamed.items()}
    targets = ((name, by_tensor.get(id(tensor), "")) for name, tensor in inside.items())
    return {name: target.removesuffix(".weight") for name, target in targets if target.endswith(".weight")}


def _modules(config, checkpoint: Checkpoint, prefix: str) -> dict[str, torch.nn.Module]:
    config.set_inference_dtype(torch.bfloat16, None)
    config.custom_operations = comfy.ops.disable_weight_init
    disabled = logging.root.manager.disable
    logging.disable(logging.INFO)  # ComfyUI tells the dtype of each model that is built, and tells it of the loaded one
    try:
        try:
            model = config.get_model(stored_tensors(checkpoint), prefix, device=torch.device("meta"))
        except RuntimeError:
            # ACE-Step 1.5 reads numbers of its own buffers (``FSQ`` in ComfyUI's comfy/ldm/ace/ace_step15.py).
            model = config.get_model(stored_tensors(checkpoint), prefix, device=torch.device("cpu"))
    finally:
        logging.disable(disabled)
    return dict(model.diffusion_model.named_modules())


def _hint(checkpoint: Checkpoint, only_diffusion_model: bool) -> str:
    if any("lora" in name for name in checkpoint.weights):
        return "It looks like a LoRA: load it with a LoRA loader."
    if any(
        name.startswith(("text_model.", "encoder.block.", "model.layers.", "shared.")) for name in checkpoint.weights
    ):
        return "It looks like a text encoder: load it with Load CLIP."
    if any(name.startswith(("decoder.conv", "decoder.mid", "decoder.middle")) for name in checkpoint.weights):
        return "It looks like a VAE: load it with Load VAE."
    if not only_diffusion_model:
        return "If it contains only a diffusion model, put it in models/diffusion_models and load it from there."
    return "Check that it is a diffusion model, and whether a newer ComfyUI supports it."
