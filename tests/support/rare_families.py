"""Small models of families whose sizes ComfyUI fixes: its own classes, detection and conditioning, with smaller numbers.

ComfyUI reads of their files which family they are and takes the sizes of the published model, of up to 17 billion parameters. Here
the file's metadata names smaller ones: see `support/tiny_models.py`.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import torch
from safetensors.torch import save_file
from support.families import noise
from support.tiny_models import shapes_of, sized, tensors_of_shapes, with_weights, write_shapes

CLASSES = {
    "hidream": "comfy.ldm.hidream.model.HiDreamImageTransformer2DModel",
    "ace15": "comfy.ldm.ace.ace_step15.AceStepConditionGenerationModel",
    "omnigen2": "comfy.ldm.omnigen.omnigen2.OmniGen2Transformer2DModel",
    "pixart": "comfy.ldm.pixart.pixartms.PixArtMS",
    "mochi": "comfy.ldm.genmo.joint_model.asymm_models_joint.AsymmDiTJoint",
    "stable_audio": "comfy.ldm.audio.dit.AudioDiffusionTransformer",
    "hunyuan_video15": "comfy.ldm.hunyuan_video.model.HunyuanVideo",
    "svd": "comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel",
    "cosmos1": "comfy.ldm.cosmos.model.GeneralDIT",
    "cosmos2": "comfy.ldm.cosmos.predict2.MiniTrainDIT",
    "anima": "comfy.ldm.anima.model.Anima",
    "cogvideox": "comfy.ldm.cogvideo.model.CogVideoXTransformer3DModel",
    "kandinsky5": "comfy.ldm.kandinsky5.model.Kandinsky5",
    "stable_cascade": "comfy.ldm.cascade.stage_c.StageC",
    "ltxav": "comfy.ldm.lightricks.av_model.LTXAVModel",
    "minimax_h3": "comfy.ldm.minimax.model.MiniMaxH3Model",
}
COSMOS = {
    **dict(
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1
    ),
    **dict(
        concat_padding_mask=True,
        model_channels=128,
        num_blocks=4,
        num_heads=2,
        crossattn_emb_channels=64,
        pos_emb_cls="rope3d",
    ),
    **dict(use_adaln_lora=True, adaln_lora_dim=32),
}
SMALL = {
    "hidream": {
        **dict(num_layers=1, num_single_layers=1, num_attention_heads=1, attention_head_dim=128, caption_channels=[64, 64]),
        **dict(llama_layers=[0, 1], text_emb_dim=32, in_channels=16, patch_size=2, axes_dims_rope=[64, 32, 32]),
        **dict(max_resolution=[128, 128], num_routed_experts=4, num_activated_experts=2, out_channels=16),
    },
    "ace15": {
        **dict(hidden_size=64, intermediate_size=128, num_heads=2, num_kv_heads=2, head_dim=32, num_dit_layers=2, fsq_dim=64),
        **dict(encoder_hidden_size=64, encoder_intermediate_size=128, encoder_num_heads=2, text_hidden_dim=64),
        **dict(num_lyric_layers=1, num_timbre_layers=1, num_tokenizer_layers=1),
    },
    "omnigen2": {
        **dict(hidden_size=128, num_layers=1, num_refiner_layers=1, num_attention_heads=2, num_kv_heads=1, text_feat_dim=64),
        **dict(axes_dim_rope=[16, 24, 24], axes_lens=[1024, 1664, 1664], timestep_scale=1000.0),
    },
    "pixart": {**dict(hidden_size=96, num_heads=2, depth=2, caption_channels=64, in_channels=4, model_max_length=16, pe_interpolation=1)},
    "mochi": {
        **dict(hidden_size_x=128, hidden_size_y=64, depth=2, num_heads=2, t5_feat_dim=64, t5_token_length=16, in_channels=12),
        **dict(mlp_ratio_x=96.0, learn_sigma=False, use_t5=True, qk_norm=True, qkv_bias=False, out_bias=True, timestep_scale=1000.0),
    },
    "stable_audio": {
        **dict(embed_dim=64, num_heads=2, depth=2, cond_token_dim=768, project_cond_tokens=True, global_cond_dim=1536, io_channels=64),
    },
    "hunyuan_video15": {
        **dict(in_channels=65, out_channels=32, vec_in_dim=None, context_in_dim=64, hidden_size=256, mlp_ratio=4.0, num_heads=2),
        **dict(depth=1, depth_single_blocks=0, axes_dim=[16, 56, 56], theta=256, patch_size=[1, 1, 1], qkv_bias=True),
        **dict(guidance_embed=False, byt5=True, meanflow=False, use_cond_type_embedding=True, vision_in_dim=1152, meanflow_sum=True),
    },
    "svd": {
        **dict(image_size=32, in_channels=8, out_channels=4, model_channels=64, channel_mult=[1, 1], num_res_blocks=[1, 1]),
        **dict(transformer_depth=[1, 0], transformer_depth_output=[1, 1, 0, 0]),
        **dict(transformer_depth_middle=1, use_spatial_transformer=True, use_linear_in_transformer=True, context_dim=1024, legacy=False),
        **dict(num_classes="sequential", adm_in_channels=768, num_head_channels=64, use_temporal_attention=True, use_temporal_resblock=True),
        **dict(extra_ff_mix_layer=True, use_spatial_context=True, merge_strategy="learned_with_images", merge_factor=0.0),
        **dict(video_kernel_size=[3, 1, 1], disable_temporal_crossattention=False),
    },
    "cosmos1": {
        **COSMOS,
        **dict(block_config="FA-CA-MLP", block_x_format="THWBD", affline_emb_norm=True, extra_per_block_abs_pos_emb=True),
        **dict(extra_per_block_abs_pos_emb_type="learnable"),
    },
    "cosmos2": COSMOS,
    "anima": {**COSMOS, "crossattn_emb_channels": 1024},
    "cogvideox": dict(num_attention_heads=2, num_layers=2, use_rotary_positional_embeddings=True),
    "kandinsky5": {
        **dict(model_dim=128, ff_dim=256, time_dim=64, in_text_dim=64, axes_dims=[32, 48, 48]),
        **dict(num_text_blocks=1, num_visual_blocks=2),
    },
    "stable_cascade": {
        **dict(c_cond=64, c_hidden=[64, 64], nhead=[2, 2], blocks=[[1, 2], [2, 1]], c_clip_text=64, c_clip_text_pooled=64),
    },
    "ltxav": {
        **dict(num_layers=2, attention_head_dim=8, cross_attention_dim=256, audio_attention_head_dim=4, audio_cross_attention_dim=128),
        **dict(caption_channels=32, connector_attention_head_dim=8, connector_num_attention_heads=4, connector_num_layers=1),
    },
    "minimax_h3": {
        **dict(hidden_size=256, num_layers=2, token_refiner_num_layers=1, num_attention_heads=2, ffn_hidden_size=512),
        **dict(text_dim=128, time_embed_hidden_size=256, time_embed_dim=128),
    },
}  # fmt: skip
PUBLISHED = {"svd": {"model_channels": 320, "num_head_channels": 64, "transformer_depth": [1, 1, 1, 1, 1, 1, 0, 0]}}
LOUD = {
    "hidream": {r"single_stream_blocks\.0\.block\.attn1\.to_out\.weight": 1e6},
    "ace15": {r"decoder\.layers\.1\.mlp\.down_proj\.weight": 1e6},
    "omnigen2": {r"^layers\.0\.feed_forward\.linear_2\.weight": 1e6},
    "pixart": {r"blocks\.1\.mlp\.fc2\.weight": 1e6},
    "mochi": {r"blocks\.1\.mlp_x\.w2\.weight": 1e6},
    "stable_audio": {r"transformer\.layers\.1\.ff\.ff\.2\.weight": 1e6},
    "hunyuan_video15": {r"double_blocks\.0\.img_mlp\.2\.weight": 1e7},
    "ltxav": {r"transformer_blocks\.1\.ff\.net\.2\.weight": 1e6},
    "minimax_h3": {r"^blocks\.1\.mlp\.fc2\.weight": 1e6},
}
WIDTH = {
    "hidream": 64,
    "ace15": 64,
    "omnigen2": 64,
    "pixart": 64,
    "mochi": 64,
    "stable_audio": 768,
    "hunyuan_video15": 64,
    "ltxav": 32,
}
WIDTH |= {
    "krea2": 256,
    "svd": 1024,
    "cosmos1": 64,
    "cosmos2": 64,
    "anima": 1024,
    "cogvideox": 4096,
    "kandinsky5": 64,
    "stable_cascade": 64,
}


def write(family: str, path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a family's file, with the sizes it needs in its metadata."""
    import comfy.ops

    module, _, name = CLASSES[family].rpartition(".")
    build = getattr(importlib.import_module(module), name)
    with with_weights():
        shapes = shapes_of(
            build(**SMALL[family], dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
        )
    if family != "stable_audio":
        return write_shapes(path, shapes, dtype, seed, metadata=sized(SMALL[family], PUBLISHED.get(family)))
    tensors = dict(tensors_of_shapes(shapes, dtype, seed)) | _embedders_of_seconds(seed)
    save_file(tensors, str(path), metadata=sized(SMALL[family]))
    return path


def _embedders_of_seconds(seed: int) -> dict[str, torch.Tensor]:
    from comfy.ldm.audio.embedders import NumberConditioner

    with with_weights():
        shapes = shapes_of(NumberConditioner(768))
    made = {start: tensors_of_shapes(shapes, torch.float32, seed) for start in ("seconds_start", "seconds_total")}
    return {
        f"conditioner.conditioners.{start}.{name}": tensor
        for start, tensors in made.items()
        for name, tensor in tensors
    }


def conditioning(family: str, batch: int = 1, length: int = 16, seed: int = 1) -> list:
    """Random conditioning with what the family's nodes put beside the text."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=generator)

    text, mask = random(length, WIDTH.get(family, 128)), torch.ones(batch, length, dtype=torch.long)
    extra = {
        "hidream": {"pooled_output": random(32), "conditioning_llama3": random(2, length, 64)},
        "ace15": {"conditioning_lyrics": random(length, 64)},
        "omnigen2": {"attention_mask": mask},
        "pixart": {"width": 64, "height": 64},
        "mochi": {"attention_mask": mask},
        "hunyuan_video15": {"pooled_output": random(768), "conditioning_byt5small": random(4, 1472)},
        "kandinsky5": {"pooled_output": random(768)},
        "stable_cascade": {"pooled_output": random(64)},
    }
    return [[text, extra.get(family, {})]]


def latent(family: str, model, batch: int = 1):
    """A seeded latent of the family's shape."""
    from comfy.nested_tensor import NestedTensor

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=torch.Generator().manual_seed(2))

    made = {"ace15": (64, 16), "stable_audio": (64, 16)}
    if family in made:
        return random(*made[family])
    if family in ("ltxav", "minimax_h3"):
        audio = random(8, 4, 16) if family == "ltxav" else random(32, 2, 8)
        return NestedTensor([random(128 if family == "ltxav" else 24, 1, 4, 4), audio])
    return noise(model, batch, size=34 if family == "pixart" else 8)


def sample(model, family: str, steps: int = 2, cond: list | None = None, batch: int = 1):
    """A latent from ComfyUI's sampler."""
    import comfy.sample

    cond, start = cond or conditioning(family, batch), latent(family, model, batch)
    result = comfy.sample.sample(model, start, steps, 1.0, "euler", "simple", cond, cond, start * 0.0, seed=1)
    return torch.cat([part.flatten() for part in result.unbind()]) if getattr(result, "is_nested", False) else result


FAMILIES = tuple(LOUD)
# family -> kind -> {pattern of tensor names: factor}
OVERFLOWS = {family: {"ffn": factors} for family, factors in LOUD.items()}
OVERFLOWS["minimax_h3"] |= {
    "residual": {r"^blocks\.\d\.(attn\.out_proj|mlp\.fc2)\.weight": 1e6},
    "attention": {r"^blocks\.\d\.attn\.[qk]_norm\.weight": 200},
    "text adapter": {r"^token_refiner\.blocks\.0\.mlp\.fc2\.weight": 1e6},
}
