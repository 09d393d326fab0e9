"""Measure which layers survive a lower precision."""

import torch
from comfy_api.latest import io

from ..precision.study.analysis_text import analysis_result, analysis_text, rules_of
from ..precision.study.candidates import CANDIDATES
from ..precision.study.charts import analysis_chart
from .host.compute.layer_modes import compute_name
from .host.study import analysis as host
from .inputs import MEASURE, RulesType, seed_input


class AnalyzeLayers(io.ComfyNode):
    KEEP = "keep high"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeAnalyzeLayers",
            display_name="Analyze Layers (Halfsafe)",
            category=MEASURE,
            description=(
                "Measure on your own prompt which layers survive a lower precision, and get rules that keep the others."
            ),
            search_aliases=[
                "layer analysis", "sensitivity", "mixed precision", "layer quality", "which layers", "snr",
                "quantization error",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model to compare with, from any loader, LoRAs included. It is not changed."
                ),
                io.Conditioning.Input(
                    "positive", tooltip="A prompt like those you use: layers are measured on what they meet with it."
                ),
                io.Latent.Input(
                    "latent_image",
                    tooltip="The size to measure at: a small one is much faster. It costs 8 to 52 steps.",
                ),
                seed_input("The noise. The same seed gives the same rules."),
                io.Combo.Input(
                    "candidate",
                    options=list(CANDIDATES),
                    default="fp8_e4m3fn",
                    tooltip="fp8, int8: weights stored so. fp16, bf16, fp16_acc16: products in it, for Compute Dtype.",
                ),
                io.Float.Input(
                    "target_snr_db",
                    default=25.0,
                    min=0.0,
                    max=120.0,
                    step=0.5,
                    tooltip="How close the final latent stays: 20 dB is an error of 10 %, 25 of 5.6 %, 40 of 1 %.",
                ),
                io.Conditioning.Input("negative", optional=True, tooltip="Measured too when given, at twice the time."),
                io.Combo.Input(
                    "sensitive_layers",
                    options=[cls.KEEP, "measure"],
                    default=cls.KEEP,
                    optional=True,
                    advanced=True,
                    tooltip="keep high: embeddings, first and last layers stay. measure: chosen like the others.",
                ),
            ],
            outputs=[
                RulesType.Output(display_name="rules"),
                io.String.Output(display_name="text"),
                io.Image.Output(display_name="chart"),
            ],
        )

    @classmethod
    def execute(
        cls, model, positive, latent_image, seed, candidate, target_snr_db, negative=None, sensitive_layers=KEEP
    ) -> io.NodeOutput:
        pin = sensitive_layers == cls.KEEP
        found = host.analyze_model(model, positive, negative, latent_image, seed, candidate, target_snr_db, pin)
        name = type(model.model).__name__
        text = analysis_text(found, name, compute_name(model))
        chart = torch.from_numpy(analysis_chart(found, name)).unsqueeze(0)
        return io.NodeOutput(rules_of(found), text, chart, ui=analysis_result(found, text).ui())


NODES = [AnalyzeLayers]
