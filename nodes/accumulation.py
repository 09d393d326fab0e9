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
                "Choose how products are summed while this model runs. torch's flags are restored after each call."
            ),
            search_aliases=[
                "fp16 accumulation", "fast fp16", "tf32", "fp16_fast", "black image", "torch settings", "noise",
                "precision",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model", tooltip="The model; it is not changed, the output is a patched clone."),
                _choice("fp16_accumulation", Fp16Option, "auto", (
                    "Accumulate fp16 products in fp16: faster on RTX 20 to 50, for fp16 compute. auto: in layers "
                    "proven not to overflow. on: in all layers."
                )),
                _choice("reduced_precision_reduction", SwitchOption, UNCHANGED, (
                    "Allow 16-bit partial sums of fp16 and bf16 products. torch allows it by default; off is slightly "
                    "slower and more precise."
                ), advanced=True),
                _choice("tf32", SwitchOption, UNCHANGED, (
                    "Round fp32 products and convolutions to TF32: faster and less precise. Needs RTX 30 or newer and "
                    "fp32 compute."
                ), advanced=True),
                _choice("fp8_fast_accumulation", Fp16Option, "auto", (
                    "Accumulate fp8 products with fewer bits, on RTX 40 and Hopper. auto: off, for quality."
                ), advanced=True),
                _choice("attention", AttentionOption, "auto", (
                    "Attention that runs in fp16. auto: changed only if its scores would overflow. fp32: all "
                    "attention in fp32, slower."
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
