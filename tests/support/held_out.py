"""Small models of families that Halfsafe has no rules for, in the layout of their files, seeded.

Only names and ranks are those of the real files; sizes are small where ComfyUI's detection permits.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from support import families, narrow, tiny_models
from support.tiny_models import _on_meta, _save, _shapes_of, _unet, sdxl_unet_config


def ltxav(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, metadata: dict | None = None) -> Path:
    """Write an LTX-2 model of two blocks with 32 narrow heads each for picture and sound."""
    from comfy.ldm.lightricks.av_model import LTXAVModel

    model = _on_meta(LTXAVModel, **LTXAV)
    return _save(path, _shapes_of(model), dtype, seed, metadata=metadata)


LTXAV = {
    "num_layers": 2,
    "attention_head_dim": 8,
    "cross_attention_dim": 256,
    "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 128,
    "caption_channels": 32,
    "connector_attention_head_dim": 8,
    "connector_num_attention_heads": 4,
    "connector_num_layers": 1,
}


def minimax_h3(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, metadata: dict | None = None) -> Path:
    """Write a MiniMax H3 model of two narrow blocks."""
    from comfy.ldm.minimax.model import MiniMaxH3Model

    model = _on_meta(MiniMaxH3Model, **MINIMAX_H3)
    return _save(path, _shapes_of(model), dtype, seed, metadata=metadata)


MINIMAX_H3 = {
    "hidden_size": 256,
    "num_layers": 2,
    "token_refiner_num_layers": 1,
    "num_attention_heads": 2,
    "ffn_hidden_size": 512,
    "text_dim": 128,
    "time_embed_hidden_size": 256,
    "time_embed_dim": 128,
}


def metadata(family: str) -> dict[str, str]:
    """The metadata without which ComfyUI does not recognise the sizes of such a small model."""
    return {"config": json.dumps({"transformer": LTXAV})} if family == "ltxav" else {}


def cogvideox(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a CogVideoX model of one block with two heads."""
    from comfy.ldm.cogvideo.model import CogVideoXTransformer3DModel

    model = _on_meta(CogVideoXTransformer3DModel, num_attention_heads=2, num_layers=1, use_rotary_positional_embeddings=True)
    return _save(path, _shapes_of(model), dtype, seed)


def segmind_vega(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write a Segmind Vega UNet, SDXL with fewer transformer blocks: every level 320 channels wide, two of them in the up path."""
    depths = {"transformer_depth": [0, 0, 1, 1, 2, 2], "transformer_depth_output": [0, 0, 0, 1, 0, 0, 1, 0, 0]}
    return _save(path, _shapes_of(_unet(sdxl_unet_config() | depths)), dtype, seed)


def file_and_call(comfy, family: str, path: Path) -> families.Call:
    """Write a family's file and capture a call of its model."""
    {**tiny_models.FAMILIES, **narrow.FAMILIES, **FAMILIES}[family](path)
    return families.capture(families.load(comfy, path, "fp32"), family)


FAMILIES = {"cogvideox": cogvideox}
