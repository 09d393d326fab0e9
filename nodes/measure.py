"""Measure the time, memory and error of precisions."""

import torch
from comfy_api.latest import io

from ..precision.base.errors import HalfsafeError
from ..precision.study.charts import tradeoffs_chart
from ..precision.study.tradeoffs import DEFAULT_SETTINGS, settings_from
from ..precision.study.tradeoffs_text import table_text, tradeoffs_result
from .host.comfyui.page import refusal
from .host.study import tradeoffs as host
from .inputs import MEASURE, RulesType, seed_input


class MeasurePrecisions(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeMeasurePrecisions",
            display_name="Measure Precisions (Halfsafe)",
            category=MEASURE,
            description=(
                "Try storage and compute dtypes on your own model and prompt: "
                "time per step, memory and error of each, and the best for a goal."
            ),
            search_aliases=[
                "benchmark", "which precision", "fastest dtype", "speed test", "snr", "pareto",
                "compare dtypes",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="The model, LoRAs included. Its file's own weights are measured, whatever storage it has.",
                ),
                io.Conditioning.Input("positive", tooltip="A typical prompt."),
                io.Latent.Input(
                    "latent_image",
                    tooltip="Time and memory are measured at this size. Each candidate costs four steps.",
                ),
                seed_input("The noise, the same for every candidate."),
                io.String.Input(
                    "candidates",
                    multiline=True,
                    default=DEFAULT_SETTINGS,
                    tooltip="One <storage>/<compute> per line, such as int8/auto; # comments. as_file: as in the file.",
                ),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="Sampled if connected, with cfg, at twice the time."
                ),
                io.Float.Input(
                    "cfg", default=4.0, min=0.0, max=100.0, step=0.1, optional=True, tooltip="Used with a negative."
                ),
            ],
            outputs=[
                io.String.Output(display_name="table"),
                RulesType.Output(display_name="rules"),
                io.Image.Output(display_name="chart"),
            ],
        )

    @classmethod
    def validate_inputs(cls, candidates=None):
        if candidates is None:  # given by another node
            return True
        try:
            settings_from(candidates)
        except HalfsafeError as error:
            return refusal(error)
        return True

    @classmethod
    def execute(cls, model, positive, latent_image, seed, candidates, negative=None, cfg=4.0) -> io.NodeOutput:
        inputs = host.Inputs(positive, negative, latent_image, seed, cfg)
        found = host.measure_model(model, inputs, settings_from(candidates))
        text = table_text(found)
        chart = torch.from_numpy(tradeoffs_chart(found)).unsqueeze(0)
        return io.NodeOutput(text, found.rules, chart, ui=tradeoffs_result(found, text).ui())


NODES = [MeasurePrecisions]
