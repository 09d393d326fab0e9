"""Measure which layers survive a lower precision."""

import torch
from comfy_api.latest import io

from ..precision.study.analysis_text import analysis_result
from ..precision.study.candidates import CANDIDATES
from ..precision.study.charts import analysis_chart
from .host.compute.layer_modes import compute_name
from .host.study import analysis as host
from .host.study.sampling import Inputs
from .inputs import MEASURE, RulesType, schema, seed_input


class AnalyzeLayers(io.ComfyNode):
    KEEP = "keep high"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeAnalyzeLayers",
            MEASURE,
            search_aliases=[
                "layer analysis",
                "sensitivity",
                "mixed precision",
                "layer quality",
                "which layers",
                "snr",
                "quantization error",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Latent.Input("latent_image"),
                seed_input(),
                io.Combo.Input("candidate", options=list(CANDIDATES), default="fp8_e4m3fn"),
                io.Float.Input(
                    "target_snr_db",
                    default=25.0,
                    min=0.0,
                    max=120.0,
                    step=0.5,
                ),
                io.Conditioning.Input("negative", optional=True),
                io.Combo.Input(
                    "sensitive_layers",
                    options=[cls.KEEP, "measure"],
                    default=cls.KEEP,
                    optional=True,
                    advanced=True,
                ),
            ],
            outputs=[RulesType.Output(), io.String.Output(), io.Image.Output()],
        )

    @classmethod
    def execute(
        cls, model, positive, latent_image, seed, candidate, target_snr_db, negative=None, sensitive_layers=KEEP
    ) -> io.NodeOutput:
        pin = sensitive_layers == cls.KEEP
        inputs = Inputs(positive, negative, latent_image, seed)
        found = host.analyze_model(model, inputs, candidate, target_snr_db, pin)
        name = type(model.model).__name__
        result = analysis_result(found, name, compute_name(model))
        chart = torch.from_numpy(analysis_chart(found, name)).unsqueeze(0)
        return io.NodeOutput(found.rules, result.text, chart, ui=result.ui())


NODES = [AnalyzeLayers]
