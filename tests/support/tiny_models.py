"""Genuine safetensors of small random models that ComfyUI detects as the real families.

Tensor names and ranks are those of the real files; only the sizes are small, where detection permits. Weights are
seeded, with variance 1/fan_in, so that outputs stay finite and far from zero. `wan`, `wan_1_3b_shaped` and `clip_l`
need only torch; the others build ComfyUI's own module on the meta device to read its shapes.

ComfyUI reads of some files which family they are and takes the sizes of the published model: one block of `qwen_image` is 0.4
billion parameters. While `small_sizes` is in effect, a file whose metadata has ``sizes`` is built with those, and found to be of its
family by the numbers in ``published``: so are the models of `NARROW` and of `rare_families`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

Shapes = dict[str, tuple[int, ...]]
POOL_SIZE = 1 << 23
DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}


def wan(
    path: Path,
    dtype: torch.dtype = torch.bfloat16,
    dim: int = 256,
    blocks: int = 2,
    ffn: int = 1024,
    in_dim: int = 16,
    text_dim: int = 4096,
    seed: int = 0,
    scale: dict[str, float] | None = None,
) -> Path:
    """Write a Wan2.1 text-to-video model. `scale` multiplies the named tensors, to make layers overflow on purpose."""
    config = {} if text_dim == 4096 else {"config": json.dumps({"transformer": {"text_dim": text_dim}})}
    return write_shapes(path, wan_shapes(dim, blocks, ffn, in_dim, text_dim), dtype, seed, scale=scale, metadata=config)


def wan_overflowing(path: Path, **options: object) -> Path:
    """Write a Wan2.1 model that is finite in bf16 and fp32 and overflows in fp16, in `blocks.0.ffn.2`."""
    return wan(path, scale={"blocks.0.ffn.0.weight": 128.0, "blocks.0.ffn.2.weight": 2048.0}, **options)


def wan_1_3b_shaped(path: Path, seed: int = 0) -> Path:
    """Stream a bf16 file with the shapes of Wan2.1 T2V 1.3B: 1.42 billion parameters, 2.84 GB."""
    shapes = wan_shapes(dim=1536, blocks=30, ffn=8960, in_dim=16, text_dim=4096)
    return _stream(path, shapes, torch.bfloat16, seed)


def wan_1_3b_part(path: Path, seed: int = 0) -> Path:
    """Stream 8 of the 30 blocks of :func:`wan_1_3b_shaped`: 0.40 billion parameters, 0.80 GB."""
    shapes = wan_shapes(dim=1536, blocks=8, ffn=8960, in_dim=16, text_dim=4096)
    return _stream(path, shapes, torch.bfloat16, seed)


def clip_l(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Stream a CLIP-L text encoder of its real size, 123 million parameters: ComfyUI fixes every dimension of it."""
    return _stream(path, clip_l_shapes(), dtype, seed)


def narrow_clip_l(path: Path) -> Path:
    """Stream a CLIP-L text encoder of 256 channels and six layers, 17 million parameters, which the pack's Load CLIP takes alone."""
    return _stream(path, clip_l_shapes(256, 6), torch.float16, 0)


def wan_vae(path: Path, dtype: torch.dtype = torch.float32, dim: int = 16, seed: int = 0) -> Path:
    """Write a Wan2.1 VAE, 16 latent channels, 8x spatial and 4x temporal compression."""
    import comfy.ldm.wan.vae as module

    options = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
    with with_weights(), torch.device("meta"):
        model = module.WanVAE(dim=dim, z_dim=16, **options)
    return write_shapes(path, shapes_of(model), dtype, seed)


def flux(path: Path, dtype: torch.dtype = torch.bfloat16, hidden: int = 256, seed: int = 0) -> Path:
    """Write a Flux-dev model: one double block, one single block."""
    from comfy.ldm.flux.model import Flux

    config = {
        **dict(in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=hidden, mlp_ratio=4.0),
        **dict(num_heads=hidden // 128, depth=1, depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000),
        **dict(patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[]),
    }
    return write_shapes(path, shapes_of(on_meta(Flux, **config)), dtype, seed)


def sd3(path: Path, dtype: torch.dtype = torch.float16, depth: int = 2, seed: int = 0) -> Path:
    """Write a Stable Diffusion 3 MMDiT; its width is 64 times its depth."""
    from comfy.ldm.modules.diffusionmodules.mmdit import OpenAISignatureMMDITWrapper

    context = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 64 * depth}}
    config = {
        **dict(input_size=None, pos_embed_scaling_factor=None, pos_embed_max_size=192, num_patches=192 * 192),
        **dict(patch_size=2, in_channels=16, out_channels=16, depth=depth, adm_in_channels=2048),
        "context_embedder_config": context,
    }
    return write_shapes(path, shapes_of(on_meta(OpenAISignatureMMDITWrapper, **config)), dtype, seed)


def hunyuan_video(path: Path, dtype: torch.dtype = torch.bfloat16, hidden: int = 256, seed: int = 0) -> Path:
    """Write a HunyuanVideo model: one double block, one single block."""
    from comfy.ldm.hunyuan_video.model import HunyuanVideo

    config = {
        **dict(in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=hidden, mlp_ratio=4.0),
        **dict(num_heads=hidden // 128, depth=1, depth_single_blocks=1, axes_dim=[16, 56, 56], theta=256),
        **dict(patch_size=[1, 2, 2], qkv_bias=True, guidance_embed=True, byt5=False, meanflow=False),
        **dict(use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False),
    }
    return write_shapes(path, shapes_of(on_meta(HunyuanVideo, **config)), dtype, seed)


def ltxv(path: Path, dtype: torch.dtype = torch.bfloat16, head_dim: int = 8, layers: int = 2, seed: int = 0) -> Path:
    """Write an LTX-Video model with 32 heads."""
    from comfy.ldm.lightricks.model import LTXVModel

    model = on_meta(LTXVModel, num_layers=layers, attention_head_dim=head_dim, cross_attention_dim=32 * head_dim)
    return write_shapes(path, shapes_of(model), dtype, seed)


def anima(path: Path, dtype: torch.dtype = torch.bfloat16, hidden: int = 256, seed: int = 0) -> Path:
    """Write an Anima model; its text adapter has its real size, 130 million parameters, which ComfyUI fixes; small under `small_sizes`."""
    from comfy.ldm.anima.model import Anima

    config = {
        **dict(
            max_img_h=240,
            max_img_w=240,
            max_frames=128,
            in_channels=16,
            out_channels=16,
            patch_spatial=2,
            patch_temporal=1,
        ),
        **dict(model_channels=hidden, concat_padding_mask=True, crossattn_emb_channels=1024, pos_emb_cls="rope3d"),
        **dict(pos_emb_learnable=True, use_adaln_lora=True, adaln_lora_dim=256, extra_per_block_abs_pos_emb=False),
    }
    return write_shapes(path, shapes_of(on_meta(Anima, **config)), dtype, seed)


def qwen_image(path: Path, dtype: torch.dtype = torch.bfloat16, layers: int = 1, seed: int = 0) -> Path:
    """Write a Qwen-Image model with one block of the real width."""
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    model = on_meta(QwenImageTransformer2DModel, in_channels=64, num_layers=layers)
    return _stream(path, shapes_of(model), dtype, seed)


def z_image(path: Path, dtype: torch.dtype = torch.bfloat16, layers: int = 2, seed: int = 0) -> Path:
    """Write a Z-Image model of the real width with two layers and the four refiner blocks ComfyUI expects."""
    from comfy.ldm.lumina.model import NextDiT

    return _stream(path, shapes_of(on_meta(NextDiT, **z_image_config(heads=30, layers=layers))), dtype, seed)


def sdxl(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write an SDXL UNet: the real transformer depths, every level 320 channels wide (0.15 billion parameters)."""
    return write_shapes(path, shapes_of(unet(sdxl_unet_config())), dtype, seed)


def segmind_vega(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write a Segmind Vega UNet, SDXL with fewer transformer blocks: every level 320 channels wide, two of them in the up path."""
    depths = {"transformer_depth": [0, 0, 1, 1, 2, 2], "transformer_depth_output": [0, 0, 0, 1, 0, 0, 1, 0, 0]}
    return write_shapes(path, shapes_of(unet(sdxl_unet_config() | depths)), dtype, seed)


def sd15_unet(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write the UNet of :func:`sd15_checkpoint` alone."""
    return write_shapes(path, shapes_of(unet(sd15_unet_config())), dtype, seed)


def sd15_checkpoint(
    path: Path, dtype: torch.dtype = torch.float16, seed: int = 0, layers: int = 12, channels: int = 320
) -> Path:
    """Stream a full Stable Diffusion 1.5 checkpoint: a one-level UNet, so many layers of CLIP-L and a VAE with a narrow decoder."""
    sizes = {} if channels == 320 else {"model_channels": channels}
    parts = {
        "model.diffusion_model.": shapes_of(unet(sd15_unet_config() | sizes)),
        "first_stage_model.": shapes_of(_autoencoder(decoder_channels=32)),
        "cond_stage_model.transformer.": clip_l_shapes(layers=layers),
    }
    shapes = {prefix + k: v for prefix, shapes in parts.items() for k, v in shapes.items()}
    return _stream(path, shapes, dtype, seed, sized(sizes, {"model_channels": 320}) if sizes else {})


def narrow_sd15_checkpoint(path: Path) -> Path:
    """Stream a full Stable Diffusion 1.5 checkpoint with a UNet of 64 channels and two layers of CLIP-L."""
    return sd15_checkpoint(path, layers=2, channels=64)


def sd_vae(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0) -> Path:
    """Write a Stable Diffusion VAE, 4 latent channels, with a narrow decoder (the encoder's width is fixed)."""
    return write_shapes(path, shapes_of(_autoencoder(decoder_channels=32)), dtype, seed)


FAMILIES = {"wan": wan, "flux": flux, "sd3": sd3, "hunyuan_video": hunyuan_video, "ltxv": ltxv, "sdxl": sdxl}
SLOW_FAMILIES = {"qwen_image": qwen_image, "z_image": z_image}


def sized(sizes: dict, published: dict | None = None) -> dict[str, str]:
    """What the metadata of a file of these sizes holds; ``published``: the numbers ComfyUI knows the family by, where they differ."""
    return {"sizes": json.dumps(sizes), "published": json.dumps(published or {})}


@contextlib.contextmanager
def small_sizes() -> Iterator[None]:
    """What ComfyUI detects has the sizes that a file's metadata names, a full checkpoint's CLIP-L the file's layers, and Anima's text adapter
    two of its six blocks, a quarter of its width and its first tokens."""
    from comfy import model_detection
    from comfy.ldm.anima import model as of_anima

    adapter = of_anima.LLMAdapter
    detect_config, detect_class = model_detection.detect_unet_config, model_detection.model_config_from_unet

    def published(state_dict, prefix, metadata=None):
        config = detect_config(state_dict, prefix, metadata=metadata)
        return config and {**config, **_named(metadata, "sizes"), **_named(metadata, "published")}

    def small(*args, metadata=None, **options):
        found = detect_class(*args, metadata=metadata, **options)
        if found is not None:
            found.unet_config |= _named(metadata, "sizes")
            found.clip_target = functools.partial(_with_its_layers, found.clip_target)
        return found

    model_detection.detect_unet_config, model_detection.model_config_from_unet = published, small

    def small_adapter(*args, operations, **options):
        made = adapter(*args, num_layers=2, model_dim=256, num_heads=4, operations=operations, **options)
        placed = {key: options.get(key) for key in ("device", "dtype")}
        made.embed = operations.Embedding(ANIMA_TOKENS, made.embed.embedding_dim, **placed)
        return made

    of_anima.LLMAdapter = small_adapter
    try:
        yield
    finally:
        of_anima.LLMAdapter = adapter
        model_detection.detect_unet_config, model_detection.model_config_from_unet = detect_config, detect_class


def _with_its_layers(clip_target: Callable, state_dict: Iterable[str] = ()) -> object:
    """The class of a full checkpoint's text encoder, of which a CLIP-L has as many layers as the file."""
    target = clip_target(state_dict=state_dict)
    layers = {
        found[1]
        for found in (re.match(r"cond_stage_model\.transformer\..*\.layers\.(\d+)\.", name) for name in state_dict)
        if found
    }
    if target is None or not layers:
        return target
    made, key = target.clip, "clip_l_model_config"

    def with_layers(model_options, **options):
        sizes = model_options.get(key, {}) | {"num_hidden_layers": len(layers)}
        return made(model_options={**model_options, key: sizes}, **options)

    target.clip = with_layers
    return target


def _named(metadata: dict | None, key: str) -> dict:
    return json.loads((metadata or {}).get(key, "{}"))


def narrow_sdxl(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0, shallow: bool = True) -> Path:
    """Write an SDXL UNet 64 channels wide instead of 320, with one head instead of five; ``shallow``: of two levels instead of three, with one block of each kind in each place, where it has up to 20."""
    config = sdxl_unet_config()
    depths = {
        "channel_mult": [1, 1],
        "num_res_blocks": [1, 1],
        "transformer_depth": [0, 1],
        "transformer_depth_output": [0, 0, 1, 1],
    }
    sizes = {"model_channels": 64} | (depths if shallow else {})
    return write_shapes(
        path, shapes_of(unet(config | sizes)), dtype, seed, metadata=sized(sizes, {key: config[key] for key in sizes})
    )


def narrow_sd15(path: Path, dtype: torch.dtype = torch.float16, seed: int = 0, up: int = 1) -> Path:
    """Write the UNet of :func:`sd15_unet` 64 channels wide instead of 320, with ``up`` transformer blocks in the up path instead of two."""
    config = sd15_unet_config()
    sizes = {"model_channels": 64, "transformer_depth_output": [0, up]}
    return write_shapes(
        path, shapes_of(unet(config | sizes)), dtype, seed, metadata=sized(sizes, {key: config[key] for key in sizes})
    )


def narrow_qwen_image(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a Qwen-Image model with 2 heads instead of 24."""
    from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

    sizes = {"num_attention_heads": 2}
    model = on_meta(QwenImageTransformer2DModel, in_channels=64, num_layers=1, **sizes)
    return write_shapes(path, shapes_of(model), dtype, seed, metadata=sized(sizes))


def narrow_z_image(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a Z-Image model with 2 heads instead of 30, and one refiner block of each kind instead of two."""
    from comfy.ldm.lumina.model import NextDiT

    sizes = z_image_config(heads=2) | {"n_refiner_layers": 1}
    return write_shapes(path, shapes_of(on_meta(NextDiT, **sizes)), dtype, seed, metadata=sized(sizes, {"dim": 3840}))


def krea2(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a Krea 2 model with 2 heads of 128 channels instead of 48, and a text width of 128 in 2 layers."""
    from comfy.ldm.krea2.model import SingleStreamDiT

    sizes = {"txtheads": 1, "txtkvheads": 1, "multiplier": 1}
    model = on_meta(SingleStreamDiT, features=256, txtdim=128, heads=2, kvheads=1, layers=2, txtlayers=2, **sizes)
    return write_shapes(path, shapes_of(model), dtype, seed, metadata=sized(sizes))


def chroma(path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Path:
    """Write a Chroma model with 2 heads instead of 24, two double blocks and a single block."""
    from comfy.ldm.chroma.model import Chroma

    sizes = {"num_heads": 2, "out_dim": 256, "hidden_dim": 64, "n_layers": 1}
    config = {
        **dict(
            in_channels=64,
            out_channels=64,
            context_in_dim=4096,
            hidden_size=256,
            mlp_ratio=4.0,
            depth=2,
            depth_single_blocks=1,
        ),
        **dict(
            axes_dim=[16, 56, 56], theta=10000, patch_size=2, qkv_bias=True, in_dim=64, txt_ids_dims=[], vec_in_dim=None
        ),
    }
    return write_shapes(path, shapes_of(on_meta(Chroma, **config, **sizes)), dtype, seed, metadata=sized(sizes))


def lumina2(
    path: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0, layers: int = 2, refiners: int = 2, heads: int = 2
) -> Path:
    """Write a Lumina 2 model with 2 heads of 128 channels instead of 24 of 96."""
    from comfy.ldm.lumina.model import NextDiT

    sizes = {
        **dict(
            patch_size=2,
            in_channels=16,
            dim=128 * heads,
            cap_feat_dim=2304,
            n_layers=layers,
            qk_norm=True,
            n_heads=heads,
            n_kv_heads=1,
        ),
        **({"n_refiner_layers": refiners} if refiners != 2 else {}),
        **dict(axes_dims=[32, 48, 48], axes_lens=[300, 512, 512], rope_theta=10000.0, ffn_dim_multiplier=4.0),
    }
    return write_shapes(path, shapes_of(on_meta(NextDiT, **sizes)), dtype, seed, metadata=sized(sizes, {"dim": 2304}))


ANIMA_TOKENS = 64
"""How many of T5's 32128 tokens Anima's text adapter knows under `small_sizes`."""
NARROW = {"sdxl": narrow_sdxl, "qwen_image": narrow_qwen_image, "z_image": narrow_z_image}
"""For tests of many runs."""


def wan_shapes(dim: int, blocks: int, ffn: int, in_dim: int, text_dim: int) -> Shapes:
    """Tensor names and shapes of a Wan2.1 text-to-video model with 16 output channels."""
    shapes: Shapes = {
        "patch_embedding.weight": (dim, in_dim, 1, 2, 2),
        "patch_embedding.bias": (dim,),
        **_linear("text_embedding.0", text_dim, dim),
        **_linear("text_embedding.2", dim, dim),
        **_linear("time_embedding.0", 256, dim),
        **_linear("time_embedding.2", dim, dim),
        **_linear("time_projection.1", dim, 6 * dim),
        **_linear("head.head", dim, 64),
        "head.modulation": (1, 2, dim),
    }
    for index in range(blocks):
        shapes |= _wan_block(f"blocks.{index}.", dim, ffn)
    return shapes


def clip_l_shapes(width: int = 768, layers: int = 12) -> Shapes:
    """Tensor names and shapes of the CLIP-L text encoder."""
    shapes: Shapes = {
        "text_model.embeddings.token_embedding.weight": (49408, width),
        "text_model.embeddings.position_embedding.weight": (77, width),
        **_norm("text_model.final_layer_norm", width),
    }
    for index in range(layers):
        layer = f"text_model.encoder.layers.{index}."
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= _linear(f"{layer}self_attn.{name}", width, width)
        shapes |= _norm(f"{layer}layer_norm1", width) | _norm(f"{layer}layer_norm2", width)
        shapes |= _linear(f"{layer}mlp.fc1", width, 4 * width) | _linear(f"{layer}mlp.fc2", 4 * width, width)
    return shapes


def z_image_config(heads: int, layers: int = 2) -> dict:
    """What ComfyUI makes of a Z-Image file, with so many heads of 128 channels; Z-Image has 30."""
    return {
        **dict(patch_size=2, in_channels=16, dim=128 * heads, cap_feat_dim=2560, n_layers=layers, qk_norm=True),
        **dict(n_heads=heads, n_kv_heads=heads, axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0),
        **dict(ffn_dim_multiplier=8.0 / 3.0, z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32),
    }


def sd15_unet_config() -> dict:
    """One level, one residual block, one transformer block."""
    return _unet_config(
        {"context_dim": 768, "adm_in_channels": None, "use_linear_in_transformer": False, "num_heads": 8},
        {"channel_mult": [1], "num_res_blocks": [1], "transformer_depth": [1], "transformer_depth_output": [1, 1]},
    ) | {"num_head_channels": -1}


def sdxl_unet_config() -> dict:
    """The down path that identifies SDXL, with every level at the width of the first and a thin up path."""
    return _unet_config(
        {"context_dim": 2048, "adm_in_channels": 2816, "use_linear_in_transformer": True, "num_classes": "sequential"},
        {
            "channel_mult": [1, 1, 1],
            "num_res_blocks": [2, 2, 2],
            "transformer_depth": [0, 0, 2, 2, 10, 10],
            "transformer_depth_output": [0, 0, 0, 1, 1, 1, 1, 1, 1],
        },
    ) | {"num_head_channels": 64}


def _unet_config(conditioning: dict, levels: dict) -> dict:
    fixed = dict(image_size=32, in_channels=4, out_channels=4, model_channels=320, legacy=False)
    return fixed | {"use_spatial_transformer": True, "transformer_depth_middle": 1} | conditioning | levels


def unet(config: dict) -> torch.nn.Module:
    from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

    return on_meta(UNetModel, **config)


def _autoencoder(decoder_channels: int) -> torch.nn.Module:
    from comfy.ldm.models.autoencoder import AutoencoderKL

    config = {
        **dict(double_z=True, z_channels=4, resolution=256, in_channels=3, out_ch=3, ch=128, ch_mult=[1, 2, 4, 4]),
        **dict(num_res_blocks=2, attn_resolutions=[], dropout=0.0),
    }
    with with_weights(), torch.device("meta"):
        return AutoencoderKL(ddconfig=config, embed_dim=4, decoder_ddconfig=config | {"ch": decoder_channels})


@contextlib.contextmanager
def with_weights() -> Iterator[None]:
    """ComfyUI makes each layer with its weights: while dynamic VRAM is on, a Linear or Embedding has none until it is loaded."""
    import comfy.memory_management

    with mock.patch.object(comfy.memory_management, "aimdo_enabled", False):
        yield


def on_meta(build: type, **config: object) -> torch.nn.Module:
    import comfy.ops

    with with_weights(), torch.device("meta"):
        return build(**config, dtype=torch.float32, device="meta", operations=comfy.ops.disable_weight_init)


def shapes_of(module: torch.nn.Module) -> Shapes:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


def _linear(name: str, inputs: int, outputs: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}


def _norm(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def _wan_block(block: str, dim: int, ffn: int) -> Shapes:
    shapes: Shapes = {f"{block}modulation": (1, 6, dim)}
    for attention in ("self_attn", "cross_attn"):
        for name in "qkvo":
            shapes |= _linear(f"{block}{attention}.{name}", dim, dim)
        shapes |= {f"{block}{attention}.norm_{name}.weight": (dim,) for name in "qk"}
    shapes |= _linear(f"{block}ffn.0", dim, ffn) | _linear(f"{block}ffn.2", ffn, dim)
    return shapes | _norm(f"{block}norm3", dim)


def _std_and_mean(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    if name.endswith((".bias", ".beta")):
        return 0.02, 0.0
    if name.endswith((".gamma", ".scale")) or (len(shape) == 1 and name.endswith(".weight")):
        return 0.02, 1.0
    if name.endswith(("modulation", "table")):
        return shape[-1] ** -0.5, 0.0
    if "embed" in name and len(shape) == 2 and shape[0] > 16384:
        return 0.02, 0.0
    return math.prod(shape[1:]) ** -0.5 if len(shape) > 1 else 0.02, 0.0


def tensors_of_shapes(shapes: Shapes, dtype: torch.dtype, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    pool = torch.randn(min(POOL_SIZE, sum(map(math.prod, shapes.values())) + 1), generator=generator)
    for name, shape in shapes.items():
        std, mean = _std_and_mean(name, shape)
        start = int(torch.randint(len(pool), (1,), generator=generator))
        values = _take(pool, start, math.prod(shape))
        yield name, (values * std + mean).to(dtype).reshape(shape)


def _take(pool: torch.Tensor, start: int, count: int) -> torch.Tensor:
    if start + count <= len(pool):
        return pool[start : start + count]
    repeats = -(-(start + count) // len(pool))
    return pool.repeat(repeats)[start : start + count]


def write_shapes(
    path: Path, shapes: Shapes, dtype: torch.dtype, seed: int, scale: dict | None = None, metadata: dict | None = None
) -> Path:
    tensors = dict(tensors_of_shapes(shapes, dtype, seed))
    for name, factor in (scale or {}).items():
        tensors[name] = tensors[name] * factor
    save_file(tensors, str(path), metadata={"format": "pt", **(metadata or {})})
    return Path(path)


def _stream(path: Path, shapes: Shapes, dtype: torch.dtype, seed: int, metadata: dict | None = None) -> Path:
    header, offset = {"__metadata__": {"format": "pt", **(metadata or {})}}, 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in tensors_of_shapes(shapes, dtype, seed):
            file.write(memoryview(tensor.flatten().view(torch.uint8).numpy()))
    return Path(path)


def main(names: list[str], folder: Path) -> None:
    """Write `<name>.safetensors` for each function named."""
    if os.environ.get("COMFYUI_DIR"):
        sys.path.insert(0, os.environ["COMFYUI_DIR"])
        importlib.import_module("comfy.cli_args").args.cpu = True
    for name in names:
        globals()[name](folder / f"{name}.safetensors")


if __name__ == "__main__":
    main(sys.argv[2:], Path(sys.argv[1]))
