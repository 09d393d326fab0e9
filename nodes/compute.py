"""Choose the arithmetic of a model that is loaded already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from ..precision.plan.goal import GOALS
from ..precision.plan.rules import Rules
from .host import planned
from .host.badge import badge, model_words
from .inputs import CATEGORY, RulesType, checked_rules, compute_input

if TYPE_CHECKING:
    from .host.types import CLIP, VAE, ModelPatcher


class ComputeDtype(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeComputeDtype",
            display_name="Compute Dtype (Halfsafe)",
            category=CATEGORY,
            description=(
                "Choose the dtype a model computes in, for all layers or by rules. Works on any loader's model."
            ),
            search_aliases=[
                "compute dtype",
                "fp16",
                "bf16",
                "fp16 safe",
                "black image",
                "old gpu",
                "precision",
                "manual cast",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="The model; it is not changed, the output is a patched clone."),
                compute_input(),
                RulesType.Input(
                    "rules", optional=True, tooltip="Exceptions per layer: compute=... and stream=... of Layer Rules."
                ),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, compute: str, rules: Rules | None = None) -> io.NodeOutput:
        model = planned.with_compute(model, compute, checked_rules(rules) or Rules())
        return io.NodeOutput(model, ui=badge(*model_words(model)))


class AutoPrecision(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeAutoPrecision",
            display_name="Auto Precision (Halfsafe)",
            category=CATEGORY,
            description=(
                "Choose the arithmetic for this device and goal, and say why. The same workflow runs on every device."
            ),
            search_aliases=["auto dtype", "best precision", "speed", "low vram", "quality", "fp8", "fp16"],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="The model; the output is a patched clone."),
                io.Combo.Input(
                    "goal",
                    options=list(GOALS),
                    default="balanced",
                    tooltip=(
                        "balanced: a dtype this device is fast at and that cannot overflow.\n"
                        "quality: fp16 products with an fp32 stream where fp16 is fast, "
                        "fp32 elsewhere; the VAE in fp32.\n"
                        "speed: int8 or fp8 products "
                        "where the device gains and weights are held so, else also plain fp16.\n"
                        "memory: the smallest activations the model is safe in."
                    ),
                ),
                io.Clip.Input(
                    "clip", optional=True, tooltip="Passed through; ComfyUI runs text encoders with fp32 activations."
                ),
                io.Vae.Input("vae", optional=True, tooltip="With goal quality: a copy that works in fp32."),
            ],
            outputs=[
                io.Model.Output(),
                io.Clip.Output(),
                io.Vae.Output(),
                io.String.Output(display_name="why"),
            ],
        )

    @classmethod
    def execute(cls, model: ModelPatcher, goal: str, clip: CLIP | None = None, vae: VAE | None = None) -> io.NodeOutput:
        model, vae, why = planned.with_goal(model, goal, clip, vae)
        return io.NodeOutput(model, clip, vae, why, ui=badge(*model_words(model)))


NODES = [ComputeDtype, AutoPrecision]
