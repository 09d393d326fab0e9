"""The NaN guard on models, VAEs and text encoders, and a check anywhere in the graph."""

import torch
from comfy_api.latest import io

from ..precision.base.errors import HalfsafeError
from ..precision.base.message import Message, joined
from ..precision.guard.inputs import NotFiniteTensor, not_finite
from ..precision.guard.verdicts import NonFinite
from ..precision.report.result import BAD, FINITE, NOT_FINITE, Result
from .host.check.drift import checking
from .host.guard.encoders import guard_clip, guard_vae
from .host.guard.model import MAX_RETRIES, with_guard
from .host.reporting.badge import badge, model_words
from .inputs import GUARD, check_input, node_id_of, on_nan_input

CHECK_ADVICE = (
    "The node before this one made the NaN or Inf, or received it: add Check Finite before that node too, or NaN "
    "Guard to the model."
)


class NaNGuard(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeNaNGuard",
            display_name="NaN Guard (Halfsafe)",
            category=GUARD,
            description=(
                "Check every step for NaN and Inf: find the layer, repeat it in a higher precision, or report another "
                "cause."
            ),
            search_aliases=[
                "black image", "inf", "overflow", "invalid value encountered in cast", "fp16 fix", "nan", "no half",
            ],
            inputs=[
                io.Model.Input("model", tooltip="The model; the output is a guarded clone. Works with any loader."),
                on_nan_input(),
                io.Int.Input(
                    "max_retries",
                    default=MAX_RETRIES,
                    min=0,
                    max=64,
                    advanced=True,
                    tooltip="The most repeats of one step. A repair takes five at most.",
                ),
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
        return io.Schema(
            node_id="HalfsafeGuardVAE",
            display_name="Guard VAE (Halfsafe)",
            category=GUARD,
            description="Repeat decoding or encoding in bf16, then fp32, if the result is NaN or Inf.",
            search_aliases=["black image", "nan in vae", "no half vae", "vae fp32", "vae overflow", "black tiles"],
            inputs=[io.Vae.Input("vae", tooltip="The VAE; the output is a guarded copy."), on_nan_input()],
            outputs=[io.Vae.Output()],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, vae, on_nan) -> io.NodeOutput:
        return io.NodeOutput(guard_vae(vae, on_nan, node_id_of(cls)))


class GuardCLIP(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeGuardCLIP",
            display_name="Guard CLIP (Halfsafe)",
            category=GUARD,
            description="Encode a prompt again in bf16, then fp32, if its conditioning is NaN or Inf.",
            search_aliases=["nan conditioning", "black image", "t5 fp16", "text encoder nan", "empty prompt result"],
            inputs=[io.Clip.Input("clip", tooltip="The text encoder; the output is a guarded clone."), on_nan_input()],
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
        return io.Schema(
            node_id="HalfsafeCheckFinite",
            display_name="Check Finite (Halfsafe)",
            category=GUARD,
            description="Check a latent, image, conditioning, sound, video or mask for NaN and Inf.",
            search_aliases=["nan check", "isnan", "black image", "debug latent", "find nan", "is finite"],
            has_intermediate_output=True,
            inputs=[
                io.MatchType.Input("value", template=value, tooltip="The value to check. It is passed on unchanged."),
                io.Combo.Input(
                    "on_nan",
                    options=["stop", "report"],
                    default="stop",
                    tooltip="stop: raise an error with the number of NaN values and their place. report: only show it.",
                ),
            ],
            outputs=[
                io.MatchType.Output(template=value, display_name="value"),
                io.Boolean.Output(display_name="finite"),
                io.String.Output(display_name="report"),
            ],
        )

    @classmethod
    def execute(cls, value, on_nan) -> io.NodeOutput:
        found = not_finite(_looked_at(value))
        text = joined(map(str, found), "\n") or "Finite: no NaN and no Inf."
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


def _result(found: list[NotFiniteTensor], text: str) -> Result:
    if not found:
        return Result(FINITE, text=text)
    names = ", ".join(finding.name for finding in found)
    return Result(Message(NOT_FINITE, names=names), BAD, text=text)


NODES = [NaNGuard, GuardVAE, GuardCLIP, CheckFinite]
