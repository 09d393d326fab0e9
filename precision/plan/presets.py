"""Layers that do not survive low precision, as patterns over their role and ComfyUI's layer names, with what each is.

What a model's structure shows comes first (``role:``, see ``structure.py``) and holds for any model. Names say which of
these a layer is, and find what structure does not show: those that vLLM-Omni, NVIDIA ModelOpt, SDNQ and
DiffSynth-Studio keep in 16 bit for diffusion transformers. The first and last blocks and the outlier-heavy projections
of the family presets follow ModelOpt and SGLang #23155.
"""

from .structure import MODULATION, OUTSIDE

DEFAULT_PRESET = "keep sensitive layers"

_OUTSIDE_BLOCKS = "outside the repeated blocks"
_TIMESTEP = "timestep, guidance and pooled embedding"
_PATCH = "patch and input projection"
_TEXT = "text and caption projection"
_MODULATION = "modulation"
_OUTPUT = "output projection"
_EMBEDDING = "embedding"
_EDGE = "first or last block"

_SENSITIVE = (
    (f"role:{OUTSIDE}", _OUTSIDE_BLOCKS),
    (f"role:{MODULATION}", _MODULATION),
    ("class:Embedding", _EMBEDDING),
    ("*pos_embed*", _EMBEDDING),
    ("*time_in*", _TIMESTEP),
    ("*guidance_in*", _TIMESTEP),
    ("*vector_in*", _TIMESTEP),
    ("*time_embed*", _TIMESTEP),
    ("*time_projection*", _TIMESTEP),
    ("*timestep_embed*", _TIMESTEP),
    ("*time_text_embed*", _TIMESTEP),
    ("*t_embedder*", _TIMESTEP),
    ("*y_embedder*", _TIMESTEP),
    ("*label_emb*", _TIMESTEP),
    ("*distilled_guidance_layer*", _TIMESTEP),
    ("img_in*", _PATCH),
    ("*x_embedder*", _PATCH),
    ("*patch_embed*", _PATCH),
    ("*patchify_proj*", _PATCH),
    ("input_blocks.0.*", _PATCH),
    ("conv_in*", _PATCH),
    ("txt_in*", _TEXT),
    ("*text_embedding*", _TEXT),
    ("img_emb*", _TEXT),
    ("*cap_embedder*", _TEXT),
    ("*context_embedder*", _TEXT),
    ("*caption_projection*", _TEXT),
    ("*byt5_in*", _TEXT),
    ("*vision_in*", _TEXT),
    ("*_mod.*", _MODULATION),
    ("*.mod_[xy]", _MODULATION),
    (r"re:\.mapper(_\w+)?$", _MODULATION),
    ("*modulation*", _MODULATION),
    ("*adaln*", _MODULATION),
    ("*adaLN*", _MODULATION),
    ("*emb_layers*", _MODULATION),
    ("*final_layer*", _OUTPUT),
    ("head.*", _OUTPUT),
    ("norm_out*", _OUTPUT),
    ("proj_out*", _OUTPUT),
    ("audio_proj_out*", _OUTPUT),
    ("out.*", _OUTPUT),
    ("conv_out*", _OUTPUT),
)

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
    (f"role:{OUTSIDE}", _OUTSIDE_BLOCKS),
    ("class:Embedding", _EMBEDDING),
    ("*lm_head*", _OUTPUT),
    ("*text_projection*", _OUTPUT),
    ("*patch_embed*", _PATCH),
    ("*pos_embed*", _EMBEDDING),
    ("*merger*", _PATCH),
    ("*.resblocks.*", "tensors ComfyUI splits while loading"),
)
