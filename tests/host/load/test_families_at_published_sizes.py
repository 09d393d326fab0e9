"""ComfyUI's models at their published sizes, by names and shapes: which layers stay in 16 bit, and which family they are told as."""

from math import prod

import comfy.model_detection
import comfy.supported_models
import pytest
from halfsafe.precision.base.dtypes import name_of
from halfsafe.precision.formats.checkpoint import Checkpoint, StoredWeight
from halfsafe.precision.formats.families import UNKNOWN, family_of
from halfsafe.precision.formats.int8 import rotation_group
from halfsafe.precision.plan.facts import layer_specs
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.plan.storage import plan_storage
from halfsafe.precision.plan.structure import OUTSIDE, roles_of
from support import real_models

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
every_model = pytest.mark.parametrize("name", real_models.MODELS)


def weights(layers) -> int:
    return sum(prod(layer.shape) for layer in layers)


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    prefix = PREFIX.get(name, "")
    return {prefix + tensor: tuple(value.shape) for tensor, value in real_models.built(name).state_dict().items()}


@every_model
@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_the_ends_of_the_data_path_stay_high_and_most_of_the_blocks_do_not(name, storage):
    layers = real_models.layers(name)
    decisions, roles = plan_storage(layers, storage, rules_from()), roles_of(layers)
    for end in next(ends for start, ends in ENDS.items() if name.startswith(start)):
        assert (decisions[end].storage, decisions[end].kept) == ("as_file", True) and decisions[end].reason
    linear = [layer for layer in layers if layer.cls == "Linear"]
    inside = [layer for layer in linear if roles.get(layer.name) != OUTSIDE]
    assert all(decisions[layer.name].kept for layer in linear if layer not in inside)
    can = [layer for layer in inside if storage != "int8" or rotation_group(layer.shape[1])]  # OmniGen2: 2520 inputs
    assert weights(layer for layer in can if decisions[layer.name].storage == storage) > 0.55 * weights(can)
    # PiD, a decoder of 1.4 billion parameters, has 11 %, Chroma Radiance's pixel blocks 9 %, PixelDiT's as much, all others below 7 %.
    assert weights(layer for layer in linear if layer not in inside) < 0.12 * weights(layers)


@every_model
def test_a_file_s_header_gives_the_same_decisions_as_the_loaded_model(name):
    model, layers = real_models.built(name), real_models.layers(name)
    stored = {tensor: StoredWeight(tensor, value) for tensor, value in model.state_dict().items()}
    from_file = plan_storage(layer_specs(Checkpoint("", "", {}, stored, [])), "fp8_e4m3fn", rules_from())
    loaded = plan_storage(layers, "fp8_e4m3fn", rules_from())
    linear = [layer.name for layer in layers if layer.cls == "Linear"]
    assert {name: from_file[name].storage for name in linear} == {name: loaded[name].storage for name in linear}


def core_class(name: str) -> type:
    state = {PREFIX.get(name, "") + tensor: value for tensor, value in real_models.built(name).state_dict().items()}
    config = comfy.model_detection.detect_unet_config(state, "")
    return type(comfy.model_detection.model_config_from_unet_config(config, state))


def dtypes_of(cls: type) -> tuple[str, ...]:
    return tuple(name_of(dtype) for dtype in cls.supported_inference_dtypes)


@every_model
def test_families_are_safe_in_what_comfyui_has_for_them(name):
    family = family_of(shapes_of(name))
    assert family is not UNKNOWN
    assert family.supported == dtypes_of(core_class(name))


def test_every_diffusion_model_of_comfyui_is_of_a_family_with_its_dtypes():
    built = {core_class(name): family_of(shapes_of(name)) for name in real_models.MODELS}
    kinds = {cls.unet_config.get("image_model"): family for cls, family in reversed(built.items())}
    kinds[None] = family_of(shapes_of("SDXL"))  # SD 1.x and 2.x, SVD, the upscaler
    different = {}
    for cls in comfy.supported_models.models:
        if cls.__name__ not in NO_DIFFUSION_MODELS and cls not in built:
            related = [family for other, family in built.items() if issubclass(cls, other) or issubclass(other, cls)]
            family = related[0] if related else kinds[cls.unet_config.get("image_model")]
            if family.supported != dtypes_of(cls):
                different[cls.__name__] = (family.name, dtypes_of(cls))
    assert different == {}
