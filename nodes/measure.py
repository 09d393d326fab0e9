"""Measure the time, memory and error of precisions."""

import torch
from comfy_api.latest import io

from ..precision.study.charts import tradeoffs_chart
from ..precision.study.tradeoffs import DEFAULT_SETTINGS, settings_from
from ..precision.study.tradeoffs_text import tradeoffs_result
from .host.study import tradeoffs as host
from .host.study.sampling import Inputs
from .inputs import MEASURE, RulesType, schema, seed_input, validated


class MeasurePrecisions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeMeasurePrecisions",
            MEASURE,
            search_aliases=[
                "benchmark",
                "which precision",
                "fastest dtype",
                "speed test",
                "snr",
                "pareto",
                "compare dtypes",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Latent.Input("latent_image"),
                seed_input(),
                io.String.Input("candidates", multiline=True, default=DEFAULT_SETTINGS),
                io.Conditioning.Input("negative", optional=True),
                io.Float.Input("cfg", default=4.0, min=0.0, max=100.0, step=0.1, optional=True),
                io.Int.Input("seeds", default=1, min=1, max=64, optional=True),
            ],
            outputs=[io.String.Output(), RulesType.Output(), io.Image.Output()],
        )

    @classmethod
    def validate_inputs(cls, candidates=None):
        return candidates is None or validated(settings_from, candidates)  # None: given by another node

    @classmethod
    def execute(cls, model, positive, latent_image, seed, candidates, negative=None, cfg=4.0, seeds=1) -> io.NodeOutput:
        inputs = Inputs(positive, negative, latent_image, seed, cfg, seeds)
        found = host.measure_model(model, inputs, settings_from(candidates))
        result, chart = tradeoffs_result(found), torch.from_numpy(tradeoffs_chart(found)).unsqueeze(0)
        return io.NodeOutput(result.text, found.rules, chart, ui=result.ui())


NODES = [MeasurePrecisions]
