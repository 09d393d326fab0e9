"""Choose how products are summed while one model runs."""

from typing import Any, get_args

from comfy_api.latest import io

from ..precision.plan.accumulation import UNCHANGED, AttentionOption, Fp16Option, Request, SwitchOption
from .host.accumulation.executor import with_accumulation
from .host.reporting.badge import badge, sums_words
from .inputs import EXPERT


def _choice(name: str, options: Any, default: str, tooltip: str, advanced: bool | None = None) -> io.Combo.Input:
    return io.Combo.Input(name, options=list(get_args(options)), default=default, tooltip=tooltip, advanced=advanced)


class AccumulationNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeAccumulation",
            display_name="Accumulation (Halfsafe)",
            category=EXPERT,
            description=(
                "How products are summed while this model runs. "
                "torch's own switches are back as they were after each call."
            ),
            search_aliases=[
                "fp16 accumulation", "fast fp16", "tf32", "fp16_fast", "black image", "torch settings", "noise",
                "precision",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="The model; it is not changed, the output is a patched clone."),
                _choice("fp16_accumulation", Fp16Option, "auto", (
                    "Add up fp16 products in fp16: faster on RTX 20 to 50, acts on fp16 compute. "
                    "auto: only where proven not to overflow. on: in all layers."
                )),
                _choice("reduced_precision_reduction", SwitchOption, UNCHANGED, (
                    "Partial results of fp16 and bf16 products in 16 bit. "
                    "torch allows it by default; off is a little slower and more precise."
                ), advanced=True),
                _choice("tf32", SwitchOption, UNCHANGED, (
                    "fp32 products and convolutions rounded to TF32: faster and less precise. "
                    "Needs RTX 30 or newer and fp32 compute."
                ), advanced=True),
                _choice("fp8_fast_accumulation", Fp16Option, "auto", (
                    "Add up fp8 products with fewer bits, RTX 40 and Hopper. auto: off, for quality."
                ), advanced=True),
                _choice("attention", AttentionOption, "auto", (
                    "Attention in fp16. auto: repaired where its scores would overflow, else left alone. "
                    "fp32: all of it in fp32, slower."
                )),
            ],
            outputs=[io.Model.Output()],
        )  # fmt: skip

    @classmethod
    def execute(
        cls, model, fp16_accumulation, reduced_precision_reduction, tf32, fp8_fast_accumulation, attention
    ) -> io.NodeOutput:
        request = Request(fp16_accumulation, reduced_precision_reduction, tf32, fp8_fast_accumulation, attention)
        model = with_accumulation(model, request)
        return io.NodeOutput(model, ui=badge(*sums_words(model)))


NODES = [AccumulationNode]
