"""ComfyUI's models at their real widths, without weights: two blocks of each kind stand for all, but in SDXL, which is whole.

Each builder takes what ComfyUI's class takes (device, dtype, operations) and gives the model, a latent and what else a call is given.
"""

from __future__ import annotations

from collections.abc import Callable


def _wan(dim: int, ffn: int, heads: int, layers: int, size: tuple[int, int, int] = (21, 60, 104)) -> Callable:
    def build(**options):
        import torch
        from comfy.ldm.wan.model import WanModel

        config = {"patch_size": (1, 2, 2), "in_dim": 16, "out_dim": 16, "text_dim": 4096}
        model = WanModel(**config, dim=dim, ffn_dim=ffn, num_heads=heads, num_layers=layers, **options)
        return model, torch.empty(1, 16, *size), {"context": torch.empty(1, 512, 4096)}

    return build


def _flux(hidden: int = 3072, double: int = 1, single: int = 2, size: int = 128) -> Callable:
    def build(**options):
        import torch
        from comfy.ldm.flux.model import Flux

        config = {
            **dict(
                in_channels=16, out_channels=16, vec_in_dim=768, context_in_dim=4096, hidden_size=hidden, mlp_ratio=4.0
            ),
            **dict(
                num_heads=hidden // 128, depth=double, depth_single_blocks=single, axes_dim=[16, 56, 56], theta=10000
            ),
            **dict(patch_size=2, qkv_bias=True, guidance_embed=True, txt_ids_dims=[]),
        }
        given = {"context": torch.empty(1, 512, 4096), "y": torch.empty(1, 768), "guidance": torch.empty(1)}
        return Flux(**config, **options), torch.empty(1, 16, size, size), given

    return build


def _sdxl(channels: int = 320, deep: int = 10, size: int = 128) -> Callable:
    def build(**options):
        import torch
        from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel

        config = {
            **dict(
                image_size=32,
                in_channels=4,
                out_channels=4,
                model_channels=channels,
                legacy=False,
                num_classes="sequential",
            ),
            **dict(
                num_res_blocks=[2, 2, 2],
                channel_mult=[1, 2, 4],
                adm_in_channels=2816,
                context_dim=2048,
                num_head_channels=64,
            ),
            **dict(
                use_spatial_transformer=True, use_linear_in_transformer=True, transformer_depth=[0, 0, 2, 2, deep, deep]
            ),
            **dict(transformer_depth_middle=deep, transformer_depth_output=[0, 0, 0, 2, 2, 2, deep, deep, deep]),
        }
        given = {"context": torch.empty(2, 77, 2048), "y": torch.empty(2, 2816)}
        return UNetModel(**config, **options), torch.empty(2, 4, size, size), given

    return build


def _qwen_image(layers: int = 2) -> Callable:
    def build(**options):
        import torch
        from comfy.ldm.qwen_image.model import QwenImageTransformer2DModel

        model = QwenImageTransformer2DModel(in_channels=64, num_layers=layers, **options)
        return model, torch.empty(1, 16, 1, 128, 128), {"context": torch.empty(1, 256, 3584)}

    return build


BUILD = {
    "Wan 1.3B": _wan(1536, 8960, 12, 2),
    "Wan 14B": _wan(5120, 13824, 40, 2),
    "Flux": _flux(),
    "SDXL": _sdxl(),
    "Qwen-Image": _qwen_image(),
}
TWICE = {
    "Wan 1.3B": _wan(1536, 8960, 12, 4),
    "Wan 14B": _wan(5120, 13824, 40, 4),
    "Flux": _flux(double=2, single=4),
    "Qwen-Image": _qwen_image(4),
}
"""The same with twice as many blocks."""
ON_A_GPU = {"SDXL": BUILD["SDXL"], "Flux": TWICE["Flux"], "Wan 1.3B": _wan(1536, 8960, 12, 10)}
"""What a GPU measures with weights of its own: Flux with as many blocks as make a call of milliseconds, a third of Wan, whose calls are long."""
