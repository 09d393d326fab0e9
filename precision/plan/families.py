"""Model families by the names of their tensors, and the dtypes each is safe in, for when ComfyUI is not at hand.

The dtypes are ComfyUI's ``supported_inference_dtypes``, in its order of preference (``comfy/supported_models.py``).
"""

from collections.abc import Iterable
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
