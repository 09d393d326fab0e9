"""Model families by the names of their tensors, and the dtypes each is safe in, for when ComfyUI is not at hand.

The dtypes are ComfyUI's ``supported_inference_dtypes``, in its order of preference (``comfy/supported_models.py``).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALL = ("fp16", "bf16", "fp32")
BF16_FIRST = ("bf16", "fp16", "fp32")
NO_FP16 = ("bf16", "fp32")


@dataclass(frozen=True)
class Family:
    """A family: the name people use, the dtypes it is safe in, and tensor names that tell it (all must be there)."""

    name: str
    supported: tuple[str, ...]
    names: tuple[str, ...]


FAMILIES = (
    Family("Wan", ALL, ("head.modulation", "blocks.0.ffn.0.weight")),
    Family("Hunyuan Video", NO_FP16, ("txt_in.individual_token_refiner.blocks.0.norm1.weight",)),
    Family("Chroma", BF16_FIRST, ("distilled_guidance_layer.in_proj.weight",)),
    Family("Flux", BF16_FIRST, ("double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight")),
    Family("Qwen-Image", NO_FP16, ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight")),
    Family("Z-Image or Lumina 2", NO_FP16, ("cap_embedder.1.weight", "layers.0.attention.qkv.weight")),
    Family("LTX Video", NO_FP16, ("patchify_proj.weight", "adaln_single.linear.weight")),
    Family("SD3", ALL, ("joint_blocks.0.x_block.attn.qkv.weight",)),
    Family("SD or SDXL", ALL, ("input_blocks.0.0.weight", "middle_block.0.in_layers.2.weight")),
)
UNKNOWN = Family("unknown family", NO_FP16, ())


def family_of(names: Iterable[str]) -> Family:
    """Find the family of a diffusion model by its tensor names without prefix; :data:`UNKNOWN` when none fits."""
    names = frozenset(names)
    return next((family for family in FAMILIES if names.issuperset(family.names)), UNKNOWN)


# (family, what it is called, its tensors with sizes by axis), first match counts. From ComfyUI's ``model_detection.py``.
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
    ("Hunyuan Video", "Hunyuan Video 1.5", {"vision_in.proj.0.weight": {}}),
    ("Flux", "Flux.2", {"double_stream_modulation_img.lin.weight": {}}),
    ("Flux", "Flux.1 Fill", {"guidance_in.in_layer.weight": {}, "img_in.weight": {1: 384}}),
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


def model_name(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Name a diffusion model as people do, Wan 2.1 1.3B or SDXL, by its tensors' shapes; its family's name where that is all."""
    family = family_of(shapes)
    fitting = (name for of, name, wanted in VARIANTS if of == family.name and _fits(shapes, wanted))
    return next(fitting, family.name)


def _fits(shapes: Mapping[str, tuple[int, ...]], wanted: Mapping[str, Mapping[int, int]]) -> bool:
    return all(
        name in shapes and all(len(shapes[name]) > axis and shapes[name][axis] == size for axis, size in sizes.items())
        for name, sizes in wanted.items()
    )
