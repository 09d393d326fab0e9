"""Layers that do not survive low precision, as patterns over their role and ComfyUI's layer names,
with what each is.

What a model's structure shows comes first (``role:``, see ``structure.py``) and holds for any
model. Names say which of these a layer is, and find what structure does not show: those that
vLLM-Omni, NVIDIA ModelOpt, SDNQ and DiffSynth-Studio keep in 16 bit for diffusion transformers. The
first and last blocks and the outlier-heavy projections of the family presets follow ModelOpt and
SGLang #23155."""

from .structure import MODULATION, OUTSIDE

DEFAULT_PRESET = "keep sensitive layers"

_EDGE = "first or last block"


def _named(role: str, *patterns: str) -> tuple[tuple[str, str], ...]:
    return tuple((pattern, role) for pattern in patterns)


_OUTSIDE_BLOCKS = _named("outside the repeated blocks", f"role:{OUTSIDE}")
_SENSITIVE = (
    *_OUTSIDE_BLOCKS,
    *_named("modulation", f"role:{MODULATION}"),
    *_named("embedding", "class:Embedding", "*pos_embed*"),
    *_named(
        "timestep, guidance and pooled embedding",
        "*time_in*", "*guidance_in*", "*vector_in*", "*time_embed*", "*time_projection*", "*timestep_embed*",
        "*time_text_embed*", "*t_embedder*", "*y_embedder*", "*label_emb*", "*distilled_guidance_layer*",
    ),
    *_named(
        "patch and input projection",
        "img_in*", "*x_embedder*", "*patch_embed*", "*patchify_proj*", "input_blocks.0.*", "conv_in*",
    ),
    *_named(
        "text and caption projection",
        "txt_in*", "*text_embedding*", "img_emb*", "*cap_embedder*", "*context_embedder*", "*caption_projection*",
        "*byt5_in*", "*vision_in*",
    ),
    *_named(
        "modulation",
        "*_mod.*", "*.mod_[xy]", r"re:\.mapper(_\w+)?$", "*modulation*", "*adaln*", "*adaLN*", "*emb_layers*",
        "*.norm.linear", "*.norm1.linear", "*.norm1_context.linear", "*.time_emb_proj",
    ),
    *_named(
        "output projection",
        "*final_layer*", "head.*", "norm_out*", "proj_out*", "audio_proj_out*", "out.*", "conv_out*",
    ),
)  # fmt: skip

PRESETS = {
    "none": (),
    DEFAULT_PRESET: _SENSITIVE,
    "wan": (*_SENSITIVE, (r"re:^blocks\.(0|1|2|37|38|39)\.", _EDGE)),
    "flux": (*_SENSITIVE, ("*.linear2", "projection of attention and MLP, wide input")),
    "qwen_image": (
        *_SENSITIVE,
        (r"re:^transformer_blocks\.(0|1|58|59)\.", _EDGE),
        ("*.img_mlp.net.2", "MLP output, outlier channels"),
    ),
    "z_image": (*_SENSITIVE, ("*.feed_forward.w2", "gated MLP output, outlier channels")),
    "hunyuan_video": (*_SENSITIVE, ("*.linear2", "projection of attention and MLP, wide input")),
    "sdxl": (*_SENSITIVE, ("*.proj_in", "block input projection"), ("*.proj_out", "block output projection")),
    "ltx": (*_SENSITIVE, (r"re:^transformer_blocks\.(0|1|2|45|46|47)\.", _EDGE)),
}

TEXT_ENCODER = (
    *_OUTSIDE_BLOCKS,
    *_named("embedding", "class:Embedding"),
    *_named("output projection", "*lm_head*", "*text_projection*"),
    *_named("patch and input projection", "*patch_embed*"),
    *_named("embedding", "*pos_embed*"),
    *_named("patch and input projection", "*merger*"),
    *_named("tensors ComfyUI splits while loading", "*.resblocks.*"),
)
