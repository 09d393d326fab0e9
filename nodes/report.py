"""See what really runs."""

import json

import torch
from comfy_api.latest import io

from ..precision.base.message import messages_in
from ..precision.devices.profiles import PROFILE_NAMES
from ..precision.report import doctor
from ..precision.report.report_chart import chart
from .host.guard.notices import encoder_reports
from .host.load.devices import current_device
from .host.reporting import report as host
from .host.reporting.badge import MESSAGES_KEY, REPORT_KEY
from .host.reporting.here import facts_here
from .inputs import MEASURE, schema


class ReportNode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeReport",
            MEASURE,
            search_aliases=["dtype", "precision", "report", "used dtype", "manual cast", "weight dtype", "debug"],
            is_output_node=True,
            inputs=[io.Model.Input("model"), io.AnyType.Input("after", optional=True)],
            outputs=[io.String.Output(), io.String.Output(), io.Image.Output()],
        )

    @classmethod
    def execute(cls, model, after=None) -> io.NodeOutput:
        report = host.report_of(model, encoder_reports())
        text = report.to_text()
        image = torch.from_numpy(chart(report)).unsqueeze(0).float() / 255
        data = report.to_json()
        written = json.dumps(data, allow_nan=False)
        shown = {"text": (text,), REPORT_KEY: (written,), MESSAGES_KEY: (messages_in(data),)}
        return io.NodeOutput(text, written, image, ui=shown)


class DeviceInfo(io.ComfyNode):
    THIS_DEVICE = "this device"

    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            "HalfsafeDeviceInfo",
            MEASURE,
            search_aliases=["gpu info", "gpu support", "bf16 support", "capabilities", "doctor"],
            is_output_node=True,
            inputs=[io.Combo.Input("profile", options=[cls.THIS_DEVICE, *PROFILE_NAMES], default=cls.THIS_DEVICE)],
            outputs=[io.String.Output(), io.String.Output()],
        )

    @classmethod
    def execute(cls, profile) -> io.NodeOutput:
        found = doctor.diagnose(current_device()) if profile == cls.THIS_DEVICE else doctor.diagnose(profile=profile)
        if profile == cls.THIS_DEVICE:
            found["comfyui"] = facts_here()
        result = doctor.diagnosis_result(found)
        return io.NodeOutput(result.text, json.dumps(found, allow_nan=False), ui=result.ui())


NODES = [ReportNode, DeviceInfo]
