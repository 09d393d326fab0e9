"""Learn from your own prompts how a model's weights are best rounded."""

from comfy_api.latest import io

from ..precision.base.message import Message, joined
from ..precision.report.result import CALIBRATED, Result
from .host.load.files import output_path
from .host.study import calibrate as host
from .inputs import MEASURE, CalibrationType, checked_calibration, seed_input


class Calibrate(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeCalibrate",
            display_name="Calibrate (Halfsafe)",
            category=MEASURE,
            description=(
                "Record the inputs of each layer in one short sampling. Save Model then rounds int8, fp8, w6a8 and "
                "w4a8 weights with less error; the saved file runs as fast as without."
            ),
            search_aliases=[
                "gptq", "calibration", "better int8", "quantize quality", "hessian", "w4a8", "calibrated quantization",
            ],
            has_intermediate_output=True,
            inputs=[
                io.Model.Input(
                    "model", tooltip="The model to save, LoRAs included, best in 16 bit. It is not changed."
                ),
                io.Conditioning.Input("positive", tooltip="A typical prompt."),
                io.Latent.Input(
                    "latent_image",
                    tooltip="The size to sample at, for eight steps. One run at 1024x1024 is enough.",
                ),
                seed_input("The noise. The same seed gives the same calibration."),
                io.Conditioning.Input("negative", optional=True, tooltip="Sampled if connected, at twice the time."),
                CalibrationType.Input(
                    "previous",
                    optional=True,
                    tooltip="A calibration of the same model with another prompt or size, to which this one is added.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default="",
                    optional=True,
                    tooltip="A path in ComfyUI's output folder, for convert --calibration. Empty: not saved.",
                ),
            ],
            outputs=[
                CalibrationType.Output(display_name="calibration"),
                io.String.Output(display_name="text"),
            ],
        )

    @classmethod
    def execute(
        cls, model, positive, latent_image, seed, negative=None, previous=None, filename_prefix=""
    ) -> io.NodeOutput:
        path, name = output_path(filename_prefix) if filename_prefix.strip("/ ") else ("", "")
        previous = checked_calibration(previous)
        found = host.calibrate_model(model, positive, negative, latent_image, seed, previous, path)
        text = found.text()
        if path:
            found.save(path)
            text = joined([text, Message("Saved to {0}.", name)], "\n")
        result = Result(Message(CALIBRATED, layers=len(found.layers)), text=text)
        return io.NodeOutput(found, text, ui=result.ui())


NODES = [Calibrate]
