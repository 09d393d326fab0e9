"""Model families by the names of their tensors, and the dtypes each is safe in, for when ComfyUI is not at hand.

The dtypes are ComfyUI's ``supported_inference_dtypes``, in its order of preference (``comfy/supported_models.py``).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

ALL = ("fp16", "bf16", "fp32")
BF16_FIRST = ("bf16", "fp16", "fp32")
NO_FP16 = ("bf16", "fp32")


class Family(NamedTuple):
    """A model family: the name people use, its safe dtypes, and its tensors.

    Attributes:
        supported: ComfyUI's, without the fp16 that it adds for some on devices of its choice.
        names: of tensors; all must be there.
        sizes: tensor name -> axis -> size, where names are not enough.
    """

    name: str
    supported: tuple[str, ...]
    names: tuple[str, ...]
    sizes: Mapping[str, Mapping[int, int]] = MappingProxyType({})


_REFINER = "txt_in.individual_token_refiner.blocks.0.norm1.weight"
_FLUX_LINEAR = "single_blocks.0.linear1.weight"
_LENS_NORM = "transformer_blocks.0.attn.norm_added_q.weight"
_PATCH = "patch_embedding.weight"
_CONTEXT = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
_WAN = ("head.modulation", "blocks.0.ffn.0.weight")
_FLUX = ("double_blocks.0.img_attn.qkv.weight", _FLUX_LINEAR)
_QWEN = ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight")
_LTX = ("patchify_proj.weight", "adaln_single.linear.weight")
_Z_IMAGE = ("cap_embedder.1.weight", "layers.0.attention.qkv.weight")
_SD3 = ("joint_blocks.0.x_block.attn.qkv.weight",)
_SD = ("input_blocks.0.0.weight", "middle_block.0.in_layers.2.weight")
# The first that fits is it. The names are those that ComfyUI's ``model_detection.py`` looks for, or next to them.
FAMILIES = (
    Family("Wan VACE", ALL, _WAN, {"vace_patch_embedding.weight": {}}),
    Family("Wan 2.2 speech to video", ALL, _WAN, {"casual_audio_encoder.encoder.final_linear.weight": {}}),
    Family("Wan 2.2 5B", ALL, _WAN, {_PATCH: {0: 3072}}),
    Family("Wan 2.1 image to video 14B", ALL, _WAN, {"img_emb.proj.0.bias": {}, _PATCH: {0: 5120}}),
    Family("Wan 2.2 image to video 14B", ALL, _WAN, {_PATCH: {0: 5120, 1: 36}}),
    Family("Wan 2.1 or 2.2 text to video 14B", ALL, _WAN, {_PATCH: {0: 5120, 1: 16}}),
    Family("Wan 2.1 1.3B", ALL, _WAN, {_PATCH: {0: 1536}}),
    Family("Wan", ALL, _WAN),
    Family("Hunyuan Video 1.5", ALL, ("vision_in.proj.0.weight", _REFINER)),
    Family("Hunyuan Image 2.1", NO_FP16, (_REFINER,), {"byt5_in.fc1.weight": {}}),
    Family("Hunyuan Video", NO_FP16, (_REFINER,)),
    Family("Chroma Radiance", BF16_FIRST, ("distilled_guidance_layer.in_proj.weight",), {"img_in_patch.weight": {}}),
    Family("Chroma", BF16_FIRST, ("distilled_guidance_layer.in_proj.weight",)),
    Family("Hunyuan3D 2", ALL, ("latent_in.weight", "cond_in.weight")),
    Family("Flux.1 Fill", NO_FP16, ("guidance_in.in_layer.weight", _FLUX_LINEAR), {"img_in.weight": {1: 384}}),
    Family("Flux.2", BF16_FIRST, _FLUX, {"double_stream_modulation_img.lin.weight": {}}),
    Family("Flux.1 dev", BF16_FIRST, _FLUX, {"guidance_in.in_layer.weight": {}, "img_in.weight": {1: 64}}),
    Family("Flux.1 schnell", BF16_FIRST, _FLUX, {"img_in.weight": {1: 64}}),
    Family("Flux", BF16_FIRST, _FLUX),
    Family("Mage-Flow", NO_FP16, _QWEN, {"txt_norm.weight": {0: 2560}, "proj_out.weight": {0: 128}}),
    Family("Qwen-Image", NO_FP16, _QWEN),
    Family("Qwen-Image 2.1", NO_FP16, ("txt_in.text_norm.weight", "txt_in.in_layer.weight", "txt_in.out_layer.weight")),
    Family("Lens", NO_FP16, (_LENS_NORM, "transformer_blocks.0.img_mlp.w1.weight")),
    Family("Z-Image", NO_FP16, _Z_IMAGE, {"cap_embedder.1.weight": {0: 3840}}),
    Family("Lumina 2", NO_FP16, _Z_IMAGE, {"cap_embedder.1.weight": {0: 2304}}),
    Family("Z-Image or Lumina 2", NO_FP16, _Z_IMAGE),
    Family("LTX 2, with sound", NO_FP16, _LTX, {"audio_adaln_single.linear.weight": {}}),
    Family("LTX Video", NO_FP16, _LTX),
    Family("MiniMax H3", NO_FP16, ("video_patch_proj.weight", "audio_patch_proj.weight")),
    Family("Krea 2", BF16_FIRST, ("txtfusion.projector.weight",)),
    Family("HiDream", NO_FP16, ("caption_projection.0.linear.weight",)),
    Family("HiDream-O1", NO_FP16, ("t_embedder1.mlp.0.weight", "x_embedder.proj1.weight")),
    Family("Ideogram 4", NO_FP16, ("embed_image_indicator.weight",)),
    Family("ERNIE-Image", NO_FP16, ("layers.0.mlp.linear_fc2.weight", "final_linear.weight")),
    Family("Kandinsky 5", NO_FP16, ("visual_transformer_blocks.0.cross_attention.key_norm.weight",)),
    Family("Boogu", NO_FP16, ("double_stream_layers.0.img_instruct_attn.processor.img_to_q.weight",)),
    Family("OmniGen2", NO_FP16, ("time_caption_embed.timestep_embedder.linear_1.weight",)),
    Family("JoyImage", NO_FP16, ("double_blocks.0.attn.img_attn_qkv.weight",)),
    Family("Anima", BF16_FIRST, ("llm_adapter.blocks.0.cross_attn.q_proj.weight",)),
    Family("Cosmos Predict2", BF16_FIRST, ("blocks.0.mlp.layer1.weight",)),
    Family("Cosmos", BF16_FIRST, ("blocks.block0.blocks.0.block.attn.to_q.0.weight",)),
    Family("CogVideoX", BF16_FIRST, ("blocks.0.norm1.linear.weight", "patch_embed.text_proj.weight")),
    Family("SeedVR2", BF16_FIRST, ("emb_in.proj_hid.weight", "vid_in.proj.weight")),
    Family("Mochi", NO_FP16, ("t5_yproj.weight",)),
    Family("AuraFlow", ALL, ("double_layers.0.attn.w1q.weight",)),
    Family("HunyuanDiT", ALL, ("mlp_t5.0.weight",)),
    Family("Hunyuan3D 2.1", ALL, ("t_embedder.mlp.2.weight", "blocks.0.attn1.k_norm.weight")),
    Family("Stable Cascade C", NO_FP16, ("clf.1.weight", "clip_txt_mapper.weight")),
    Family("Stable Cascade B", ALL, ("clf.1.weight", "clip_mapper.weight")),
    Family("ACE-Step", NO_FP16, ("genre_embedder.weight",)),
    Family("ACE-Step 1.5", NO_FP16, ("encoder.lyric_encoder.layers.0.input_layernorm.weight",)),
    Family("PixArt", ALL, ("t_block.1.weight", "y_embedder.y_proj.fc1.weight")),
    Family("Stable Audio", ALL, ("to_timestep_embed.0.weight", "transformer.project_in.weight")),
    Family("TripoSplat", ALL, ("cam_out_layer.weight",)),
    Family("PiD", NO_FP16, ("lq_proj.latent_proj.0.weight",)),
    Family("PixelDiT", NO_FP16, ("core.pixel_embedder.proj.weight",)),
    Family("SD 3.5 Medium", ALL, _SD3, {"joint_blocks.0.x_block.attn2.qkv.weight": {}}),
    Family("SD 3.5 Large", ALL, _SD3, {"x_embedder.proj.weight": {0: 2432}}),
    Family("SD 3 Medium", ALL, _SD3, {"x_embedder.proj.weight": {0: 1536}}),
    Family("SD3", ALL, _SD3),
    Family("SDXL", ALL, _SD, {"label_emb.0.0.weight": {1: 2816}}),
    Family("SDXL refiner", ALL, _SD, {"label_emb.0.0.weight": {1: 2560}}),
    Family("SD 1.x", ALL, _SD, {_CONTEXT: {1: 768}}),
    Family("SD 2.x", ALL, _SD, {_CONTEXT: {1: 1024}}),
    Family("SD or SDXL", ALL, _SD),
)
UNKNOWN = Family("unknown family", NO_FP16, ())


def family_of(shapes: Mapping[str, tuple[int, ...]]) -> Family:
    """Find the family of a diffusion model by its tensors' shapes, without prefix; :data:`UNKNOWN` when none fits."""

    def has(name: str, sizes: Mapping[int, int]) -> bool:
        return name in shapes and dict(enumerate(shapes[name])).items() >= sizes.items()

    def fits(family: Family) -> bool:
        return shapes.keys() >= {*family.names} and all(has(*item) for item in family.sizes.items())

    return next(filter(fits, FAMILIES), UNKNOWN)


def family_named(name: str) -> Family:
    """Return the family of that name."""
    return next(family for family in FAMILIES if family.name == name)
