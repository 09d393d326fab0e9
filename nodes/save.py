"""Save a model with chosen precision, in ComfyUI's own format."""

from comfy_api.latest import io

from ..precision.base.message import Message
from ..precision.base.text import size_text
from ..precision.plan.rules import rules_from
from ..precision.report.result import GOOD, SAVED, UNLISTED, WARN, Result
from .host.load.save import save_model
from .inputs import LOAD, CalibrationType, checked_calibration, checked_rules, rules_input, storage_input

STORAGE_TOOLTIP = "The dtype of the saved weights. auto and as_file keep the dtypes of the loaded model."


class SaveModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="HalfsafeSaveModel",
            display_name="Save Model (Halfsafe)",
            category=LOAD,
            description=(
                "Save a model with its LoRAs merged, in scaled fp8, int8 or another dtype, for ComfyUI's own loaders. "
                "A calibration lowers the error."
            ),
            search_aliases=[
                "save fp8", "save int8", "quantize model", "convert fp8", "merge lora", "export", "precision",
            ],
            is_output_node=True,
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            inputs=[
                io.Model.Input("model", tooltip="The model, with any LoRA applied."),
                io.String.Input(
                    "filename_prefix",
                    default="diffusion_models/halfsafe",
                    tooltip="A path in ComfyUI's output folder. Files under diffusion_models/ appear in the loaders.",
                ),
                storage_input(tooltip=STORAGE_TOOLTIP, default="fp8_e4m3fn"),
                rules_input(),
                CalibrationType.Input(
                    "calibration",
                    optional=True,
                    tooltip="A calibration of this model, from Calibrate: rounds weights with less error.",
                ),
            ],
            outputs=[io.String.Output(display_name="path")],
        )

    @classmethod
    def execute(cls, model, filename_prefix, storage, rules=None, calibration=None) -> io.NodeOutput:
        given, workflow = checked_rules(rules) or rules_from(), (cls.hidden.prompt, cls.hidden.extra_pnginfo)
        saved = save_model(model, filename_prefix, storage, given, *workflow, checked_calibration(calibration))
        sentence, tone = (SAVED, GOOD) if saved.name.startswith("diffusion_models/") else (UNLISTED, WARN)
        formats = ", ".join(f"{storage} {size_text(size)}" for storage, size in saved.by_storage.items())
        told = Message(sentence, file=saved.name, size=size_text(saved.bytes), formats=formats)
        return io.NodeOutput(saved.name, ui=Result(told, tone, text=f"Saved {saved.name}", toast=True).ui())


NODES = [SaveModel]
