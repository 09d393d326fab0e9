"""Where ComfyUI reads quantized layers: by the kind of a file, or of a part of a checkpoint.

Read at the source of ComfyUI 0.30.0 and of 783545f6 (0.33.0 and nine days): ``comfy/sd.py``
(models, text encoders, VAEs), ``comfy/model_detection.py`` (``convert_diffusers_mmdit``, which
fuses q, k and v without their scales), ``comfy/controlnet.py``, ``comfy/clip_vision.py`` and the
loaders of ``comfy_extras``. A loader that reads no ``comfy_quant`` takes codes for weights, which
gives noise."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from ..base.errors import CheckpointError
from ..base.message import Message
from .checkpoint import MODEL_PREFIXES, Checkpoint
from .families import UNKNOWN, family_of
from .format import Format

Shapes = Mapping[str, tuple[int, ...]]
READ_UP_TO = "0.33"
SINCE_FORMAT = "0.0.0"


class Kind(NamedTuple):
    """A kind of model file, or of a part of a checkpoint.

    Attributes:
        name: with its article, for messages.
        since: the first ComfyUI that reads quantized layers in it, if it has their format; None where none does.
        why: why ComfyUI does not read them.
        loader: the node of this package that does; empty without one.
    """

    name: str
    since: str | None = None
    why: str = ""
    loader: str = ""


NO_SCALES = "ComfyUI's loader of this kind takes the codes of quantized layers for weights"
RENAMES = (
    "ComfyUI renames and fuses the layers of this model as it loads them, without their scales; convert writes them "
    "under the names that ComfyUI reads"
)
LORA = Kind("a LoRA or another adapter in low-rank form", why="ComfyUI adds it in 16 bit")
ADAPTER = Kind("an adapter for another model", why=NO_SCALES)
CONTROL = Kind("a ControlNet", why=NO_SCALES, loader="Load ControlNet (Halfsafe)")
DIFFUSERS = Kind("a diffusion model with diffusers' names", why=RENAMES, loader="Load Diffusion Model (Halfsafe)")
PREFIXED = Kind(
    "a diffusion model whose names begin as ComfyUI's do not",
    why="ComfyUI does not load it; convert writes the names without that prefix",
    loader="Load Diffusion Model (Halfsafe)",
)
FOREIGN_NAMES = Kind("a diffusion model with names that ComfyUI does not know", why="ComfyUI does not load it")
MODEL = Kind("a diffusion model", SINCE_FORMAT)
T5_XXL = Kind("a T5 XXL text encoder", SINCE_FORMAT)
LANGUAGE_MODEL = Kind("a language model as text encoder", SINCE_FORMAT)
CLIP = Kind("a CLIP text encoder", why=NO_SCALES, loader="Load CLIP (Halfsafe)")
SMALL_ENCODER = Kind("a text encoder other than T5 XXL", why=NO_SCALES, loader="Load CLIP (Halfsafe)")
IMAGE_ENCODER = Kind("an image or audio encoder", why=NO_SCALES)
MINIMAX_VAE = Kind("the video VAE of MiniMax H3", "0.31.0")  # Comfy-Org/ComfyUI#15334
VAE = Kind("a VAE", why=NO_SCALES, loader="Load VAE (Halfsafe)")
UPSCALER = Kind("an upscaler", why=NO_SCALES)
NOT_KNOWN = Kind("a file of a kind that its tensors' names do not tell", SINCE_FORMAT)
WHERE_READ = "if it is a diffusion model with ComfyUI's names, a T5 XXL or a language model; nowhere else"


def _named(pattern: str) -> Callable[[Shapes], bool]:
    """Return a test for tensor names, true if any of them matches a pattern."""
    search = re.compile(pattern).search
    return lambda shapes: any(map(search, shapes))


def _holds(*names: str) -> Callable[[Shapes], bool]:
    """Return a test for tensor names, true if all of these are among them."""
    return lambda shapes: shapes.keys() >= {*names}


def _is_model(shapes: Shapes) -> bool:
    return family_of(shapes).name != UNKNOWN.name


def _is_t5_xxl(shapes: Shapes) -> bool:
    """True for the T5 in which ComfyUI looks for ``comfy_quant`` (``t5xxl_detect`` and
    ``detect_te_model``)."""
    layer = "encoder.block.23.layer.1.DenseReluDense."
    gated = next((shape for name, shape in shapes.items() if name.endswith(f"{layer}wi_1.weight")), (0,))
    return gated[0] == 10240 or any(name.endswith(f"{layer}wi.weight") for name in shapes)


_LORA = re.compile(r"lora_|\.lora\.|hada_w1|lokr_w|oft_(blocks|diag)|\.dora_scale$|\.diff(_b)?$|\.glora")
# The first that fits is it. The names of diffusers' models that ComfyUI converts are those by which its
# ``convert_diffusers_mmdit`` and ``model_config_from_diffusers_unet`` know them.
KINDS: tuple[tuple[Kind, Callable[[Shapes], bool]], ...] = (
    (LORA, _named(_LORA.pattern)),
    (ADAPTER, _named(r"^(ip_adapter|image_proj|position_net|control_layers|control_all_x_embedder|id_encoder)\b")),
    (
        CONTROL,
        _named(
            r"^(control_model|zero_convs|input_hint_block|after_proj_list|control_blocks|adapter\.body)\.|^controlnet_"
            r"|^single_controlnet_blocks\.|^body\.\d+\.(in_conv|block1)\."
        ),
    ),
    (DIFFUSERS, _holds("x_embedder.weight", "time_text_embed.text_embedder.linear_1.weight")),  # Flux
    (DIFFUSERS, _holds("pos_embed.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight")),  # SD3
    (DIFFUSERS, _holds("joint_transformer_blocks.0.attn.add_k_proj.weight")),  # AuraFlow
    (DIFFUSERS, _holds("pos_embed.proj.bias", "adaln_single.emb.timestep_embedder.linear_1.bias")),  # PixArt
    (DIFFUSERS, _holds("noise_refiner.0.attention.norm_k.weight")),  # Z-Image
    (DIFFUSERS, _holds("down_blocks.0.resnets.0.conv1.weight")),  # UNets
    (
        MODEL,
        _named(
            r"^(decoder\.condition_embedder|image_index_embedding|t5_yproj|visual_transformer_blocks|genre_embedder"
            r"|clip_txt_(pooled_)?mapper|(core\.)?pixel_embedder|lq_proj|embed_image_indicator|x_embedder\.proj1"
            r"|transformer_blocks\.0\.img_mlp\.w1|layers\.0\.mlp\.linear_fc2|double_stream_layers|t_embedder1"
            r"|double_blocks\.0\.attn\.img_attn_qkv)\b"
        ),
    ),
    # Wan, HunyuanVideo, Flux.2 and Chroma, Lumina 2, CogVideoX as diffusers names them.
    (
        FOREIGN_NAMES,
        _named(
            r"^(condition_embedder\.time_proj|context_embedder\.token_refiner|single_transformer_blocks\.0"
            r"|layers\.0\.attn\.to_q|transformer_blocks\.0\.norm1\.linear)\."
        ),
    ),
    (MODEL, _is_model),
    (T5_XXL, _is_t5_xxl),
    (
        SMALL_ENCODER,
        _named(
            r"(^|\.)encoder\.(block\.\d+\.layer|layers\.\d+\.(mixer|pre_self_attn_layernorm))\.|(^|\.)bert\.encoder\."
        ),
    ),
    (VAE, _named(r"^geo_decoder\.")),
    (CLIP, _named(r"(^|\.)text_model\.encoder\.layers\.|(^|\.)(?<!visual\.)transformer\.resblocks\.")),
    (LANGUAGE_MODEL, _named(r"^([\w.]+\.)?layers\.\d+\.(self_attn|linear_attn)\.\w+_proj\w*\.weight$")),
    (
        IMAGE_ENCODER,
        _named(
            r"(^|\.)vision_model\.|^visual\.|^encoder\.layer\.\d+\.layer_scale|^layer\.\d+\.mlp\.|^wav2vec2\."
            r"|^encoder\.layers\.\d+\.(attention|fc1|self_attn)\b"
        ),
    ),
    (MINIMAX_VAE, _holds("decoder.transformer_blocks.0.scale1")),
    (
        VAE,
        _named(
            r"^((\w+_)?(de|en)coder|dcae|previewer|vquantizer|student|pipeline|decoder_model|octree|gs|vocoder"
            r"|(post_)?quant_conv|pre_block|backbone|audio_vae)\b|^blocks\.11\.num_batches_tracked$"
        ),
    ),
    (
        UPSCALER,
        _named(r"^(conv_first|conv_body|upsampler|upscale|model\.0\.weight|model\.1\.sub)\b|\.residual_group\."),
    ),
)
UNKNOWN_PREFIXES = ("diffusion_model.", "transformer.")
"""What may precede all names of a diffusion model, and ComfyUI does not know
(``unet_prefix_from_state_dict``)."""
_PART = re.compile(r"^(first_stage_model|vae|cond_stage_model|conditioner\.embedders\.\d+|text_encoders\.[^.]+)\.")
"""What precedes the names of a checkpoint's encoders and VAE."""


def kind_of_file(shapes: Shapes) -> Kind:
    """Return the kind of a file, or of a part of a checkpoint, by its tensors' names without the
    part's prefix."""
    return next((kind for kind, fits in KINDS if fits(shapes)), NOT_KNOWN)


class Reading(NamedTuple):
    """Quantized layers of a part of a file, and who reads them.

    ``formats``: their formats, with the number of layers in each.
    """

    kind: Kind
    formats: Mapping[Format, int]

    @property
    def since(self) -> str | None:
        """The first ComfyUI that reads these layers; None where none does."""
        if self.kind.since is None:
            return None
        return max((self.kind.since, *(format.since for format in self.formats)), key=_version)

    def require_reader(self, path) -> None:
        """Raise :class:`CheckpointError` if neither ComfyUI nor this package would read the layers."""
        if self.kind.since is None and not self.kind.loader:
            problem = Message("{0}, in which nothing reads quantized layers: {1}", self.kind.name, self.kind.why)
            storages = ", ".join(format.storage for format in self.formats)
            advice = Message("Use storage=fp16 or bf16 instead of {0}.", storages)
            raise CheckpointError(path, problem, advice=advice)

    @property
    def text(self) -> str:
        """A sentence that says who reads these layers."""
        counts = ", ".join(f"{count} {format.title}" for format, count in self.formats.items())
        what = Message("{0} layers of {1}", counts, self.kind.name)
        if self.kind == NOT_KNOWN:
            return Message("{0}: ComfyUI {1} or later reads them {2}.", what, self.since, WHERE_READ)
        if self.since is not None:
            return Message("{0}: ComfyUI {1} or later reads them.", what, self.since)
        if not self.kind.loader:
            return Message(
                "{0}: neither ComfyUI up to {1} nor Halfsafe reads them: {2}.", what, READ_UP_TO, self.kind.why
            )
        only = Message("only Halfsafe reads them, with {0}", self.kind.loader)
        return Message("{0}: {1}. {2} (up to {3}).", what, only, self.kind.why, READ_UP_TO)


def _version(text: str) -> list[int]:
    return [*map(int, text.split("."))]


def read_by(checkpoint: Checkpoint, formats: Mapping[str, Format]) -> list[Reading]:
    """Say for each part of a file who reads its quantized layers.

    Args:
        formats: name of a weight -> its format, for the quantized weights of the file.

    Example:
        >>> from halfsafe.precision.formats.readers import read_by
        >>> from halfsafe.precision.formats.registry import FORMATS
        >>> from halfsafe.precision.formats.checkpoint import read_checkpoint
        >>> import torch
        >>> vae = read_checkpoint({"decoder.mid.attn_1.q.weight": torch.zeros(16, 16)}, {}, "vae.safetensors")
        >>> read_by(vae, {"decoder.mid.attn_1.q.weight": FORMATS["int8_tensorwise"]})[0].since is None
        True
    """
    parts = _parts(checkpoint)
    found = []
    for prefix, names in parts.items():
        inside = Counter(formats[name] for name in names if name in formats)
        if inside:
            kind = kind_of_file({name[len(prefix) :]: checkpoint.weights[name].shape for name in names})
            found.append(Reading(PREFIXED if kind == MODEL and prefix in UNKNOWN_PREFIXES else kind, inside))
    return found


def _parts(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Group the names of a file by the prefix of its part: the diffusion model of a checkpoint, an
    encoder, a VAE."""
    prefix = checkpoint.prefix
    whole = prefix in MODEL_PREFIXES
    parts: dict[str, list[str]] = {}
    for name in checkpoint.weights:
        part = _PART.match(name)
        start = prefix if name.startswith(prefix) else part[0] if whole and part else ""
        parts.setdefault(start, []).append(name)
    return parts


def first_comfyui(readings: Iterable[Reading]) -> str | None:
    """Return the first ComfyUI that reads all quantized layers of a file; None where none does, or
    where nothing is quantized."""
    found = [reading.since for reading in readings]
    return max(filter(None, found), key=_version) if found and all(found) else None


def refuse_lora(checkpoint: Checkpoint) -> None:
    """Raise :class:`CheckpointError` for a LoRA, which is no model."""
    name = next(filter(_LORA.search, checkpoint.weights), None)
    if name is not None:
        raise CheckpointError(checkpoint.path, "a LoRA, which is applied in 16 bit", name, "Convert the model instead.")
