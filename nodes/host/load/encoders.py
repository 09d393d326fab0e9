"""Text encoders and VAEs through ComfyUI's own loaders."""

from __future__ import annotations

import copy
import functools
import logging
import re
from collections.abc import Callable, Sequence

import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths
import nodes
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.sd import CLIP, VAE

from ....precision.arithmetic.casting import promoting
from ....precision.base.dtypes import QUANTIZED_NAMES, dtype_named, name_of
from ....precision.base.errors import CheckpointError
from ....precision.base.options import ComputeOption, StorageOption
from ....precision.formats import comfy_format
from ....precision.formats.checkpoint import Checkpoint
from ....precision.plan.choice import Choice, WithoutEffect
from ....precision.plan.layers import LoadTarget
from ....precision.plan.load import ModelPlan, plan_encoder
from ..comfyui.model_facts import held_storages, keep_record
from ..comfyui.weights import ask_for_plain_products
from .detection import recognised, renamed_by, stored_tensors
from .devices import device_at, free_host_memory, streams_weights
from .files import open_model
from .lacking import lacking_tensors
from .models import attach, hold_as_made, tell
from .tensors import load_tensors

logger = logging.getLogger("halfsafe")
FP32_ACTIVATIONS = "ComfyUI runs text encoders with fp32 activations"
OPEN_CLIP = "transformer.resblocks.0.ln_1.weight"
CLIP_WORDS = "text_model.embeddings.token_embedding.weight"
CLIP_POSITIONS = "text_model.embeddings.position_embedding.weight"
CLIP_LAYER = "mlp.fc1.weight"
IN_CHECKPOINT = re.compile(rf"(clip_\w+)\.transformer\.{re.escape(CLIP_WORDS)}")
"""The words of a CLIP in a full checkpoint, by ComfyUI's names."""
CLIP_NORM = "text_model.final_layer_norm.weight"
VISION = re.compile(r"(^|\.)(visual|vision_\w+|audio_(model|projector)|multi_modal_projector|lm_head)\.")
"""Parts of a text encoder that texts do without."""
ENCODER = re.compile(r"^(encoder|quant_conv)\.")
"""Parts of a VAE that decoding does without."""
PROMOTED = "halfsafe.promoted"
VAE_CALLS = ("decode", "encode", "decode_tiled", "encode_tiled")
"""The methods of a VAE's module that ComfyUI's ``VAE`` and nodes call."""


def text_encoder_types() -> list[str]:
    """List ComfyUI's own text encoder types: those of its single loader, then those only its dual loader has."""
    single = nodes.CLIPLoader.INPUT_TYPES()["required"]["type"][0]
    dual = nodes.DualCLIPLoader.INPUT_TYPES()["required"]["type"][0]
    return [*single, *(name for name in dual if name not in single)]


def load_text_encoder(
    paths: Sequence[str], kind: str, storage: StorageOption, compute: ComputeOption, disable_dynamic: bool = False
) -> CLIP:
    """Make a CLIP of one to four text encoder files. ``kind``: one of :func:`text_encoder_types`."""
    files = [_open_clip_split(open_model(path)) for path in paths]
    if not any(comfy.sd.detect_te_model(stored_tensors(file)) for file in files):
        raise CheckpointError(
            paths[0], "ComfyUI does not recognise this text encoder", advice="Check that it is a text encoder."
        )
    sizes = _clip_sizes(files[0]) if len(files) == 1 else {}

    def make(tensors: list[dict], options: dict) -> CLIP:
        return comfy.sd.load_text_encoder_state_dicts(
            tensors,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            # SDXL, which ComfyUI knows by its files, has no type: its nodes' default.
            clip_type=getattr(comfy.sd.CLIPType, kind.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
            model_options=options | ({"model_config": sizes} if sizes else {}),
            disable_dynamic=disable_dynamic,
        )

    return _loaded(files, make, storage, compute, disable_dynamic, (load_text_encoder, paths, kind, storage, compute))


def _open_clip_split(checkpoint: Checkpoint) -> Checkpoint:
    if OPEN_CLIP not in checkpoint.weights:
        return checkpoint
    return renamed_by(checkpoint, lambda tensors: comfy.utils.clip_text_transformers_convert(tensors, "", ""))


def _clip_sizes(file: Checkpoint, prefix: str = "") -> dict[str, int]:
    """Return the sizes of the CLIP below a prefix as ComfyUI's config has them; empty without one.

    ComfyUI knows those of the usual ones by itself, and takes others as an option (``model_options_long_clip`` in
    comfy/text_encoders/long_clipl.py). Every CLIP has heads of 64.
    """
    start = len(prefix)
    shapes = {name[start:]: weight.shape for name, weight in file.weights.items() if name.startswith(prefix)}
    if CLIP_WORDS not in shapes:
        return {}
    numbers = (re.search(r"encoder\.layers\.(\d+)\.", name) for name in shapes)
    width = shapes[CLIP_WORDS][1]
    layers = 1 + max((int(number[1]) for number in numbers if number), default=0)
    inner = next(shape[0] for name, shape in shapes.items() if name.endswith(CLIP_LAYER))
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner}
    positions = {"max_position_embeddings": shapes[CLIP_POSITIONS][0]} if CLIP_POSITIONS in shapes else {}
    return {**sizes, **positions, "num_attention_heads": max(1, width // 64)}


def load_checkpoint_text_encoder(path: str, storage: StorageOption, disable_dynamic: bool = False) -> CLIP | None:
    """Load the CLIP of a full checkpoint; None where it holds none."""
    checkpoint, _, config = recognised(open_model(path))
    target = config.clip_target(state_dict=stored_tensors(checkpoint))
    encoder = renamed_by(checkpoint, config.process_clip_state_dict)
    if target is None or not encoder.weights:
        return None
    clips = [found[1] for name in encoder.weights if (found := IN_CHECKPOINT.fullmatch(name))]
    sizes = {clip: _clip_sizes(encoder, f"{clip}.transformer.") for clip in clips}
    # LongCLIP has 248 positions. ComfyUI takes them of files with an encoder alone (Comfy-Org/ComfyUI#7538).
    lengths = {
        f"{clip}_max_length": own["max_position_embeddings"]
        for clip, own in sizes.items()
        if "max_position_embeddings" in own
    }

    def make(tensors: list[dict], options: dict) -> CLIP:
        return comfy.sd.CLIP(
            target,
            embedding_directory=folder_paths.get_folder_paths("embeddings"),
            tokenizer_data=tensors[0] | lengths,
            parameters=comfy.utils.calculate_parameters(tensors[0]),
            state_dict=tensors[0],
            model_options=options | {f"{clip}_model_config": own for clip, own in sizes.items()},
            disable_dynamic=disable_dynamic,
        )

    return _loaded([encoder], make, storage, "auto", disable_dynamic, (load_checkpoint_text_encoder, path, storage))


def _loaded(
    files: Sequence[Checkpoint], make: Callable, storage: StorageOption, compute: ComputeOption,
    disable_dynamic: bool, again: tuple,
) -> CLIP:  # fmt: skip
    paths = list(dict.fromkeys(file.path for file in files))
    plans, tensors = zip(*(_converted(file, storage, disable_dynamic) for file in files), strict=True)
    with lacking_tensors(*paths) as lacking:
        clip = make(list(tensors), _options(plans))
    lacks = lacking.refuse(clip.cond_stage_model, VISION, "images in a prompt give NaN")
    hold_as_made(clip.patcher)
    idle = [] if compute in ("auto", "fp32") else [WithoutEffect(f"compute={compute}", FP32_ACTIVATIONS)]
    plan = ModelPlan(
        plans[0].storage,
        {layer: own for each in plans for layer, own in each.layers.items()},
        without_effect=tuple(idle),
        notes=(*(note for each in plans for note in each.notes), *lacks),
        costs=tuple(cost for each in plans for cost in each.costs),
        file=paths[0],
        dialects=tuple(dict.fromkeys(dialect for file in files for dialect in file.dialects)),
        below_16_bit=sum(each.below_16_bit for each in plans),
    )
    attach(clip.patcher, plan)
    clip.patcher.cached_patcher_init = (_reloaded, again)
    if compute == "fp32":
        ask_for_plain_products(clip.patcher)
    return clip


def _reloaded(load: Callable, *arguments, disable_dynamic: bool = False) -> ModelPatcher:
    """Load a text encoder or a VAE again, for ComfyUI."""
    return load(*arguments, disable_dynamic=disable_dynamic).patcher


def _converted(checkpoint: Checkpoint, storage: str, disable_dynamic: bool) -> tuple[ModelPlan, dict]:
    device = comfy.model_management.text_encoder_device()
    default = name_of(comfy.model_management.text_encoder_dtype(device))
    streamed = streams_weights(device, disable_dynamic)
    free = free_host_memory()
    target = LoadTarget(device_at(device), free, held_storages(), free if streamed else None)
    plan = plan_encoder(checkpoint, storage, default, target)
    plan, tensors = load_tensors(checkpoint, plan, read=not streamed)
    return plan, tensors | _missing_projections(tensors)


def _missing_projections(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make identities for the text projections that CLIP-L files lack, as ComfyUI does for a file of a CLIP-L alone."""
    norms = {name.removesuffix(CLIP_NORM): tensor for name, tensor in tensors.items() if name.endswith(CLIP_NORM)}
    return {
        f"{prefix}text_projection.weight": torch.eye(len(norm), dtype=norm.dtype)
        for prefix, norm in norms.items()
        if f"{prefix}text_projection.weight" not in tensors and f"{prefix}text_projection" not in tensors
    }


def _options(plans: Sequence[ModelPlan]) -> dict:
    storage = plans[0].storage.used
    quantized = any(own.declared for plan in plans for own in plan.weights.values())
    options = {} if storage in (*QUANTIZED_NAMES, "as_file") else {"dtype": dtype_named(storage)}
    return {**options, "quantization_metadata": {"mixed_ops": True}} if quantized else options


def load_vae(path: str, dtype: str, whole: bool = False, disable_dynamic: bool = False) -> VAE:
    """Load the VAE in a file, computed in ``dtype`` (``auto``: ComfyUI's choice for the device).

    ``whole``: the file is a full checkpoint; if it holds no VAE, the result is as of ComfyUI's loader: a VAE without a
    module, whose use raises an error that says so. ``disable_dynamic`` is ComfyUI's and changes nothing here.
    """
    checkpoint = open_model(path)
    config = None
    if whole:
        checkpoint, _, config = recognised(checkpoint)
        prefixes = dict.fromkeys(config.vae_key_prefix, "")
        inside = functools.partial(comfy.utils.state_dict_prefix_replace, replace_prefix=prefixes, filter_keys=True)
        checkpoint = renamed_by(checkpoint, inside)
        if not checkpoint.weights:
            return comfy.sd.VAE(sd={})
    tensors = stored_tensors(checkpoint, unpacked=True)
    tensors = config.process_vae_state_dict(tensors) if config else tensors
    comfy_format.check_finite(tensors, path)
    notes = [*checkpoint.notes, *checkpoint.zero_notes()]
    with lacking_tensors(path) as lacking:
        vae = comfy.sd.VAE(
            sd=tensors, metadata=checkpoint.metadata, dtype=None if dtype == "auto" else dtype_named(dtype)
        )
    if vae.first_stage_model is None:
        raise CheckpointError(path, "ComfyUI does not recognise this VAE", advice="Check that the file is a VAE.")
    lacking.refuse(vae.first_stage_model, ENCODER, "encoding gives NaN")
    if not vae.patcher.is_dynamic():  # ComfyUI notes no dtype for a Linear that it makes without one: ``hold_as_made``
        vae.first_stage_model.to(vae.vae_dtype)
    choice = Choice(dtype, name_of(vae.vae_dtype))
    record = ModelPlan(choice, notes=tuple(notes), file=checkpoint.path, dialects=checkpoint.dialects)
    keep_record(vae.patcher, record)
    tell(record)
    vae.patcher.cached_patcher_init = (_reloaded, (load_vae, path, dtype, whole))
    return vae


def vae_in(vae: VAE, dtype: torch.dtype) -> VAE:
    """Return a copy of a VAE that computes in ``dtype``. Its weights stay as they are and are cast at use."""
    clone = copy.copy(vae)
    clone.patcher = vae.patcher.clone()
    clone.patcher.set_model_compute_dtype(dtype)
    # ComfyUI casts the weights of its own operations alone, and not those with parameters below them (``_load_list`` in
    # comfy/model_patcher.py), such as convolutions with a weight norm; SeedVR2's code casts to its weights' dtype.
    promoted = functools.partial(promoting, casts=dtype != torch.float32)
    calls = [name for name in VAE_CALLS if hasattr(vae.first_stage_model, name)]
    for name in calls:
        clone.patcher.add_object_patch(name, promoted(vae.patcher.get_model_object(name)))

    def on_other_weights(patcher: ModelPatcher, made: ModelPatcher) -> None:
        # For another device ComfyUI clones a patcher onto a model of its own (``deepclone_multigpu`` there).
        if made.model is not patcher.model:
            for name in calls:
                made.add_object_patch(name, promoted(getattr(made.model, name)))

    clone.patcher.add_callback_with_key(CallbacksMP.ON_CLONE, PROMOTED, on_other_weights)
    clone.vae_dtype = dtype
    return clone
