"""Learn from your own prompts how a model's weights are best rounded."""

from comfy_api.latest import io

from ..precision.base.message import Message, joined
from ..precision.report.result import CALIBRATED, TO_SAVE, Result
from .host.load.files import output_path
from .host.study import calibrate as host
from .host.study.sampling import Inputs
from .inputs import MEASURE, CalibrationType, checked_calibration, schema, seed_input


class Calibrate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeCalibrate",
            MEASURE,
            search_aliases=[
                "gptq",
                "calibration",
                "better int8",
                "quantize quality",
                "hessian",
                "w4a8",
                "calibrated quantization",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input("model"),
                io.Conditioning.Input("positive"),
                io.Latent.Input("latent_image"),
                seed_input(),
                io.Conditioning.Input("negative", optional=True),
                CalibrationType.Input("previous", optional=True),
                io.String.Input("filename_prefix", default="", optional=True),
            ],
            outputs=[CalibrationType.Output(), io.String.Output()],
        )

    @classmethod
    def execute(
        cls, model, positive, latent_image, seed, negative=None, previous=None, filename_prefix=""
    ) -> io.NodeOutput:
        path, name = output_path(filename_prefix) if filename_prefix.strip("/ ") else ("", "")
        previous = checked_calibration(previous)
        inputs = Inputs(positive, negative, latent_image, seed)
        found = host.calibrate_model(model, inputs, previous, path)
        text = found.text()
        if path:
            found.save(path)
            text = joined([text, Message("Saved to {0}.", name)], "\n")
        result = Result(joined([Message(CALIBRATED, layers=len(found.layers)), TO_SAVE]), text=text)
        return io.NodeOutput(found, text, ui=result.ui())


NODES = [Calibrate]
