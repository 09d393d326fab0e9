"""Layers whose dtype model code fixes itself: they run in another dtype than their neighbours."""

import re

import torch

CAST_TO_FP32 = "fp32"
OWN_WEIGHT = "weight"
CASTS = {
    "comfy.ldm.wan": (re.compile(r"(\w+_)?patch_embedding(_\w+)?"), CAST_TO_FP32),
    "comfy.ldm.minimax": (
        re.compile(r"(video|audio)_patch_proj|time_embedder(\..+)?|(.+\.)?(video|audio)_out"),
        CAST_TO_FP32,
    ),
    "comfy.ldm.audio": (re.compile(r"timestep_features"), CAST_TO_FP32),
    "comfy.ldm.cogvideo": (re.compile(r"patch_embed\.(text_)?proj"), OWN_WEIGHT),
}
"""Where ComfyUI has a model's class -> names of layers, and what its code gives them: fp32, or their weight's dtype."""


def own_cast(model: torch.nn.Module, name: str) -> str:
    """Tell what the code around a layer casts its input to: ``fp32``, the dtype of its own ``weight``, or empty."""
    for base in type(model).__mro__:
        names, cast = CASTS.get(base.__module__.rpartition(".")[0], (None, ""))
        if names and names.fullmatch(name):
            return cast
    return ""
