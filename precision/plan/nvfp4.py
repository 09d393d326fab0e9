"""nvfp4 by model family: layers that Comfy-Org's own nvfp4 recipes keep out of it, and reports of a
loss of quality.

Recipes: ``configs/*nvfp4*.yaml`` of Comfy-Org/comfy-quants#6 (16c6449d), for Anima, Flux, Flux.2,
Ideogram 4, LTX-Video and Qwen-Image. What they keep outside the blocks, and Qwen-Image's first
modulation, the default preset keeps as well. Flux and LTX-Video have nothing else. Of Flux.2 it is
the mixed recipe, which has the layers of the published ``flux2_dev_fp8mixed``. The lists of
Comfy-Org's published nvfp4 files of Krea 2 and Ideogram 4 are not public as text."""

from collections.abc import Iterable, Mapping, Sequence

from ..base.message import Message
from ..formats.families import family_of
from ..formats.layer_plan import LayerPlan
from .facts import LayerSpec
from .rules import KEEP, Rule

NVFP4 = "nvfp4"
RECIPE = "not in nvfp4 in Comfy-Org's own recipe"
NOT_IN_NVFP4 = {
    "Anima": ("blocks.0.*", "blocks.1.adaln_modulation*", "llm_adapter.*"),
    "Flux.2": ("*_attn.qkv", "*_attn.proj"),
}
"""Family -> patterns of layer names."""
DOUBT = "nvfp4 is reported to lose quality in {0}: {1} int8 is closer to the original."
DOUBTS = {
    "Krea 2": (
        "HSWQ ended its nvfp4 files, because the final latent's cosine does not reach 0.90 even with protected layers "
        "(README of ussoewwin/Hybrid-Sensitivity-Weighted-Quantization). Comfy-Org multiplies some layers of its own "
        "file in more bits for 'rather bad quality loss' (discussion 6 of Comfy-Org/Krea-2); which is not known here."
    ),
    "Ideogram 4": (
        "Comfy-Org keeps sensitive layers of its own file in fp8; which is not known here. nvfp4 for both of its "
        "models 'degrades quality quite badly' (discussion 3 of Comfy-Org/Ideogram-4)."
    ),
    "Qwen-Image": "LPIPS 0.51 with all layers in nvfp4 (unslothai/unsloth#10730).",
    "Z-Image, Ming-Image or Lumina 2": (
        "Z-Image with all layers in nvfp4 is farther from bf16 than in fp8 (unslothai/unsloth#10730), and of 'poor "
        "quality' with attention in nvfp4 (marcorez8/Z-image-aka-Base-nvfp4)."
    ),
}
"""Family -> what is reported, and by whom."""


def kept_from_nvfp4(layers: Sequence[LayerSpec]) -> tuple[Rule, ...]:
    """Return preset rules for the layers that Comfy-Org's recipe of a model's family keeps out of
    nvfp4."""
    patterns = NOT_IN_NVFP4.get(family_of(shapes_by_weight(layers)).name, ())
    return tuple(Rule(pattern, KEEP, RECIPE, NVFP4) for pattern in patterns)


def nvfp4_doubts(shapes: Mapping[str, tuple[int, ...]], plans: Iterable[LayerPlan]) -> list[str]:
    """Return the reports of a loss of quality for a model that is planned to be converted to nvfp4.

    ``shapes``: of the model's weights, by their names inside the model.
    """
    family = family_of(shapes).name
    if family not in DOUBTS or not any(plan.storage == NVFP4 for plan in plans):
        return []
    return [Message(DOUBT, family, DOUBTS[family])]


def shapes_by_weight(layers: Iterable[LayerSpec]) -> dict[str, tuple[int, ...]]:
    """Return weight name -> shape, of the weights of layers."""
    return {f"{layer.name}.weight": layer.shape for layer in layers}
