"""Text encoders and VAEs through ComfyUI's own loaders."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import nodes
import torch

from ....precision.base.dtypes import QUANTIZED_NAMES, dtype_named, name_of
from ....precision.base.errors import CheckpointError
from ....precision.formats import comfy_format
from ....precision.formats.checkpoint import Checkpoint, StoredWeight
from ....precision.plan.choice import ATTACHMENT, Choice, LoadRecord
from ....precision.plan.facts import file_dtype, layer_specs
from ....precision.plan.memory import plan_encoder
from ....precision.plan.storage import plan_text_encoder
from ..comfyui.model_facts import held_storages
from ..comfyui.weights import ask_for_plain_products
from ..lora.patcher import keep_low_rank_unmerged
from .detection import dequantized_tensors, detect_model, stored_tensors
from .devices import free_host_memory, require_held_by_device, streams_weights, unheld_on
from .files import check_quantized_shapes, open_model
from .lacking import Lacking, lacking_tensors
from .tensors import LoadedTensors, load_tensors

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import CLIP, VAE

FP32_ACTIVATIONS = "ComfyUI runs text encoders with fp32 activations"
CLIP_WORDS, CLIP_LAYER = "text_model.embeddings.token_embedding.weight", "mlp.fc1.weight"
CLIP_NORM = "text_model.final_layer_norm.weight"
VISION = re.compile(r"(^|\.)(visual|vision_\w+|audio_(model|projector)|multi_modal_projector|lm_head)\.")
"""Parts of a text encoder that texts do without."""
ENCODER = re.compile(r"^(encoder|quant_conv)\.")
"""Parts of a VAE that decoding does without."""
logger = logging.getLogger("halfsafe")


def text_encoder_types() -> list[str]:
    """List ComfyUI's own text encoder types: those of its single loader, then those only its dual loader has."""
    single = nodes.CLIPLoader.INPUT_TYPES()["required"]["type"][0]
    dual = nodes.DualCLIPLoader.INPUT_TYPES()["required"]["type"][0]
    return [*single, *(name for name in dual if name not in single)]


def load_text_encoder(
    paths: Sequence[str], kind: str, storage: str, compute: str, disable_dynamic: bool = False
) -> CLIP:
    """Make a CLIP of one to four text encoder files. ``kind``: one of :func:`text_encoder_types`."""
    files = [_open_clip_split(open_model(path)) for path in paths]
    if not any(comfy.sd.detect_te_model(stored_tensors(file)) for file in files):
        raise CheckpointError(
            paths[0], "ComfyUI knows no text encoder like this", advice="Check that it is a text encoder."
        )
    converted = [_converted(file, storage, disable_dynamic) for file in files]
    tensors, choice = [made.tensors for made, _ in converted], converted[0][1]
    notes = [note for made, _ in converted for note in made.notes]
    with lacking_tensors(*paths) as lacking:
        clip = comfy.sd.load_text_encoder_state_dicts(
            list(tensors),
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            # SDXL, which ComfyUI knows by its files, has no type: its nodes' default.
            clip_type=getattr(comfy.sd.CLIPType, kind.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
            model_options=_options(tensors, choice.used) | _clip_sizes(files),
            disable_dynamic=disable_dynamic,
        )
    factory = (_reloaded, (load_text_encoder, paths, kind, storage, compute))
    return _finished(clip, lacking, paths, compute, choice, notes, factory)


def _clip_sizes(files: Sequence[Checkpoint]) -> dict:
    """Return ComfyUI's option for the sizes of a CLIP that comes alone; it knows those of the usual ones by itself.

    ``model_options_long_clip`` in comfy/text_encoders/long_clipl.py takes the option. Every CLIP has heads of 64.
    """
    shapes = {name: weight.shape for name, weight in files[0].weights.items()} if len(files) == 1 else {}
    if CLIP_WORDS not in shapes:
        return {}
    numbers = (re.search(r"encoder\.layers\.(\d+)\.", name) for name in shapes)
    width, layers = shapes[CLIP_WORDS][1], 1 + max((int(number[1]) for number in numbers if number), default=0)
    inner = next(shape[0] for name, shape in shapes.items() if name.endswith(CLIP_LAYER))
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
    return {"model_config": {**sizes, "num_attention_heads": max(1, width // 64)}}


def load_checkpoint_text_encoder(path: str, storage: str, disable_dynamic: bool = False) -> CLIP | None:
    """Load the CLIP of a full checkpoint; None where it holds none."""
    detected = detect_model(open_model(path), only_diffusion_model=False)
    target = detected.config.clip_target(state_dict=stored_tensors(detected.checkpoint))
    encoder = _renamed_by(detected.checkpoint, detected.config.process_clip_state_dict)
    if target is None or not encoder.weights:
        return None
    made, choice = _converted(encoder, storage, disable_dynamic)
    tensors = made.tensors
    with lacking_tensors(path) as lacking:
        clip = comfy.sd.CLIP(
            target,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            tokenizer_data=tensors,
            parameters=comfy.utils.calculate_parameters(tensors),
            state_dict=tensors,
            model_options=_options([tensors], choice.used),
            disable_dynamic=disable_dynamic,
        )
    factory = (_reloaded, (load_checkpoint_text_encoder, path, storage))
    return _finished(clip, lacking, [path], "auto", choice, made.notes, factory)


def _reloaded(load: Callable, *arguments, disable_dynamic: bool = False) -> ModelPatcher:
    """Load a text encoder or a VAE again, for ComfyUI."""
    return load(*arguments, disable_dynamic=disable_dynamic).patcher


def _renamed_by(checkpoint: Checkpoint, process: Callable[[dict], dict]) -> Checkpoint:
    """Rename a checkpoint's tensors as ComfyUI's ``process`` does; those it computes anew are plain."""
    known = {id(weight.data): weight for weight in checkpoint.weights.values()}
    processed = process({name: weight.data for name, weight in checkpoint.weights.items()})
    weights = {
        name: replace(known[id(tensor)], name=name) if id(tensor) in known else StoredWeight(name, tensor)
        for name, tensor in processed.items()
    }
    return replace(checkpoint, weights=weights)


def _open_clip_split(checkpoint: Checkpoint) -> Checkpoint:
    if "transformer.resblocks.0.ln_1.weight" not in checkpoint.weights:
        return checkpoint
    return _renamed_by(checkpoint, lambda tensors: comfy.utils.clip_text_transformers_convert(tensors, "", ""))


def _converted(checkpoint: Checkpoint, storage: str, disable_dynamic: bool) -> tuple[LoadedTensors, Choice]:
    device = comfy.model_management.text_encoder_device()
    default = name_of(comfy.model_management.text_encoder_dtype(device))
    in_16_bit = sum(2 * prod(weight.shape) for weight in checkpoint.weights.values())
    streamed = streams_weights(device, disable_dynamic)
    free = None if streamed else free_host_memory()
    unheld = unheld_on(device)
    choice, decisions = plan_text_encoder(
        layer_specs(checkpoint), storage, file_dtype(checkpoint), default, in_16_bit, free, unheld
    )
    require_held_by_device((decision.storage for decision in decisions.values()), device)
    planned = plan_encoder(checkpoint, choice, decisions, default, held_storages(), streamed, unheld)
    made = load_tensors(checkpoint, planned, read=not streamed)
    notes = [*planned.notes, *made.notes]
    for note in notes:
        logger.info("Halfsafe: %s: %s", checkpoint.path, note)
    return replace(made, tensors={**made.tensors, **_missing_projections(made.tensors)}, notes=notes), choice


def _missing_projections(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make identities for the text projections that CLIP-L files lack, as ComfyUI does for a file of a CLIP-L alone."""
    norms = {name.removesuffix(CLIP_NORM): tensor for name, tensor in tensors.items() if name.endswith(CLIP_NORM)}
    return {
        f"{prefix}text_projection.weight": torch.eye(len(norm), dtype=norm.dtype)
        for prefix, norm in norms.items()
        if f"{prefix}text_projection.weight" not in tensors and f"{prefix}text_projection" not in tensors
    }


def _options(encoders: Sequence[dict[str, torch.Tensor]], storage: str) -> dict:
    quantized = any(name.endswith(".comfy_quant") for tensors in encoders for name in tensors)
    options = {} if storage in (*QUANTIZED_NAMES, "as_file") else {"dtype": dtype_named(storage)}
    return {**options, "quantization_metadata": {"mixed_ops": True}} if quantized else options


def _finished(
    clip: CLIP,
    lacking: Lacking,
    paths: Sequence[str],
    compute: str,
    storage: Choice,
    notes: Sequence[str],
    factory: tuple,
) -> CLIP:
    path = paths[0]
    check_quantized_shapes(clip.cond_stage_model, *paths)
    if filled := lacking.refuse(clip.cond_stage_model, unless=VISION):
        notes = [*notes, f"The file lacks {len(filled)} tensors, {filled[0]} first: images in a prompt give NaN."]
        logger.warning("Halfsafe: %s: %s", path, notes[-1])
    without_effect = () if compute in ("auto", "fp32") else ((f"compute={compute}", FP32_ACTIVATIONS),)
    record = LoadRecord(path, (), storage, without_effect=without_effect, notes=tuple(notes))
    clip.patcher.set_attachments(ATTACHMENT, record)
    clip.patcher.cached_patcher_init = factory
    keep_low_rank_unmerged(clip.patcher)
    if compute == "fp32":
        ask_for_plain_products(clip.patcher)
    logger.info("Halfsafe: %s: storage %s", path, storage)
    for setting, reason in without_effect:
        logger.warning("Halfsafe: %s: %s has no effect: %s", path, setting, reason)
    return clip


def load_vae(path: str, dtype: str, disable_dynamic: bool = False) -> VAE:
    """Load the VAE in a file, computed in ``dtype`` (``auto``: ComfyUI's choice for the device).

    ``disable_dynamic`` is ComfyUI's and changes nothing here.
    """
    checkpoint = open_model(path)
    return _vae(dequantized_tensors(checkpoint), checkpoint, dtype, (_reloaded, (load_vae, path, dtype)))


def load_checkpoint_vae(path: str, dtype: str, disable_dynamic: bool = False) -> VAE | None:
    """Load the VAE of a full checkpoint as :func:`load_vae` does; None where it holds none."""
    detected = detect_model(open_model(path), only_diffusion_model=False)
    prefixes = dict.fromkeys(detected.config.vae_key_prefix, "")
    inside = functools.partial(comfy.utils.state_dict_prefix_replace, replace_prefix=prefixes, filter_keys=True)
    part = _renamed_by(detected.checkpoint, inside)
    if not part.weights:
        return None
    tensors = detected.config.process_vae_state_dict(dequantized_tensors(part))
    return _vae(tensors, part, dtype, (_reloaded, (load_checkpoint_vae, path, dtype)))


def _vae(tensors: dict[str, torch.Tensor], checkpoint: Checkpoint, dtype: str, factory: tuple) -> VAE:
    comfy_format.check_finite(tensors, checkpoint.path)
    with lacking_tensors(checkpoint.path) as lacking:
        vae = comfy.sd.VAE(
            sd=tensors, metadata=checkpoint.metadata, dtype=None if dtype == "auto" else dtype_named(dtype)
        )
    if vae.first_stage_model is None:
        raise CheckpointError(checkpoint.path, "ComfyUI knows no VAE like this", advice="Check that the file is a VAE.")
    if filled := lacking.refuse(vae.first_stage_model, unless=ENCODER):
        first, path = filled[0], checkpoint.path
        logger.warning("Halfsafe: %s: lacks %d tensors, %s first: encoding gives NaN.", path, len(filled), first)
    vae.patcher.cached_patcher_init = factory
    return vae


def vae_in(vae: VAE, dtype: torch.dtype) -> VAE:
    """Return a copy of a VAE that computes in ``dtype``. Its weights stay as they are and are cast at use."""
    clone = copy.copy(vae)
    clone.patcher = vae.patcher.clone()
    clone.patcher.set_model_compute_dtype(dtype)
    clone.vae_dtype = dtype
    return clone
