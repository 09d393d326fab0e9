"""Collect the tensors and metadata by which ComfyUI detects a saved model."""

from __future__ import annotations

import json

import comfy.model_base
import comfy.model_sampling
import torch
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher

from ....precision.base.errors import CheckpointError
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.files.tensor_file import TensorFile
from ....precision.formats.card import source_of
from ....precision.formats.checkpoint import lasting_metadata
from ....precision.formats.stored_weight import StoredWeight
from ..comfyui.model_facts import record_of

# Modules of a model outside its denoiser -> their names in a file; get_model of Stable Audio 1 and 3 and of Stable
# Zero123 (comfy/supported_models.py) reads them there.
OUTSIDE = {
    "seconds_start_embedder.": "conditioner.conditioners.seconds_start.",
    "seconds_total_embedder.": "conditioner.conditioners.seconds_total.",
    "padding_embedding": "conditioner.conditioners.prompt.padding_embedding",
    "cc_projection.": "cc_projection.",
}
WORKFLOW_KEYS = ("prompt", "workflow")


def marks_of(patcher: ModelPatcher) -> dict[str, StoredWeight]:
    """Collect the tensors outside the diffusion model by which ComfyUI's loaders know and complete a model."""
    state = patcher.model.state_dict()
    outside = {
        there + name.removeprefix(here): tensor
        for here, there in OUTSIDE.items()
        for name, tensor in state.items()
        if name.startswith(here)
    }
    return {name: StoredWeight(name, tensor) for name, tensor in {**outside, **_sampling_marks(patcher)}.items()}


def _sampling_marks(patcher: ModelPatcher) -> dict[str, torch.Tensor]:
    """Make the keys by which the loaders tell how a model of the SD family predicts; see ``SDXL.model_type`` there."""
    sampling = patcher.get_model_object("model_sampling")
    kind = patcher.model.model_type
    if kind == comfy.model_base.ModelType.EDM:
        latent = patcher.model.latent_format
        return {"edm_mean": latent.latents_mean.clone(), "edm_std": latent.latents_std.clone()}
    marks = {}
    if isinstance(sampling, comfy.model_sampling.V_PREDICTION):
        if isinstance(sampling, comfy.model_sampling.ModelSamplingContinuousEDM):
            marks["edm_vpred.sigma_max"] = torch.tensor(sampling.sigma_max).float()
            marks["edm_vpred.sigma_min"] = torch.tensor(sampling.sigma_min).float()
        if kind == comfy.model_base.ModelType.V_PREDICTION:
            marks["v_pred"] = torch.tensor([])
            if getattr(sampling, "zsnr", False):
                marks["ztsnr"] = torch.tensor([])
    return marks


def metadata_of(patcher: ModelPatcher, prompt: dict | None, extra: dict | None) -> dict[str, str]:
    """Compose the metadata of a saved file: that of the file the model came from, and this workflow in place of its
    own.

    ComfyUI's detection reads it: the ``config`` of LTX-Video, LTX-2, Wan and MiniMax H3 (``comfy/model_detection.py``).
    The workflow is left out where ComfyUI's user switched that off.
    """
    file = _source(patcher)
    lasting = lasting_metadata(file.metadata) if file else {}
    source = {key: value for key, value in lasting.items() if key not in WORKFLOW_KEYS}
    workflow = {} if args.disable_metadata else {"prompt": prompt, **(extra or {})}
    written = {key: json.dumps(value) for key, value in workflow.items() if value is not None}
    return {"format": "pt", **source, **written}


def source_of_model(patcher: ModelPatcher) -> dict[str, object]:
    """Describe the file that a model was loaded from, if known."""
    file = _source(patcher)
    return source_of(file) if file else {}


def source_path_of(patcher: ModelPatcher) -> str:
    """Return the path of the file that a model was loaded from; "" if it is not known."""
    record = record_of(patcher)
    path = record.file if record else next(iter((patcher.cached_patcher_init or (None, ()))[1]), None)
    return path if isinstance(path, str) else ""


def _source(patcher: ModelPatcher) -> TensorFile | None:
    path = source_path_of(patcher)
    try:
        return open_checkpoint(path) if path else None
    except (CheckpointError, OSError):
        return None
