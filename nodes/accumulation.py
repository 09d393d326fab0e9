"""Choose how products are summed while one model runs."""

from typing import Any, get_args

from comfy_api.latest import io

from ..precision.plan.accumulation import UNCHANGED, AttentionOption, Fp16Option, Request, SwitchOption
from .host.accumulation.executor import Accumulation, with_accumulation
from .host.reporting.badge import badge
from .inputs import EXPERT, schema


def _choice(name: str, options: Any, default: str, advanced: bool | None = None) -> io.Combo.Input:
    return io.Combo.Input(name, options=list(get_args(options)), default=default, advanced=advanced)


class AccumulationNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeAccumulation",
            EXPERT,
            search_aliases=[
                "fp16 accumulation", "fast fp16", "tf32", "fp16_fast", "black image", "torch settings", "noise",
                "precision",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model"),
                _choice("fp16_accumulation", Fp16Option, "auto"),
                _choice("reduced_precision_reduction", SwitchOption, UNCHANGED, advanced=True),
                _choice("tf32", SwitchOption, UNCHANGED, advanced=True),
                _choice("fp8_fast_accumulation", Fp16Option, "auto", advanced=True),
                _choice("attention", AttentionOption, "auto"),
            ],
            outputs=[io.Model.Output()],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model, fp16_accumulation, reduced_precision_reduction, tf32, fp8_fast_accumulation, attention
    ) -> io.NodeOutput:
        request = Request(fp16_accumulation, reduced_precision_reduction, tf32, fp8_fast_accumulation, attention)
        model = with_accumulation(model, request)
        return io.NodeOutput(model, ui=badge(*_sums_words(model)))


def _sums_words(model) -> list[str]:
    """Return how matmuls will accumulate, as far as an Accumulation node decides it and can act
    here."""
    accumulation = Accumulation.on(model)
    if accumulation is None:
        return []
    plan = accumulation.plan_for(model)
    fp16 = plan.trying or plan.flags.get("fp16_accumulation")
    tf32 = "tf32" if plan.flags.get("tf32_matmul") else ""
    return ["fp16 sums" if fp16 else "fp32 sums", "fast fp8 sums" if plan.fp8_fast else "", tf32]


NODES = [AccumulationNode]
