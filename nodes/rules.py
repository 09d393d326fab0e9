"""Exceptions per layer, as text in the workflow."""

from comfy_api.latest import io

from ..precision.plan.presets import DEFAULT_PRESET, PRESETS
from ..precision.plan.rules import rules_from
from .inputs import EXPERT, RulesType, checked_rules, schema, validated


class LayerRules(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeLayerRules",
            EXPERT,
            search_aliases=["keep layers", "exclude layers", "mixed precision", "layer dtype", "skip layers", "preset"],
            inputs=[
                io.String.Input("rules", multiline=True, default=""),
                io.Combo.Input("preset", options=list(PRESETS), default=DEFAULT_PRESET),
                RulesType.Input("previous", optional=True),
            ],
            outputs=[RulesType.Output(), io.String.Output()],
        )

    @classmethod
    def validate_inputs(cls, rules=None):
        return validated(rules_from, rules or "")

    @classmethod
    def execute(cls, rules, preset, previous=None) -> io.NodeOutput:
        combined = rules_from(rules, preset, checked_rules(previous, "previous"))
        return io.NodeOutput(combined, combined.to_text())


NODES = [LayerRules]
