"""Exceptions per layer, as text in the workflow."""

from comfy_api.latest import io

from ..precision.base.errors import HalfsafeError
from ..precision.plan.presets import DEFAULT_PRESET, PRESETS
from ..precision.plan.rules import rules_from
from .host.comfyui.page import refusal
from .inputs import EXPERT, RulesType, checked_rules


class LayerRules(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeLayerRules",
            display_name="Layer Rules (Halfsafe)",
            category=EXPERT,
            description="Choose layers to store or compute differently. One rule per line; later lines win.",
            search_aliases=["keep layers", "exclude layers", "mixed precision", "layer dtype", "skip layers", "preset"],
            inputs=[
                io.String.Input(
                    "rules",
                    multiline=True,
                    default="",
                    tooltip="<layer pattern> <key>=<value> ... # comment, one per line: blocks.0.* compute=fp32.",
                ),
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    default=DEFAULT_PRESET,
                    tooltip="Layers to keep as in the file. Your lines override it; family presets keep more.",
                ),
                RulesType.Input("previous", optional=True, tooltip="Rules to extend. Lines here override them."),
            ],
            outputs=[RulesType.Output(display_name="rules"), io.String.Output(display_name="text")],
        )

    @classmethod
    def validate_inputs(cls, rules=None):
        try:
            rules_from(rules or "")
        except HalfsafeError as error:
            return refusal(error)
        return True

    @classmethod
    def execute(cls, rules, preset, previous=None) -> io.NodeOutput:
        combined = rules_from(rules, preset, checked_rules(previous, "previous"))
        return io.NodeOutput(combined, combined.to_text())


NODES = [LayerRules]
