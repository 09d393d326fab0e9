"""Model families by the names of their tensors, and the dtypes each is safe in, for when ComfyUI is
not at hand.

The dtypes are ComfyUI's ``supported_inference_dtypes``, in its order of preference
(``comfy/supported_models.py``)."""

from collections.abc import Mapping
from typing import NamedTuple

ALL = ("fp16", "bf16", "fp32")
BF16_FIRST = ("bf16", "fp16", "fp32")
NO_FP16 = ("bf16", "fp32")


class Family(NamedTuple):
    """A model family: the name people use, its safe dtypes, and its tensors.

    Attributes:
        supported: ComfyUI's, without the fp16 that it adds for some on devices of its choice.
        names: of tensors; all must be there.
        inputs: how many inputs the last of these has, where names are not enough.
    """

    name: str
    supported: tuple[str, ...]
    names: tuple[str, ...]
    inputs: int = 0


_FLUX_LINEAR = "single_blocks.0.linear1.weight"
_FLUX = ("double_blocks.0.img_attn.qkv.weight", _FLUX_LINEAR)
_REFINER = "txt_in.individual_token_refiner.blocks.0.norm1.weight"
_SD = ("input_blocks.0.0.weight", "middle_block.0.in_layers.2.weight")
_QWEN_IMAGE = ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight")
_MOT = "language_model.model.layers.0.self_attn.q_proj_mot_gen.weight"
# The first that fits is it. The names are those that ComfyUI's ``model_detection.py`` looks for, or next to them. Rarer
# families that are not safe in fp16 are not here: an unknown one is taken for such. Wan-Animate-2 has Wan's tensors and
# is told by the file's metadata; Ming-Image has those of Z-Image.
FAMILIES = (
    Family("Wan", ALL, ("head.modulation", "blocks.0.ffn.0.weight")),
    Family("Hunyuan Video 1.5", ALL, ("vision_in.proj.0.weight", _REFINER)),
    Family("Hunyuan Video", NO_FP16, (_REFINER,)),
    Family("Chroma", BF16_FIRST, ("distilled_guidance_layer.in_proj.weight",)),
    Family("Hunyuan3D 2", ALL, ("latent_in.weight", "cond_in.weight")),
    Family("Flux.1 Fill", NO_FP16, ("guidance_in.in_layer.weight", _FLUX_LINEAR, "img_in.weight"), 384),
    Family("Flux.2", BF16_FIRST, (*_FLUX, "double_stream_modulation_img.lin.weight")),
    Family("Flux", BF16_FIRST, _FLUX),
    Family("Mage-Flow", NO_FP16, (*_QWEN_IMAGE, "txt_in.weight"), 2560),
    Family("Qwen-Image", NO_FP16, _QWEN_IMAGE),
    Family("Qwen-Image 2.1", NO_FP16, ("txt_in.text_norm.weight", "modulation.1.weight")),
    Family("Z-Image, Ming-Image or Lumina 2", NO_FP16, ("cap_embedder.1.weight", "layers.0.attention.qkv.weight")),
    Family("LTX Video", NO_FP16, ("patchify_proj.weight", "adaln_single.linear.weight")),
    Family("Ideogram 4", NO_FP16, ("embed_image_indicator.weight",)),
    Family("Krea 2", BF16_FIRST, ("txtfusion.projector.weight",)),
    Family("HiDream", NO_FP16, ("caption_projection.0.linear.weight",)),
    Family("Anima", BF16_FIRST, ("llm_adapter.blocks.0.cross_attn.q_proj.weight",)),
    Family("Cosmos Predict2", BF16_FIRST, ("blocks.0.mlp.layer1.weight",)),
    Family("Cosmos", BF16_FIRST, ("blocks.block0.blocks.0.block.attn.to_q.0.weight",)),
    Family("CogVideoX", BF16_FIRST, ("blocks.0.norm1.linear.weight", "patch_embed.text_proj.weight")),
    Family("SeedVR2", BF16_FIRST, ("emb_in.proj_hid.weight", "vid_in.proj.weight")),
    Family("MiniMax H3", NO_FP16, ("video_patch_proj.weight", "audio_patch_proj.weight")),
    Family("MiniMax Music 3", ALL, ("cond_layer_logits", "latent_conditioners.0.weight")),
    Family("SenseNova U1.5", NO_FP16, ("fm_modules.vision_model_mot_gen.embeddings.patch_embedding.weight", _MOT)),
    Family("Trellis 2", NO_FP16, ("img2shape.t_embedder.mlp.0.weight",)),
    Family("Trellis 2", NO_FP16, ("shape2txt.t_embedder.mlp.0.weight",)),
    Family("YuE 2", NO_FP16, ("vae2llm.weight", "llm2vae.weight", "latent_pos_embed.pe")),
    Family("AuraFlow", ALL, ("double_layers.0.attn.w1q.weight",)),
    Family("HunyuanDiT", ALL, ("mlp_t5.0.weight",)),
    Family("Hunyuan3D 2.1", ALL, ("t_embedder.mlp.2.weight", "blocks.0.attn1.k_norm.weight")),
    Family("Stable Cascade B", ALL, ("clf.1.weight", "clip_mapper.weight")),
    Family("PixArt", ALL, ("t_block.1.weight", "y_embedder.y_proj.fc1.weight")),
    Family("Stable Audio", ALL, ("to_timestep_embed.0.weight", "transformer.project_in.weight")),
    Family("TripoSplat", ALL, ("cam_out_layer.weight",)),
    Family("SD 3", ALL, ("joint_blocks.0.x_block.attn.qkv.weight",)),
    Family("SDXL", ALL, (*_SD, "label_emb.0.0.weight")),
    Family("SD 1.x or 2.x", ALL, _SD),
)
UNKNOWN = Family("unknown family", NO_FP16, ())


def family_of(shapes: Mapping[str, tuple[int, ...]]) -> Family:
    """Find the family of a diffusion model by its tensors' shapes, without prefix; :data:`UNKNOWN`
    when none fits.

    Example:
        >>> from halfsafe.precision.formats.families import family_of
        >>> family_of({"txt_in.individual_token_refiner.blocks.0.norm1.weight": (64,)}).name
        'Hunyuan Video'
    """

    def fits(family: Family) -> bool:
        if not shapes.keys() >= {*family.names}:
            return False
        return not family.inputs or shapes[family.names[-1]][1:] == (family.inputs,)

    return next(filter(fits, FAMILIES), UNKNOWN)
