"""The NaN guard on models, VAEs and text encoders, and a check anywhere in the graph."""

import torch
from comfy_api.latest import io

from ..precision.base.errors import HalfsafeError
from ..precision.base.message import Message, joined
from ..precision.guard.inputs import not_finite
from ..precision.guard.verdicts import NonFinite
from ..precision.report.result import BAD, FINITE, NOT_FINITE, Result
from .host.check.drift import checking
from .host.guard.encoders import guard_clip, guard_vae
from .host.guard.model import MAX_RETRIES, with_guard
from .host.reporting.badge import badge, model_words
from .inputs import GUARD, check_input, node_id_of, on_nan_input, schema

CHECK_ADVICE = (
    "The node before this one made the NaN or Inf, or received it: add Check Finite before that node too, or NaN "
    "Guard to the model."
)


class NaNGuard(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeNaNGuard",
            GUARD,
            search_aliases=[
                "black image",
                "inf",
                "overflow",
                "invalid value encountered in cast",
                "fp16 fix",
                "nan",
                "no half",
            ],
            inputs=[
                io.Model.Input("model"),
                on_nan_input(),
                io.Int.Input("max_retries", default=MAX_RETRIES, min=0, max=64, advanced=True),
                check_input(),
            ],
            outputs=[io.Model.Output()],
            has_intermediate_output=True,
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, on_nan, max_retries, check="off") -> io.NodeOutput:
        node_id = node_id_of(cls)
        guarded = with_guard(model, on_nan, max_retries, node_id, checking(check, model, node_id))
        return io.NodeOutput(guarded, ui=badge(*model_words(model), "guarded"))


class GuardVAE(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeGuardVAE",
            GUARD,
            search_aliases=["black image", "nan in vae", "no half vae", "vae fp32", "vae overflow", "black tiles"],
            inputs=[io.Vae.Input("vae"), on_nan_input()],
            outputs=[io.Vae.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, vae, on_nan) -> io.NodeOutput:
        return io.NodeOutput(guard_vae(vae, on_nan, node_id_of(cls)))


class GuardCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeGuardCLIP",
            GUARD,
            search_aliases=["nan conditioning", "black image", "t5 fp16", "text encoder nan", "empty prompt result"],
            inputs=[io.Clip.Input("clip"), on_nan_input()],
            outputs=[io.Clip.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, clip, on_nan) -> io.NodeOutput:
        return io.NodeOutput(guard_clip(clip, on_nan, node_id_of(cls)))


class CheckFinite(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        kinds = [io.Latent, io.Image, io.Conditioning, io.Audio, io.Video, io.Mask, io.ClipVisionOutput]
        value = io.MatchType.Template("value", kinds)
        return schema(
            "HalfsafeCheckFinite",
            GUARD,
            search_aliases=["nan check", "isnan", "black image", "debug latent", "find nan", "is finite"],
            has_intermediate_output=True,
            inputs=[
                io.MatchType.Input("value", template=value),
                io.Combo.Input("on_nan", options=["stop", "report"], default="stop"),
            ],
            outputs=[
                io.MatchType.Output(template=value),
                io.Boolean.Output(),
                io.String.Output(),
            ],
        )

    @classmethod
    def execute(cls, value, on_nan) -> io.NodeOutput:
        found = not_finite(_looked_at(value))
        text = joined((told for _, told in found), "\n") or "Finite: no NaN and no Inf."
        if found and on_nan == "stop":
            raise NonFinite(text, advice=CHECK_ADVICE)
        return io.NodeOutput(value, not found, text, ui=_result(found, text).ui())


def _looked_at(value):
    """Return the tensors of an output, under names that people know them by."""
    if hasattr(value, "get_components"):
        parts = value.get_components()
        return {"video": parts.images} | ({"audio": parts.audio["waveform"]} if parts.audio else {})
    if hasattr(value, "last_hidden_state"):  # a CLIP_VISION_OUTPUT
        return vars(value)
    if isinstance(value, dict) and "waveform" in value:
        return {"audio": value["waveform"]}
    if isinstance(value, dict) and getattr(value.get("samples"), "is_nested", False):
        parts = value["samples"].unbind()
        sounds = len(parts) == 2 and parts[0].dim() == 5  # LTX-Video, MiniMax: of a video, and of its sound
        return dict(zip(("video", "audio"), parts, strict=True)) if sounds else value
    if not isinstance(value, (torch.Tensor, dict, list)):
        advice = "Connect a LATENT, IMAGE, CONDITIONING, AUDIO, VIDEO, MASK or CLIP_VISION_OUTPUT."
        raise HalfsafeError(Message("Check Finite cannot check a {0}.", type(value).__name__), advice)
    return value


def _result(found: list[tuple[str, str]], text: str) -> Result:
    if not found:
        return Result(FINITE, text=text)
    names = ", ".join(name for name, _ in found)
    return Result(Message(NOT_FINITE, names=names), BAD, text=text)


NODES = [NaNGuard, GuardVAE, GuardCLIP, CheckFinite]
