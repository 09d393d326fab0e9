"""Small random control files of the kinds that ComfyUI's loader knows, and one call of what is loaded of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support import tiny_models

HEADS = 2


def sd15(path: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write a ControlNet for SD 1.5."""
    return tiny_models.write_shapes(path, _cldm(tiny_models.sd15_unet_config()), dtype, 0)


def sd15_diffusers(path: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write a ControlNet for SD 1.5 with diffusers' names, of the size :func:`narrow` makes ComfyUI expect."""
    from comfy.utils import unet_to_diffusers

    config = tiny_models.sd15_unet_config()
    shapes, names = _cldm(config), unet_to_diffusers(config)
    for leaf in ("weight", "bias"):
        names |= {f"controlnet_mid_block.{leaf}": f"middle_block_out.0.{leaf}"}
        names |= {f"controlnet_down_blocks.{i}.{leaf}": f"zero_convs.{i}.0.{leaf}" for i in range(2)}
        names |= {
            f"controlnet_cond_embedding.blocks.{i}.{leaf}": f"input_hint_block.{2 * i + 2}.{leaf}" for i in range(6)
        }
        names[f"controlnet_cond_embedding.conv_in.{leaf}"] = f"input_hint_block.0.{leaf}"
        names[f"controlnet_cond_embedding.conv_out.{leaf}"] = f"input_hint_block.14.{leaf}"
    return tiny_models.write_shapes(path, {name: shapes[own] for name, own in names.items() if own in shapes}, dtype, 0)


def flux(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a Flux ControlNet in the format of XLabs."""
    shapes = _flux(latent_input=False)
    return tiny_models.write_shapes(
        path, {name.replace("_norm.weight", "_norm.scale"): shape for name, shape in shapes.items()}, dtype, 0
    )


def flux_diffusers(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a Flux ControlNet in the format of InstantX, with diffusers' names: ComfyUI fuses q, k and v."""
    from comfy.utils import flux_to_diffusers

    shapes = _flux(latent_input=True)
    own = {}
    for name, target in flux_to_diffusers({"depth": 1, "depth_single_blocks": 1, "hidden_size": 256}).items():
        key, part = (target, None) if isinstance(target, str) else target[:2]
        if key in shapes:
            own[name] = shapes[key] if part is None else (part[2], *shapes[key][1:])
    rest = {name: shape for name, shape in shapes.items() if name.startswith(("controlnet_", "pos_embed_input"))}
    return tiny_models.write_shapes(
        path, own | rest | {"controlnet_x_embedder.weight": shapes["pos_embed_input.weight"]}, dtype, 0
    )


def qwen(path: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a Qwen-Image ControlNet of one block, as narrow as :func:`narrow` makes ComfyUI build it."""
    from comfy.ldm.qwen_image.controlnet import QwenImageControlNetModel

    model = tiny_models.on_meta(QwenImageControlNetModel, in_channels=64, num_layers=1, num_attention_heads=HEADS)
    return tiny_models.write_shapes(path, tiny_models.shapes_of(model), dtype, 0)


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have ComfyUI build small models of files in which it reads no sizes: of Qwen-Image's, and of UNets with diffusers' names."""
    from comfy import model_detection
    from comfy.ldm.qwen_image import controlnet

    model = controlnet.QwenImageControlNetModel
    monkeypatch.setattr(controlnet, "QwenImageControlNetModel", functools.partial(model, num_attention_heads=HEADS))
    monkeypatch.setattr(
        model_detection, "unet_config_from_diffusers_unet", lambda tensors: tiny_models.sd15_unet_config()
    )


def sd35(path: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write an SD3.5 ControlNet of two blocks: it gets an embedder from the model it runs beside."""
    from comfy.cldm.dit_embedder import ControlNetEmbedder

    sizes = dict(
        img_size=None, patch_size=2, in_chans=16, attention_head_dim=64, num_attention_heads=4, adm_in_channels=2048
    )
    model = tiny_models.on_meta(ControlNetEmbedder, num_layers=2, main_model_double=4, double_y_emb=True, **sizes)
    shapes = {name: shape for name, shape in tiny_models.shapes_of(model).items() if "orig_y_embedder" not in name}
    return tiny_models.write_shapes(path, shapes | {"control_type": (1,)}, dtype, 0)


KINDS: dict[str, Callable[[Path], Path]] = {
    "sd15": sd15,
    "sd15_diffusers": sd15_diffusers,
    "flux": flux,
    "flux_diffusers": flux_diffusers,
    "qwen": qwen,
}
CONTEXT = {"sd15": 768, "sd15_diffusers": 768, "flux": 4096, "flux_diffusers": 4096, "qwen": 3584, "sd35": 4096}


def give(control, kind: str, seed: int = 3) -> torch.Tensor:
    """All outputs of a ControlNet's model for one random input, in fp32, as one row."""
    from comfy.model_management import load_models_gpu

    load_models_gpu([control.control_model_wrapped])
    dtype = control.manual_cast_dtype or control.control_model.dtype
    out = control.control_model(**{name: value.to(dtype) for name, value in _inputs(kind, seed).items()})
    return torch.cat([x.float().flatten() for outputs in out.values() for x in outputs if x is not None])


def _inputs(kind: str, seed: int) -> dict[str, torch.Tensor]:
    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    generator = torch.Generator().manual_seed(seed)
    latent = {"qwen": (1, 16, 1, 8, 8)}.get(kind, (1, 16, 8, 8) if kind.startswith(("flux", "sd35")) else (1, 4, 8, 8))
    in_latents = kind in ("flux_diffusers", "qwen", "sd35")
    inputs = {
        "x": random(*latent),
        "hint": random(*latent) if in_latents else random(1, 3, 64, 64),
        "context": random(1, 16, CONTEXT[kind]),
    }
    inputs["timesteps"] = torch.tensor([0.5 if in_latents or kind == "flux" else 500.0])
    if kind == "sd35":
        inputs["y"] = random(1, 2048)
    if kind.startswith("flux"):
        inputs |= {"y": random(1, 768), "guidance": torch.tensor([3.5])}
    return inputs


def _cldm(config: dict) -> tiny_models.Shapes:
    from comfy.cldm.cldm import ControlNet

    own = {name: value for name, value in config.items() if name != "out_channels"}
    return tiny_models.shapes_of(tiny_models.on_meta(ControlNet, hint_channels=3, **own))


def _flux(latent_input: bool) -> tiny_models.Shapes:
    from comfy.ldm.flux.controlnet import ControlNetFlux

    config = {
        **dict(in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=256, mlp_ratio=4.0),
        **dict(num_heads=2, depth=1, depth_single_blocks=1, axes_dim=[16, 56, 56], theta=10000),
        **dict(patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[]),
    }
    more = {"control_latent_channels": 16} if latent_input else {}
    return tiny_models.shapes_of(tiny_models.on_meta(ControlNetFlux, latent_input=latent_input, **more, **config))
