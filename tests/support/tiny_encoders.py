"""Text encoder classes of ComfyUI, narrow: its own ``CLIP`` around its own encoders, with random weights, without their towers for images and sound."""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch

CLIP = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "projection_dim": 64,
    "max_position_embeddings": 6,
}
T5 = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 3, "vocab_size": 128}
BERT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 128,
}
LLAMA = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 128,
}
QWEN35 = {
    "head_dim": 16,
    "mrope_section": [1, 1, 0],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
GPT_OSS = LLAMA | {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
NAMES = ("tiny", "clip_g", "t5xxl", "hydit_clip", "llama")
"""What ComfyUI's classes ask for the sizes of, each by its own name."""
TOWERS = ("visual", "vision_model", "multi_modal_projector", "audio_model", "audio_projector")


@dataclass(frozen=True)
class TinyEncoder:
    """``place``: module:class; ``sizes``: what its config is given; ``generates``: it has core's loop over tokens;
    ``encodes``: core's text encoding runs with it; ``options``: of its class; ``model``: the class of its model, where the encoder has several."""

    place: str
    sizes: dict[str, object] = field(default_factory=dict)
    generates: bool = False
    encodes: bool = True
    options: dict[str, object] = field(default_factory=dict)
    model: str = ""


def _in(module: str) -> str:
    return f"comfy.text_encoders.{module}"


ENCODERS = {
    "clip_l": TinyEncoder("comfy.sd1_clip:SDClipModel", CLIP),
    "clip_g": TinyEncoder("comfy.sdxl_clip:SDXLClipG", CLIP),
    "t5": TinyEncoder(_in("sd3_clip:T5XXLModel"), T5),
    "umt5": TinyEncoder(_in("wan:UMT5XXlModel"), T5),
    "pile_t5": TinyEncoder(_in("aura_t5:PT5XlModel"), T5),
    "bert": TinyEncoder(_in("hydit:HyditBertModel"), BERT),
    "jina": TinyEncoder(_in("jina_clip_2:JinaClip2TextModel"), BERT),
    "gpt_oss": TinyEncoder(
        _in("gpt_oss:LensGptOssClipModel"),
        options={"gpt_oss_config": GPT_OSS, "selected_layers": (0, 1, 2), "txt_offset": 0},
    ),
    "llama": TinyEncoder(_in("hunyuan_video:LLAMAModel"), LLAMA),
    "mistral": TinyEncoder(_in("flux:Mistral3_24BModel"), LLAMA),
    "ministral": TinyEncoder(_in("ernie:Ministral3_3BModel"), LLAMA, generates=True),
    "gemma2": TinyEncoder(_in("lumina2:Gemma2_2BModel"), LLAMA, generates=True),
    "gemma3": TinyEncoder(_in("lumina2:Gemma3_4BModel"), LLAMA, generates=True),
    "gemma4": TinyEncoder(
        _in("gemma4:Gemma4Model"),
        LLAMA | {"hidden_size_per_layer_input": 16, "num_kv_shared_layers": 0},
        generates=True,
        encodes=False,
        model="Gemma4_E2B",
    ),
    "qwen2.5": TinyEncoder(_in("omnigen2:Qwen25_3BModel"), LLAMA),
    "qwen2.5_vl": TinyEncoder(_in("qwen_image:Qwen25_7BVLIModel"), LLAMA),
    "qwen3": TinyEncoder(_in("z_image:Qwen3_4BModel"), LLAMA, generates=True),
    "qwen3_8b": TinyEncoder(_in("flux:Qwen3_8BModel"), LLAMA, generates=True),
    "ovis": TinyEncoder(_in("ovis:Ovis25_2BModel"), LLAMA),
    "qwen3_vl": TinyEncoder(_in("qwen3vl:Qwen3VLClipModel"), LLAMA, generates=True),
    "qwen3.5": TinyEncoder(_in("qwen35:Qwen35ClipModel"), LLAMA | QWEN35, generates=True),
}


def is_known(name: str) -> bool:
    """Whether the ComfyUI in use has the class."""
    module, _, cls = ENCODERS[name].place.partition(":")
    return bool(importlib.util.find_spec(module)) and hasattr(importlib.import_module(module), cls)


def build(name: str, **more: object):
    """ComfyUI's CLIP around an encoder of a class, in fp16, its weights at a size at which no layer overflows. ``more``: options of it."""
    import comfy.sd
    from comfy.sd1_clip import SD1ClipModel

    module, _, cls = ENCODERS[name].place.partition(":")
    module = importlib.import_module(module)
    kind = getattr(module, cls)
    if ENCODERS[name].model:
        kind = type(cls, (kind,), {"model_class": getattr(module, ENCODERS[name].model)})
    target = SimpleNamespace(
        params={"name": "tiny", "clip_model": kind}, clip=SD1ClipModel, tokenizer=lambda **_: SimpleNamespace()
    )
    options = (
        {"dtype": torch.float16, "initial_device": "cpu"}
        | {f"{each}_model_config": dict(ENCODERS[name].sizes) for each in NAMES}
        | ENCODERS[name].options
        | more
    )
    with torch.inference_mode(False):
        clip = comfy.sd.CLIP(target, model_options=options)
    encoder, draw = clip.cond_stage_model.tiny, torch.Generator().manual_seed(0)
    for tower in TOWERS:
        if hasattr(encoder.transformer, tower):
            delattr(encoder.transformer, tower)
    if isinstance(getattr(encoder, "layer", None), list):
        encoder.layer = [0, 1, 2]
        encoder.options_default = (encoder.layer, *encoder.options_default[1:])
    with torch.no_grad():
        encoder.transformer.load_state_dict(_not_made_yet(encoder.transformer), strict=False, assign=True)
        for key, tensor in encoder.transformer.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(_drawn(key, tensor.shape, draw))
    return clip


def _not_made_yet(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights that ComfyUI's operations for quantized weights make as they are loaded."""
    layers = {
        key: module
        for key, module in network.named_modules()
        if hasattr(module, "in_features") and getattr(module, "weight", None) is None
    }
    sizes = {
        key: (
            *([module.num_experts] if hasattr(module, "num_experts") else []),
            module.out_features,
            module.in_features,
        )
        for key, module in layers.items()
    }
    return {f"{key}.weight": torch.zeros(size, dtype=torch.float16) for key, size in sizes.items()}


def _drawn(key: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=draw)
    if len(shape) < 2:
        return 1 + 0.1 * values if key.endswith("weight") else 0.1 * values
    return values / math.sqrt(shape[-1])


def tokens() -> dict[str, list]:
    """Words of any vocabulary, as ComfyUI's tokenizers give them."""
    return {"tiny": [[(number, 1.0) for number in (5, 17, 9, 33, 21, 8)]]}
