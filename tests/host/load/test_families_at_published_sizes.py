"""ComfyUI's models at their published sizes, by names and shapes: which layers stay in 16 bit, and which family they are told as.

Sizes are those that ComfyUI's own classes and detection have, else of the published file's config.
"""

import importlib
from functools import cache
from math import prod

import comfy.model_detection
import comfy.ops
import comfy.supported_models
import pytest
import torch
from halfsafe.nodes.host.load import detection
from halfsafe.precision.base.dtypes import name_of
from halfsafe.precision.formats.checkpoint import Checkpoint
from halfsafe.precision.formats.diffusers_names import origins_of
from halfsafe.precision.formats.families import family_of
from halfsafe.precision.formats.int8 import rotation_group
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.formats.readers import DIFFUSERS as DIFFUSERS_NAMES
from halfsafe.precision.formats.readers import MODEL, kind_of_file
from halfsafe.precision.formats.stored_weight import StoredWeight
from halfsafe.precision.plan.facts import LayerSpec, layer_specs
from halfsafe.precision.plan.layers import plan_storage
from halfsafe.precision.plan.nvfp4 import nvfp4_doubts, shapes_by_weight
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.plan.structure import OUTSIDE, roles_of
from support import diffusers_names

_WAN = dict(dim=5120, ffn_dim=13824, num_heads=40, num_layers=40)
_WAN_IMAGE = _WAN | dict(in_dim=36, model_type="i2v")
_FLUX = {
    **dict(
        in_channels=16,
        out_channels=16,
        vec_in_dim=768,
        context_in_dim=4096,
        hidden_size=3072,
        mlp_ratio=4.0,
        num_heads=24,
        depth=19,
    ),
    **dict(
        depth_single_blocks=38,
        axes_dim=[16, 56, 56],
        theta=10000,
        patch_size=2,
        qkv_bias=True,
        guidance_embed=True,
        txt_ids_dims=[],
    ),
}
_FLUX2 = {
    **dict(
        in_channels=128,
        out_channels=128,
        vec_in_dim=None,
        context_in_dim=15360,
        hidden_size=6144,
        mlp_ratio=3.0,
        num_heads=48,
        depth=8,
    ),
    **dict(
        depth_single_blocks=48,
        axes_dim=[32] * 4,
        theta=2000,
        patch_size=1,
        qkv_bias=False,
        guidance_embed=True,
        txt_ids_dims=[3],
    ),
    **dict(global_modulation=True, mlp_silu_act=True, ops_bias=False),
}
_CHROMA = {
    **{name: _FLUX[name] for name in _FLUX if name != "guidance_embed"},
    **dict(in_channels=64, out_channels=64, in_dim=64, out_dim=3072, hidden_dim=5120, n_layers=5, vec_in_dim=None),
}
_HUNYUAN = {
    **dict(
        in_channels=16,
        out_channels=16,
        vec_in_dim=768,
        context_in_dim=4096,
        hidden_size=3072,
        mlp_ratio=4.0,
        num_heads=24,
        depth=20,
    ),
    **dict(
        depth_single_blocks=40,
        axes_dim=[16, 56, 56],
        theta=256,
        patch_size=[1, 2, 2],
        qkv_bias=True,
        guidance_embed=True,
        byt5=False,
    ),
    **dict(meanflow=False, use_cond_type_embedding=False, vision_in_dim=None, meanflow_sum=False),
}
_COSMOS = {
    **dict(
        max_img_h=240, max_img_w=240, max_frames=128, in_channels=16, out_channels=16, patch_spatial=2, patch_temporal=1
    ),
    **dict(pos_emb_cls="rope3d", use_adaln_lora=True),
}
_PREDICT2 = _COSMOS | dict(
    concat_padding_mask=True, pos_emb_learnable=True, crossattn_emb_channels=1024, extra_per_block_abs_pos_emb=False
)
_Z_IMAGE = {
    **dict(
        patch_size=2, in_channels=16, dim=3840, cap_feat_dim=2560, n_layers=30, qk_norm=True, n_heads=30, n_kv_heads=30
    ),
    **dict(axes_dims=[32, 48, 48], axes_lens=[1536, 512, 512], rope_theta=256.0, ffn_dim_multiplier=8.0 / 3.0),
    **dict(z_image_modulation=True, time_scale=1000.0, pad_tokens_multiple=32),
}
_LUMINA2 = {
    **dict(
        patch_size=2, in_channels=16, dim=2304, cap_feat_dim=2304, n_layers=26, qk_norm=True, n_heads=24, n_kv_heads=8
    ),
    **dict(axes_dims=[32, 32, 32], axes_lens=[300, 512, 512], rope_theta=10000.0, ffn_dim_multiplier=4.0),
}
_UNET = {
    **dict(
        image_size=32, in_channels=4, out_channels=4, model_channels=320, legacy=False, use_spatial_transformer=True
    ),
    **dict(use_linear_in_transformer=True, num_head_channels=64),
}
_SDXL = _UNET | {
    **dict(
        num_res_blocks=[2, 2, 2],
        channel_mult=[1, 2, 4],
        context_dim=2048,
        num_classes="sequential",
        adm_in_channels=2816,
    ),
    **dict(
        transformer_depth=[0, 0, 2, 2, 10, 10],
        transformer_depth_middle=10,
        transformer_depth_output=[0, 0, 0, 2, 2, 2, 10, 10, 10],
    ),
}
_SD15 = _UNET | {
    **dict(
        num_res_blocks=[2] * 4, channel_mult=[1, 2, 4, 4], context_dim=768, use_linear_in_transformer=False, num_heads=8
    ),
    **dict(
        transformer_depth=[1] * 6 + [0, 0],
        transformer_depth_middle=1,
        transformer_depth_output=[1] * 9 + [0] * 3,
        num_head_channels=-1,
    ),
    **dict(adm_in_channels=None),
}
_SD3 = {
    **dict(in_channels=16, out_channels=16, input_size=None, adm_in_channels=2048, depth=38, qk_norm="rms"),
    "context_embedder_config": {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 2432}},
}
_HUNYUAN15 = _HUNYUAN | {
    **dict(
        in_channels=65, out_channels=32, vec_in_dim=None, context_in_dim=3584, hidden_size=2048, num_heads=16, depth=54
    ),
    **dict(
        depth_single_blocks=0,
        patch_size=[1, 1, 1],
        guidance_embed=False,
        byt5=True,
        use_cond_type_embedding=True,
        vision_in_dim=1152,
    ),
    **dict(meanflow_sum=True),
}
_HUNYUAN_IMAGE = _HUNYUAN | {
    **dict(
        in_channels=64,
        out_channels=64,
        vec_in_dim=None,
        context_in_dim=3584,
        hidden_size=3584,
        num_heads=28,
        axes_dim=[64, 64],
    ),
    **dict(patch_size=[1, 1], guidance_embed=False, byt5=True),
}
_MOCHI = {
    **dict(
        num_heads=24,
        hidden_size_x=3072,
        hidden_size_y=1536,
        mlp_ratio_x=4.0,
        learn_sigma=False,
        in_channels=12,
        qk_norm=True,
    ),
    **dict(qkv_bias=False, out_bias=True, timestep_scale=1000.0, use_t5=True),
}
_COSMOS1 = _COSMOS | {
    **dict(model_channels=4096, num_blocks=28, num_heads=32, block_x_format="THWBD", affline_emb_norm=True),
    **dict(extra_per_block_abs_pos_emb=True, extra_per_block_abs_pos_emb_type="learnable"),
}
_HIDREAM = {
    **dict(
        attention_head_dim=128,
        axes_dims_rope=[64, 32, 32],
        caption_channels=[4096, 4096],
        max_resolution=[128, 128],
        in_channels=16,
    ),
    **dict(llama_layers=[*range(32), *[31] * 16], out_channels=16, patch_size=2),
}
_RADIANCE = _CHROMA | {
    **dict(
        in_channels=3,
        out_channels=3,
        patch_size=16,
        nerf_hidden_size=64,
        nerf_mlp_ratio=4,
        nerf_depth=4,
        nerf_max_freqs=8,
    ),
    **dict(
        nerf_tile_size=512,
        nerf_final_head_type="conv",
        nerf_embedder_dtype=torch.float32,
        use_x0=True,
        use_sequential_txt_ids=False,
    ),
}
_ACE = {
    **dict(
        attention_head_dim=128, inner_dim=2560, max_width=32768, mlp_ratio=2.5, num_attention_heads=20, num_layers=24
    ),
    **dict(ssl_encoder_depths=[8, 8], lyric_encoder_vocab_size=6693),
}
_OMNIGEN2 = {
    **dict(
        axes_dim_rope=[40, 40, 40],
        axes_lens=[1024, 1664, 1664],
        hidden_size=2520,
        num_attention_heads=21,
        num_kv_heads=7,
        num_layers=32,
    ),
    **dict(text_feat_dim=2048, timestep_scale=1000.0),
}


_FLUX_MODEL = "flux.model.Flux"
_UNET_MODEL, _HUNYUAN_MODEL = "modules.diffusionmodules.openaimodel.UNetModel", "hunyuan_video.model.HunyuanVideo"
# Name -> (class below comfy.ldm, what it is built with beside its defaults).
MODELS: dict[str, tuple[str, dict]] = {
    "Wan 2.1 1.3B": ("wan.model.WanModel", dict(dim=1536, ffn_dim=8960, num_heads=12, num_layers=30)),
    "Wan 2.1 VACE 14B": ("wan.model.VaceWanModel", _WAN | dict(model_type="vace", vace_layers=8, vace_in_dim=96)),
    "Wan 2.2 Animate 14B": ("wan.model_animate.AnimateWanModel", _WAN_IMAGE | dict(model_type="animate")),
    "Wan 2.2 speech to video 14B": ("wan.model.WanModel_S2V", _WAN | dict(model_type="s2v")),
    "Flux.1 dev": (_FLUX_MODEL, _FLUX),
    "Flux.1 Fill": (_FLUX_MODEL, _FLUX | dict(in_channels=96)),
    "Flux.2 dev": (_FLUX_MODEL, _FLUX2),
    "Chroma": ("chroma.model.Chroma", _CHROMA),
    "Qwen-Image": ("qwen_image.model.QwenImageTransformer2DModel", dict(in_channels=64)),
    "Z-Image": ("lumina.model.NextDiT", _Z_IMAGE),
    "Lumina 2": ("lumina.model.NextDiT", _LUMINA2),
    "Hunyuan Video": (_HUNYUAN_MODEL, _HUNYUAN),
    "LTX Video 2B": ("lightricks.model.LTXVModel", {}),
    "LTX 2": ("lightricks.av_model.LTXAVModel", {}),
    "SDXL": (_UNET_MODEL, _SDXL),
    "SD 1.5": (_UNET_MODEL, _SD15),
    "SD 3.5 Large": ("modules.diffusionmodules.mmdit.MMDiT", _SD3),
    "Stable Cascade C": ("cascade.stage_c.StageC", {}),
    "Stable Cascade B": ("cascade.stage_b.StageB", {}),
    "AuraFlow": ("aura.mmdit.MMDiT", dict(max_seq=9216)),
    "PixArt Sigma": ("pixart.pixartms.PixArtMS", dict(model_max_length=300, micro_condition=False)),
    "HunyuanDiT": ("hydit.models.HunYuanDiT", dict(hidden_size=1408, depth=40, mlp_ratio=4.3637)),
    "Hunyuan Video 1.5": (_HUNYUAN_MODEL, _HUNYUAN15),
    "Hunyuan Video 1.5 upscaler": (_HUNYUAN_MODEL, _HUNYUAN15 | dict(in_channels=98)),
    "Hunyuan Image 2.1": (_HUNYUAN_MODEL, _HUNYUAN_IMAGE),
    "Hunyuan3D 2": ("hunyuan3d.model.Hunyuan3Dv2", {}),
    "Hunyuan3D 2.1": ("hunyuan3dv2_1.hunyuandit.HunYuanDiTPlain", dict(guidance_cond_proj_dim=None)),
    "Mochi": ("genmo.joint_model.asymm_models_joint.AsymmDiTJoint", _MOCHI),
    "MiniMax H3": ("minimax.model.MiniMaxH3Model", {}),
    "Cosmos 7B": ("cosmos.model.GeneralDIT", _COSMOS1),
    "Cosmos Predict2 2B": (
        "cosmos.predict2.MiniTrainDIT",
        _PREDICT2 | dict(model_channels=2048, num_blocks=28, num_heads=16),
    ),
    "Anima": ("anima.model.Anima", _PREDICT2 | dict(model_channels=2048, num_blocks=28, num_heads=16)),
    "HiDream": ("hidream.model.HiDreamImageTransformer2DModel", _HIDREAM),
    "HiDream O1": ("hidream_o1.model.HiDreamO1Transformer", {}),
    "Chroma Radiance": ("chroma_radiance.model.ChromaRadiance", _RADIANCE),
    "ACE-Step": ("ace.model.ACEStepTransformer2DModel", _ACE),
    "ACE-Step 1.5": ("ace.ace_step15.AceStepConditionGenerationModel", {}),
    "OmniGen2": ("omnigen.omnigen2.OmniGen2Transformer2DModel", _OMNIGEN2),
    "Boogu": ("boogu.model.BooguTransformer2DModel", {}),
    "Ideogram 4": ("ideogram4.model.Ideogram4Transformer2DModel", {}),
    "Krea 2": ("krea2.model.SingleStreamDiT", {}),
    "Lens": ("lens.model.LensTransformer2DModel", {}),
    "Mage-Flow": ("mage_flow.model.MageFlowTransformer2DModel", {}),
    "JoyImage": ("joyimage.model.JoyImageTransformer3DModel", {}),
    "Kandinsky 5 Lite": ("kandinsky5.model.Kandinsky5", {}),
    "ERNIE-Image": ("ernie.model.ErnieImageModel", {}),
    "CogVideoX 5B": (
        "cogvideo.model.CogVideoXTransformer3DModel",
        dict(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True),
    ),
    "SeedVR2 3B": ("seedvr.model.NaDiT", dict(norm_eps=1e-5, num_layers=32, mlp_type="swiglu", vid_out_norm=True)),
    "Stable Audio": ("audio.dit.AudioDiffusionTransformer", {}),
    "TripoSplat": ("triposplat.model.LatentSeqMMFlowModel", {}),
    "PixelDiT": ("pixeldit.model.PixDiT_T2I", {}),
    "PiD": ("pixeldit.pid.PidNet", {}),
}
# They read tensors while they are built, which the meta device has not; their weights are memory that is never touched.
COMPUTES_WHILE_BUILT = ("ACE-Step 1.5", "PixArt Sigma")

# The start of a model's name -> the first and the last layer that the picture, video or sound goes through.
ENDS = {
    "Wan": ("patch_embedding", "head.head"),
    "Flux": ("img_in", "final_layer.linear"),
    "Chroma Radiance": ("img_in_patch", "nerf_final_layer_conv.conv"),
    "Chroma": ("img_in", "final_layer.linear"),
    **dict.fromkeys(("Qwen-Image", "Lens", "Mage-Flow", "JoyImage"), ("img_in", "proj_out")),
    **dict.fromkeys(("Z-Image", "Lumina 2", "Newbie", "Hunyuan3D 2.1"), ("x_embedder", "final_layer.linear")),
    "Hunyuan3D 2": ("latent_in", "final_layer.linear"),
    "HunyuanDiT": ("x_embedder.proj", "final_layer.linear"),
    "Hunyuan": ("img_in.proj", "final_layer.linear"),
    "LTX": ("patchify_proj", "proj_out"),
    "SDXL": ("input_blocks.0.0", "out.2"),
    "SD 1.5": ("input_blocks.0.0", "out.2"),
    "HiDream O1": ("x_embedder.proj1", "final_layer2.linear"),
    **dict.fromkeys(("SD 3", "PixArt", "Mochi", "HiDream"), ("x_embedder.proj", "final_layer.linear")),
    "Stable Cascade": ("embedding.1", "clf.1"),
    "AuraFlow": ("init_x_linear", "final_linear"),
    "MiniMax H3": ("video_patch_proj", "final_layer.video_out"),
    **dict.fromkeys(("Cosmos", "Anima"), ("x_embedder.proj.1", "final_layer.linear")),
    "ACE-Step 1.5": ("decoder.proj_in.1", "decoder.proj_out.1"),
    "ACE-Step": ("proj_in.early_conv_layers.0", "final_layer.linear"),
    **dict.fromkeys(("OmniGen2", "Boogu"), ("x_embedder", "norm_out.linear_2")),
    "Ideogram 4": ("input_proj", "final_layer.linear"),
    "Krea 2": ("first", "last.linear"),
    "Kandinsky 5": ("visual_embeddings.in_layer", "out_layer.out_layer"),
    "ERNIE-Image": ("x_embedder.proj", "final_linear"),
    "CogVideoX": ("patch_embed.proj", "proj_out"),
    "SeedVR2": ("vid_in.proj", "vid_out.proj"),
    "Stable Audio": ("transformer.project_in", "transformer.project_out"),
    "TripoSplat": ("input_layer", "out_layer"),
    **dict.fromkeys(("PixelDiT", "PiD"), ("pixel_embedder.proj", "final_layer.linear")),
}
PREFIX = {"PixelDiT": "core."}
NO_DIFFUSION_MODELS = {"RT_DETR_v4", "SAM3", "SAM31", "DepthAnything3"}
every_model = pytest.mark.parametrize("name", MODELS)


@cache
def built(name: str) -> torch.nn.Module:
    """The model of ComfyUI's own layer classes on torch's meta device: names and shapes, no memory."""
    path, config = MODELS[name]
    module, _, cls = path.rpartition(".")
    build = getattr(importlib.import_module(f"comfy.ldm.{module}"), cls)
    device = "cpu" if name in COMPUTES_WHILE_BUILT else "meta"
    with torch.device(device):
        return build(**config, dtype=torch.bfloat16, device=device, operations=comfy.ops.disable_weight_init)


def layers_of(name: str) -> list[LayerSpec]:
    """Its layers as a loaded model has them."""
    weights = ((path, module, getattr(module, "weight", None)) for path, module in built(name).named_modules())
    return [
        LayerSpec(path, type(module).__name__, tuple(weight.shape))
        for path, module, weight in weights
        if isinstance(weight, torch.Tensor)
    ]


def weights(layers) -> int:
    return sum(prod(layer.shape) for layer in layers)


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    prefix = PREFIX.get(name, "")
    return {prefix + tensor: tuple(value.shape) for tensor, value in built(name).state_dict().items()}


@every_model
@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_ends_of_the_data_path_stay_high_and_most_blocks_do_not(name, storage):
    layers = layers_of(name)
    decisions, roles = plan_storage(layers, storage, rules_from()), roles_of(layers)
    for end in next(ends for start, ends in ENDS.items() if name.startswith(start)):
        assert (decisions[end].storage, decisions[end].kept) == ("as_file", True) and decisions[end].why_stored
    linear = [layer for layer in layers if layer.cls == "Linear"]
    inside = [layer for layer in linear if roles.get(layer.name) != OUTSIDE]
    assert all(decisions[layer.name].kept for layer in linear if layer not in inside)
    can = [layer for layer in inside if storage != "int8" or rotation_group(layer.shape[1])]  # OmniGen2: 2520 inputs
    assert weights(layer for layer in can if decisions[layer.name].storage == storage) > 0.55 * weights(can)
    # PiD, a decoder of 1.4 billion parameters, has 11 %, Chroma Radiance's pixel blocks 9 %, PixelDiT's as much, all others below 7 %.
    assert weights(layer for layer in linear if layer not in inside) < 0.12 * weights(layers)


@every_model
def test_a_file_s_header_gives_the_same_decisions_as_the_loaded_model(name):
    model, layers = built(name), layers_of(name)
    stored = {tensor: StoredWeight(tensor, value) for tensor, value in model.state_dict().items()}
    from_file = plan_storage(layer_specs(Checkpoint("", "", {}, stored, [])), "fp8_e4m3fn", rules_from())
    loaded = plan_storage(layers, "fp8_e4m3fn", rules_from())
    linear = [layer.name for layer in layers if layer.cls == "Linear"]
    assert {name: from_file[name].storage for name in linear} == {name: loaded[name].storage for name in linear}


DIFFUSERS = {
    "Flux.1 dev": ("flux", None),
    "SD 3.5 Large": ("sd3", None),
    "AuraFlow": ("auraflow", None),
    "PixArt Sigma": ("pixart", None),
    "Z-Image": ("z_image", None),
    "SDXL": ("unet", _SDXL),
    "SD 1.5": ("unet", _SD15),
}
"""Models that ComfyUI reads with diffusers' names too: the table of their names, and a UNet's config."""


def decided(tensors: dict[str, torch.Tensor], storage: str = "int8") -> dict[str, bool]:
    """Layer of a file -> whether it is kept in 16 bit."""
    stored = {name: StoredWeight(name, value) for name, value in tensors.items()}
    layers = layer_specs(Checkpoint("", "", {}, stored, []))
    return {layer: plan.kept for layer, plan in plan_storage(layers, storage, rules_from()).items()}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_a_layer_is_kept_whatever_the_names_of_the_file(name):
    family, config = DIFFUSERS[name]
    tensors = {tensor: value.to("meta") for tensor, value in built(name).state_dict().items()}
    other = diffusers_names.renamed(family, tensors, config)
    own, found = decided(tensors), decided(other)
    place = {}
    for theirs, target in diffusers_names.table(family, tensors, config).items():
        place[theirs.removesuffix(".weight")] = (target if isinstance(target, str) else target[0]).removesuffix(
            ".weight"
        )
    wrong = {layer: kept for layer, kept in found.items() if kept != own[place[layer]]}
    assert wrong == {}


@pytest.mark.parametrize("name", DIFFUSERS)
def test_convert_makes_of_diffusers_names_what_comfyui_makes(name):
    family, config = DIFFUSERS[name]
    tensors = {tensor: value.to("meta") for tensor, value in built(name).state_dict().items()}
    other = diffusers_names.renamed(family, tensors, config)
    stored = {tensor: StoredWeight(tensor, value) for tensor, value in other.items()}
    core = detection.diffusers_origins(Checkpoint("made", (), {}, stored, []))
    own = origins_of({tensor: tuple(value.shape) for tensor, value in other.items()}, "made")
    assert kind_of_file({tensor: tuple(value.shape) for tensor, value in other.items()}) == DIFFUSERS_NAMES
    assert len(core) > 100 and sorted(own.keys() ^ core.keys()) == []
    for tensor, (sources, order) in core.items():
        assert [*own[tensor].names] == [*sources], tensor
        found = own[tensor].order
        assert (order is None) == (found is None) and (order is None or torch.equal(order, found)), tensor


@every_model
def test_every_model_is_known_as_one_whose_quantized_layers_are_read(name):
    assert kind_of_file(shapes_of(name)) == MODEL


def core_class(name: str) -> type:
    state = {PREFIX.get(name, "") + tensor: value for tensor, value in built(name).state_dict().items()}
    config = comfy.model_detection.detect_unet_config(state, "")
    return type(comfy.model_detection.model_config_from_unet_config(config, state))


def dtypes_of(cls: type) -> tuple[str, ...]:
    return tuple(name_of(dtype) for dtype in cls.supported_inference_dtypes)


@every_model
def test_families_are_safe_in_what_comfyui_has_for_them(name):
    assert family_of(shapes_of(name)).supported == dtypes_of(core_class(name))


def test_every_diffusion_model_of_comfyui_is_of_a_family_with_its_dtypes():
    tested = {core_class(name): family_of(shapes_of(name)) for name in MODELS}
    kinds = {cls.unet_config.get("image_model"): family for cls, family in reversed(tested.items())}
    kinds[None] = family_of(shapes_of("SDXL"))  # SD 1.x and 2.x, SVD, the upscaler
    different = {}
    for cls in comfy.supported_models.models:
        if cls.__name__ not in NO_DIFFUSION_MODELS and cls not in tested:
            related = [family for other, family in tested.items() if issubclass(cls, other) or issubclass(other, cls)]
            family = related[0] if related else kinds[cls.unet_config.get("image_model")]
            if family.supported != dtypes_of(cls):
                different[cls.__name__] = (family.name, dtypes_of(cls))
    assert different == {}


def test_flux2_and_anima_are_in_nvfp4_where_comfy_orgs_recipes_have_them():
    """Comfy-Org/comfy-quants#6: 128 layers of Flux.2 dev in the mixed recipe; Anima without its block 0, the modulation of block 1 and the adapter."""
    made = {}
    for name in ("Flux.2 dev", "Anima"):
        plans = plan_storage(layers_of(name), "nvfp4", rules_from())
        made[name] = [layer for layer, plan in plans.items() if plan.storage == "nvfp4"]
    assert len(made["Flux.2 dev"]) == 128 and not any("_attn." in layer for layer in made["Flux.2 dev"])
    kept = ("blocks.0.", "blocks.1.adaln_modulation", "llm_adapter.")
    assert len(made["Anima"]) > 250 and not any(layer.startswith(kept) for layer in made["Anima"])


def test_a_doubt_about_nvfp4_is_of_the_model_it_is_reported_of():
    doubted = {
        name
        for name in MODELS
        if nvfp4_doubts(shapes_of(name), plan_storage(layers_of(name), "nvfp4", rules_from()).values())
        if nvfp4_doubts(shapes_by_weight(layers_of(name)), [LayerPlan("nvfp4")])
    }
    assert doubted == {"Krea 2", "Ideogram 4", "Qwen-Image", "Z-Image", "Lumina 2"}
