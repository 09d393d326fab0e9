"""Save a model with chosen precision, in ComfyUI's own format."""

from comfy_api.latest import io

from ..precision.base.message import Message, joined
from ..precision.base.text import size_text
from ..precision.plan.rules import rules_from
from ..precision.report.result import GOOD, HOLDS, SAVED, SAVED_LARGER, UNLISTED, WARN, Result
from .host.load.save import save_model
from .inputs import LOAD, CalibrationType, checked_calibration, checked_rules, rules_input, schema, storage_input


class SaveModel(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeSaveModel",
            LOAD,
            search_aliases=[
                "save fp8",
                "save int8",
                "quantize model",
                "convert fp8",
                "merge lora",
                "export",
                "precision",
            ],
            is_output_node=True,
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            inputs=[
                io.Model.Input("model"),
                io.String.Input("filename_prefix", default="diffusion_models/halfsafe"),
                storage_input(default="as_file"),
                rules_input(),
                CalibrationType.Input("calibration", optional=True),
                io.Boolean.Input("card", default=True, optional=True),
            ],
            outputs=[io.String.Output()],
        )

    @classmethod
    def execute(cls, model, filename_prefix, storage, rules=None, calibration=None, card=True) -> io.NodeOutput:
        given = checked_rules(rules) or rules_from()
        workflow = (cls.hidden.prompt, cls.hidden.extra_pnginfo)
        saved = save_model(model, filename_prefix, storage, given, *workflow, checked_calibration(calibration), card)
        unlisted, tone = ("", GOOD) if saved.name.startswith("diffusion_models/") else (UNLISTED, WARN)
        is_larger = sum(saved.by_storage.values()) > saved.before
        sizes = {"size": size_text(saved.bytes)} | ({"before": size_text(saved.before)} if is_larger else {})
        first = Message(SAVED_LARGER if is_larger else SAVED, file=saved.name, **sizes)
        formats = ", ".join(f"{storage} {size_text(size)}" for storage, size in saved.by_storage.items())
        told = joined([first, *saved.again, unlisted, Message(HOLDS, formats=formats), *saved.notes])
        return io.NodeOutput(saved.name, ui=Result(told, tone, text=f"Saved {saved.name}", toast=True).ui())


NODES = [SaveModel]
