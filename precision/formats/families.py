"""Model families by the names of their tensors, and the dtypes each is safe in, for when ComfyUI is not at hand.

The dtypes are ComfyUI's ``supported_inference_dtypes``, in its order of preference (``comfy/supported_models.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

ALL = ("fp16", "bf16", "fp32")
BF16_FIRST = ("bf16", "fp16", "fp32")
NO_FP16 = ("bf16", "fp32")

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor name -> shape."""


@dataclass(frozen=True)
class Family:
    """A model family: the name people use, its safe dtypes, and its tensors.

    Attributes:
        supported: ComfyUI's, without the fp16 that it adds for some on devices of its choice.
        names: of tensors; all must be there.
        sizes: tensor name -> axis -> size, where names are not enough.
    """

    name: str
    supported: tuple[str, ...]
    names: tuple[str, ...]
    sizes: Mapping[str, Mapping[int, int]] = field(default_factory=dict)


_REFINER = "txt_in.individual_token_refiner.blocks.0.norm1.weight"
_FLUX_LINEAR = "single_blocks.0.linear1.weight"
_LENS_NORM = "transformer_blocks.0.attn.norm_added_q.weight"
# The first that fits counts. The names are those that ComfyUI's ``model_detection.py`` looks for, or next to them.
FAMILIES = (
    Family("Wan", ALL, ("head.modulation", "blocks.0.ffn.0.weight")),
    Family("Hunyuan Video 1.5", ALL, ("vision_in.proj.0.weight", _REFINER)),
    Family("Hunyuan Video", NO_FP16, (_REFINER,)),
    Family("Chroma", BF16_FIRST, ("distilled_guidance_layer.in_proj.weight",)),
    Family("Hunyuan3D 2", ALL, ("latent_in.weight", "cond_in.weight")),
    Family("Flux.1 Fill", NO_FP16, ("guidance_in.in_layer.weight", _FLUX_LINEAR), {"img_in.weight": {1: 384}}),
    Family("Flux", BF16_FIRST, ("double_blocks.0.img_attn.qkv.weight", _FLUX_LINEAR)),
    Family("Qwen-Image", NO_FP16, ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight")),
    Family("Qwen-Image 2.1", NO_FP16, ("txt_in.text_norm.weight", "txt_in.in_layer.weight", "txt_in.out_layer.weight")),
    Family("Lens", NO_FP16, (_LENS_NORM, "transformer_blocks.0.img_mlp.w1.weight")),
    Family("Z-Image or Lumina 2", NO_FP16, ("cap_embedder.1.weight", "layers.0.attention.qkv.weight")),
    Family("LTX Video", NO_FP16, ("patchify_proj.weight", "adaln_single.linear.weight")),
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
    Family("SD3", ALL, ("joint_blocks.0.x_block.attn.qkv.weight",)),
    Family("SD or SDXL", ALL, ("input_blocks.0.0.weight", "middle_block.0.in_layers.2.weight")),
)
UNKNOWN = Family("unknown family", NO_FP16, ())


def family_of(shapes: Shapes) -> Family:
    """Find the family of a diffusion model by its tensors without prefix; :data:`UNKNOWN` when none fits."""
    wanted = ((family, {**{name: {} for name in family.names}, **family.sizes}) for family in FAMILIES)
    return next((family for family, sizes in wanted if _fits(shapes, sizes)), UNKNOWN)


def family_named(name: str) -> Family:
    """Return the family of that name."""
    return next(family for family in FAMILIES if family.name == name)


# (family, what it is called, its tensors with sizes by axis), first match counts: ComfyUI's ``model_detection.py``.
_PATCH = "patch_embedding.weight"
_CONTEXT = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
VARIANTS: tuple[tuple[str, str, dict[str, dict[int, int]]], ...] = (
    ("Wan", "Wan VACE", {"vace_patch_embedding.weight": {}}),
    ("Wan", "Wan 2.2 speech to video", {"casual_audio_encoder.encoder.final_linear.weight": {}}),
    ("Wan", "Wan 2.2 5B", {_PATCH: {0: 3072}}),
    ("Wan", "Wan 2.1 image to video 14B", {"img_emb.proj.0.bias": {}, _PATCH: {0: 5120}}),
    ("Wan", "Wan 2.2 image to video 14B", {_PATCH: {0: 5120, 1: 36}}),
    ("Wan", "Wan 2.1 or 2.2 text to video 14B", {_PATCH: {0: 5120, 1: 16}}),
    ("Wan", "Wan 2.1 1.3B", {_PATCH: {0: 1536}}),
    ("Hunyuan Video", "Hunyuan Image 2.1", {"byt5_in.fc1.weight": {}}),
    ("Chroma", "Chroma Radiance", {"img_in_patch.weight": {}}),
    ("Flux", "Flux.2", {"double_stream_modulation_img.lin.weight": {}}),
    ("Qwen-Image", "Mage-Flow", {"txt_norm.weight": {0: 2560}, "proj_out.weight": {0: 128}}),
    ("Flux", "Flux.1 dev", {"guidance_in.in_layer.weight": {}, "img_in.weight": {1: 64}}),
    ("Flux", "Flux.1 schnell", {"img_in.weight": {1: 64}}),
    ("Z-Image or Lumina 2", "Z-Image", {"cap_embedder.1.weight": {0: 3840}}),
    ("Z-Image or Lumina 2", "Lumina 2", {"cap_embedder.1.weight": {0: 2304}}),
    ("LTX Video", "LTX 2, with sound", {"audio_adaln_single.linear.weight": {}}),
    ("SD3", "SD 3.5 Medium", {"joint_blocks.0.x_block.attn2.qkv.weight": {}}),
    ("SD3", "SD 3.5 Large", {"x_embedder.proj.weight": {0: 2432}}),
    ("SD3", "SD 3 Medium", {"x_embedder.proj.weight": {0: 1536}}),
    ("SD or SDXL", "SDXL", {"label_emb.0.0.weight": {1: 2816}}),
    ("SD or SDXL", "SDXL refiner", {"label_emb.0.0.weight": {1: 2560}}),
    ("SD or SDXL", "SD 1.x", {_CONTEXT: {1: 768}}),
    ("SD or SDXL", "SD 2.x", {_CONTEXT: {1: 1024}}),
)


def model_name(shapes: Shapes) -> str:
    """Name a diffusion model as people do, Wan 2.1 1.3B or SDXL, by its tensors' shapes;
    its family's name where that is all."""
    family = family_of(shapes)
    fitting = (name for of, name, wanted in VARIANTS if of == family.name and _fits(shapes, wanted))
    return next(fitting, family.name)


def _fits(shapes: Shapes, wanted: Mapping[str, Mapping[int, int]]) -> bool:
    return all(
        name in shapes and all(len(shapes[name]) > axis and shapes[name][axis] == size for axis, size in sizes.items())
        for name, sizes in wanted.items()
    )
