"""Write a loaded model to a file, its LoRAs merged."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import comfy.lora
import comfy.model_base
import comfy.model_sampling
import comfy.quant_ops
import torch
from comfy.cli_args import args

from ....precision.arithmetic.compiling import plain_name
from ....precision.errors import HalfsafeError
from ....precision.formats import comfy_state
from ....precision.formats.checkpoint import StoredWeight, read_checkpoint
from ....precision.plan.facts import LayerSpec
from ....precision.plan.rules import Rules
from ....precision.plan.storage import plan_storage
from ..run.modules import modules_of
from .files import output_path
from .progress import byte_progress

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

PREFIX = "diffusion_model."
BYPASS = "bypass_lora"


class LiveWeights(Mapping[str, StoredWeight]):
    """The weights of a model as they are in memory; a patched one is computed, in fp32, whenever it is asked for."""

    def __init__(self, patcher: ModelPatcher):
        self._patcher = patcher
        self.stored = read_checkpoint(_unpatched(patcher), {}, type(patcher.model).__name__).weights
        self.stored.update(_sampling_marks(patcher))

    def __getitem__(self, name: str) -> StoredWeight:
        weight, key = self.stored[name], PREFIX + name
        weight = weight.moved("cpu")
        if key not in self._patcher.patches:
            return weight
        base = weight.dequantize(torch.float32).clone()
        return StoredWeight(name, comfy.lora.calculate_weight(self._patcher.patches[key], base, key))

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def _unpatched(patcher: ModelPatcher) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors before any LoRA, wherever the model is loaded."""
    with patcher.use_ejected():
        tensors = patcher.model.diffusion_model.state_dict()
    state = {plain_name(name): tensor.detach() for name, tensor in tensors.items()}
    for key, backup in patcher.backup.items():
        if key.startswith(PREFIX):
            name, weight = plain_name(key.removeprefix(PREFIX)), backup.weight
            quantized = isinstance(weight, comfy.quant_ops.QuantizedTensor)
            state.update(weight.state_dict(name) if quantized else {name: weight})
    return state


def save_model(
    patcher: ModelPatcher, filename_prefix: str, storage: str, rules: Rules, prompt: dict | None, extra: dict | None
) -> str:
    """Save the diffusion model below ComfyUI's output folder and return the file's name there.

    Raises:
        HalfsafeError: the disk is full, the model holds NaN or Inf, or it has a LoRA that cannot be merged.
    """
    if BYPASS in patcher.injections:
        raise HalfsafeError("A bypass LoRA acts while the model runs and has no merged weights.", "Use a normal LoRA loader.")
    if not filename_prefix.strip("/ "):
        raise HalfsafeError("The filename prefix is empty.", "Give the file a name, such as diffusion_models/my_model.")
    path, name = output_path(filename_prefix)
    weights = LiveWeights(patcher)
    decisions = plan_storage(_layers(patcher, weights), "as_file" if storage == "auto" else storage, rules)
    storages = {layer: decision.storage for layer, decision in decisions.items()}
    comfy_state.write_weights(path, weights, storages, _metadata(prompt, extra), byte_progress(weights.stored.values()), name)
    return name


def _layers(patcher: ModelPatcher, weights: LiveWeights) -> list[LayerSpec]:
    classes = {name: type(module).__name__ for name, module in modules_of(patcher.model).items()}
    stored = ((name.removesuffix(".weight"), weight) for name, weight in weights.stored.items() if name.endswith(".weight"))
    return [LayerSpec(name, classes[name], weight.shape) for name, weight in stored if name in classes]


def _sampling_marks(patcher: ModelPatcher) -> dict[str, StoredWeight]:
    """The keys by which ComfyUI's loaders tell how a model of the SD family predicts; see its ``ModelSave``."""
    sampling, marks = patcher.get_model_object("model_sampling"), {}
    if isinstance(sampling, comfy.model_sampling.V_PREDICTION):
        if isinstance(sampling, comfy.model_sampling.ModelSamplingContinuousEDM):
            marks["edm_vpred.sigma_max"] = torch.tensor(sampling.sigma_max).float()
            marks["edm_vpred.sigma_min"] = torch.tensor(sampling.sigma_min).float()
        if patcher.model.model_type == comfy.model_base.ModelType.V_PREDICTION:
            marks["v_pred"] = torch.tensor([])
            if getattr(sampling, "zsnr", False):
                marks["ztsnr"] = torch.tensor([])
    return {name: StoredWeight(name, tensor) for name, tensor in marks.items()}


def _metadata(prompt: dict | None, extra: dict | None) -> dict[str, str]:
    """The workflow, as ComfyUI embeds it in what it saves, unless its user switched that off."""
    workflow = {} if args.disable_metadata else {"prompt": prompt, **(extra or {})}
    return {"format": "pt", **{key: json.dumps(value) for key, value in workflow.items() if value is not None}}
