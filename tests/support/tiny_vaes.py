"""Every VAE class of ComfyUI, narrow: built by ComfyUI's own ``VAE`` from the names it knows each by, with random weights."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

LARGEST = 30000.0
"""The largest magnitude of a weight that overflows: fp16 holds it, and a result ten times as large it does not."""
ENGINE = "comfy.ldm.modules.diffusionmodules.model"
CONSTANTS = ("wavelets",)
HUNYUAN, REFINER, MOCHI = (
    "comfy.ldm.hunyuan_video.vae",
    "comfy.ldm.hunyuan_video.vae_refiner",
    "comfy.ldm.genmo.vae.model",
)
NARROW_KL = {f"{ENGINE}:Encoder": {"ch": 32}, f"{ENGINE}:Decoder": {"ch": 32}}
BLOCKS, DECODER = {"block_out_channels": [64] * 5}, {"block_out_channels": [32] * 5}
LTX = {
    "dims": 3, "in_channels": 3, "out_channels": 3, "latent_channels": 128, "patch_size": 4, "norm_layer": "pixel_norm",
    "latent_log_var": "uniform", "causal_decoder": False, "encoder_base_channels": 16, "decoder_base_channels": 16,
    "blocks": [["res_x", 1], ["compress_all", 1], ["res_x_y", 1], ["compress_all", 1], ["res_x_y", 1], ["compress_all", 1], ["res_x", 1]],
}  # fmt: skip


@dataclass(frozen=True)
class TinyVAE:
    """``names``: tensor -> shape, by which ComfyUI knows the class; ``sizes``: module:class -> arguments that make it narrow;
    ``constants``: module:name -> value; ``latent``, ``pixels``: the shapes it decodes and encodes, None for never."""

    names: dict[str, tuple[int, ...]]
    latent: tuple[int, ...] | None
    pixels: tuple[int, ...] | None
    sizes: dict[str, dict] = field(default_factory=dict)
    constants: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)


def _efficientnet() -> torch.nn.Module:
    """An EfficientNet with a block for each halving of the picture."""
    from torchvision.models import efficientnet

    blocks = [
        efficientnet.FusedMBConvConfig(1, 3, 1, 16, 16, 1),
        *(efficientnet.MBConvConfig(2, 3, 2, 16, 16, 1) for _ in range(4)),
    ]
    return efficientnet.EfficientNet(blocks, dropout=0.0, last_channel=1280)


SD = {"decoder.conv_in.weight": (512, 4, 3, 3), "encoder.down.2.downsample.conv.weight": (1,)}
IMAGE, VIDEO, AUDIO = (1, 32, 32, 3), (5, 32, 32, 3), (1, 4096, 2)
VAES = {
    "sd": TinyVAE({**SD, "post_quant_conv.weight": (4, 4, 1, 1)}, (1, 4, 4, 4), IMAGE, NARROW_KL),
    "flux": TinyVAE(SD | {"decoder.conv_in.weight": (512, 16, 3, 3)}, (1, 16, 4, 4), IMAGE, NARROW_KL),
    "flux2": TinyVAE(
        SD | {"decoder.conv_in.weight": (512, 32, 3, 3), "bn.running_mean": (128,), "post_quant_conv.weight": (32, 32, 1, 1)},
        (1, 128, 2, 2), IMAGE, NARROW_KL,
    ),
    "svd": TinyVAE(
        {"decoder.mid.block_1.mix_factor": (1,)}, (2, 4, 4, 4), (2, 32, 32, 3),
        {f"{ENGINE}:Encoder": {"ch": 32}, "comfy.ldm.modules.temporal_ae:VideoDecoder": {"ch": 32}},
    ),
    "taesd": TinyVAE({"taesd_decoder.1.weight": (64, 4, 3, 3)}, (1, 4, 4, 4), IMAGE),
    "stage_a": TinyVAE(
        {"vquantizer.codebook.weight": (1,)}, (1, 4, 8, 8), IMAGE,
        {"comfy.sd:StageA": {"c_hidden": 32, "bottleneck_blocks": 1, "codebook_size": 16}},
    ),
    "stage_c": TinyVAE(
        {"encoder.backbone.1.0.block.0.1.num_batches_tracked": ()}, (1, 16, 2, 2), IMAGE,
        {"comfy.ldm.cascade.stage_c_coder:Previewer": {"c_hidden": 32}}, {"torchvision.models:efficientnet_v2_s": _efficientnet},
    ),
    "seedvr2": TinyVAE(
        {"decoder.up_blocks.2.upsamplers.0.upscale_conv.weight": (1,)}, (1, 16, 2, 4, 4), VIDEO,
        constants={"comfy.ldm.seedvr.vae:BYTEDANCE_BLOCK_OUT_CHANNELS": (32, 32, 32, 32)},
    ),
    "mage": TinyVAE(
        {"student.dconv_encoder.proj_out.weight": (1,)}, (1, 128, 2, 2), IMAGE,
        {
            "comfy.ldm.mage_flow.vae:DConvEncoder": {"hidden_size": 32, "num_blocks": 2, "head_size": 32, "num_head_blocks": 1},
            "comfy.ldm.mage_flow.vae:DConvDenoiser": {"hidden_size": 32, "hidden_size_x": 8, "num_blocks": 3, "num_cond_blocks": 2},
        },
    ),
    "hunyuan_image": TinyVAE(
        {"decoder.conv_in.weight": (1, 64, 1, 1)}, (1, 64, 1, 1), (1, 64, 64, 3),
        {f"{HUNYUAN}:Encoder": {"block_out_channels": [128] * 6}, f"{HUNYUAN}:Decoder": {"block_out_channels": [128] * 6}},
    ),
    "hunyuan_image_refiner": TinyVAE(
        {"decoder.conv_in.weight": (1, 32, 1, 1, 1)}, (1, 32, 1, 2, 2), IMAGE, {f"{REFINER}:Encoder": BLOCKS, f"{REFINER}:Decoder": DECODER},
    ),
    "hunyuan_video15": TinyVAE(
        {"decoder.conv_in.conv.weight": (1, 32, 1, 1, 1)}, (1, 32, 2, 2, 2), VIDEO, {f"{REFINER}:Encoder": BLOCKS, f"{REFINER}:Decoder": DECODER},
    ),
    "hunyuan_video": TinyVAE(
        {"decoder.conv_in.conv.weight": (1, 16, 1, 1, 1), "post_quant_conv.weight": (16, 16, 1, 1, 1)}, (1, 16, 2, 4, 4), VIDEO, NARROW_KL,
    ),
    "oobleck": TinyVAE({"decoder.layers.1.layers.0.beta": (1,)}, (1, 64, 2), AUDIO, {"comfy.sd:AudioOobleckVAE": {"channels": 4}}),
    "mochi": TinyVAE(
        {"decoder.blocks.2.blocks.3.stack.5.weight": (1,)}, (1, 12, 2, 4, 4), (7, 32, 32, 3),
        {
            f"{MOCHI}:Encoder": {"base_channels": 32, "channel_multipliers": [1, 2, 3, 4], "num_res_blocks": [1] * 5},
            f"{MOCHI}:Decoder": {"base_channels": 32, "channel_multipliers": [1, 2, 3, 4], "num_res_blocks": [1] * 5},
        },
    ),
    "ltxv": TinyVAE(
        {"decoder.up_blocks.0.res_blocks.0.conv1.conv.weight": (512,)}, (1, 128, 2, 2, 2), (9, 64, 64, 3),
        {"comfy.ldm.lightricks.vae.causal_video_autoencoder:VideoVAE": {"config": LTX}},
    ),
    "cogvideox": TinyVAE(
        {"decoder.conv_in.conv.weight": (1, 16), "decoder.mid_block.resnets.0.norm1.norm_layer.weight": (1,), "encoder.conv_out.conv.weight": (32,)},
        (1, 16, 2, 4, 4), VIDEO,
        {"comfy.ldm.cogvideo.vae:AutoencoderKLCogVideoX": {"block_out_channels": (32, 32, 32, 32), "layers_per_block": 1}},
    ),
    "cosmos": TinyVAE(
        {"decoder.unpatcher3d.wavelets": (1,)}, (1, 16, 2, 4, 4), (9, 32, 32, 3),
        {"comfy.ldm.cosmos.vae:CausalContinuousVideoTokenizer": {"channels": 16, "num_res_blocks": 1}},
    ),
    "wan22": TinyVAE(
        {"decoder.middle.0.residual.0.gamma": (1,), "decoder.upsamples.0.upsamples.0.residual.2.weight": (1,)}, (1, 48, 2, 2, 2), VIDEO,
        {"comfy.ldm.wan.vae2_2:WanVAE": {"dim": 8, "dec_dim": 8, "num_res_blocks": 1}},
    ),
    "wan21": TinyVAE(
        {
            "decoder.middle.0.residual.0.gamma": (1,), "decoder.head.0.gamma": (8,), "encoder.conv1.weight": (8, 3), "decoder.head.2.weight": (3,),
        },
        (1, 16, 2, 4, 4), VIDEO, {"comfy.ldm.wan.vae:WanVAE": {"num_res_blocks": 1}},
    ),
    "hunyuan3d": TinyVAE(
        {"geo_decoder.cross_attn_decoder.ln_1.bias": (1,)}, (1, 64, 16), None,
        {"comfy.ldm.hunyuan3d.vae:ShapeVAE": {"width": 64, "heads": 2, "num_decoder_layers": 2, "num_encoder_layers": 1, "num_latents": 16}},
        options={"octree_resolution": 4, "enable_pbar": False},
    ),
    "ace": TinyVAE(
        {"vocoder.backbone.channel_layers.0.0.bias": (1,)}, (1, 8, 16, 2), (1, 16384, 2),
        {
            "comfy.ldm.ace.vae.music_dcae_pipeline:AutoencoderDC": {
                "encoder_block_out_channels": (32, 32, 32, 32), "decoder_block_out_channels": (32, 32, 32, 32),
                "encoder_layers_per_block": (1, 1, 1, 1), "decoder_layers_per_block": (1, 1, 1, 1),
            },
            "comfy.ldm.ace.vae.music_dcae_pipeline:ADaMoSHiFiGANV1": {
                "depths": [1, 1, 1, 1], "dims": [16, 16, 16, 16], "num_mels": 16, "upsample_initial_channel": 128,
            },
        },
    ),
    "pixel_space": TinyVAE({"pixel_space_vae": ()}, (1, 3, 8, 8), (1, 8, 8, 3)),
    "taehv": TinyVAE({"decoder.22.bias": (3,), "decoder.1.weight": (256, 16, 3, 3)}, (1, 16, 2, 4, 4), VIDEO),
    "stable_audio3": TinyVAE(
        {"decoder.layers.3.transformers.0.pre_norm.alpha": (1,)}, (1, 256, 4), (1, 16384, 2),
        {"comfy.ldm.audio.vae_sa3:SA3AudioVAE": {"channels": 32, "transformer_depths": 1}},
    ),
    "minimax": TinyVAE(
        {"decoder.transformer_blocks.0.scale1": (1,), "encoder.down.5.block.0.conv1.weight": (1,)}, (1, 24, 2, 2, 2), (5, 32, 32, 3),
        {
            "comfy.ldm.minimax.vae:MiniMaxH3VideoVAE": {"ch": 32, "ch_mult": (1, 1, 1, 1, 1, 1), "num_res_blocks": 1},
            "comfy.ldm.minimax.vae:ViT3DDecoder": {"num_layers": 2, "heads": 1},
        },
    ),
}  # fmt: skip


def is_known(name: str) -> bool:
    """Whether the ComfyUI in use has the class."""
    return all(
        importlib.util.find_spec(place.partition(":")[0]) for place in [*VAES[name].sizes, *VAES[name].constants]
    )


@contextlib.contextmanager
def _narrowed(tiny: TinyVAE) -> Iterator[None]:
    kept = [(torch.nn.Module, "load_state_dict", torch.nn.Module.load_state_dict)]
    torch.nn.Module.load_state_dict = lambda *args, **options: ((), ())  # the names alone are known, not their shapes
    for place, value in [*tiny.sizes.items(), *tiny.constants.items()]:
        module, name = place.split(":")
        target = importlib.import_module(module)
        if place in tiny.sizes:
            target, name, value = getattr(target, name), "__init__", _with(getattr(target, name).__init__, value)
        kept.append((target, name, vars(target)[name]))
        setattr(target, name, value)
    try:
        yield
    finally:
        for target, name, value in reversed(kept):
            setattr(target, name, value)


def _with(init, sizes):
    signature = inspect.signature(init)
    rest = next((one.name for one in signature.parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD), None)

    @functools.wraps(init)
    def narrow(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        for key, value in sizes.items():
            (given.arguments if key in signature.parameters else given.arguments.setdefault(rest, {}))[key] = value
        return init(*given.args, **given.kwargs)

    return narrow


def build(name: str, dtype: torch.dtype = torch.float16, seed: int = 0):
    """A VAE of a class with random weights, held and computed in ``dtype``; they are the same in fp16 and fp32."""
    from comfy.sd import VAE

    tiny = VAES[name]
    with _narrowed(tiny), torch.inference_mode(False):
        vae = VAE(sd={key: torch.zeros(shape) for key, shape in tiny.names.items()}, dtype=dtype)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in vae.first_stage_model.state_dict().items():
            if tensor.is_floating_point() and not key.endswith(CONSTANTS):
                tensor.copy_(_drawn(key, tensor.shape, draw).half())
    vae.process_output = lambda image: image
    return vae


def _drawn(key: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=draw)
    if key.endswith("original0"):
        return 1 + 0.1 * values
    if len(shape) > 1:
        return values / math.sqrt(math.prod(shape[1:]))
    return (
        1 + 0.1 * values
        if key.endswith(("weight", "gamma", "var", "std-of-means", "pixel_std", "latents_std"))
        else 0.1 * values
    )


def latent(name: str) -> torch.Tensor:
    return torch.randn(VAES[name].latent, generator=torch.Generator().manual_seed(1))


def pixels(name: str) -> torch.Tensor:
    return torch.rand(VAES[name].pixels, generator=torch.Generator().manual_seed(2))
