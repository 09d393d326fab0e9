"""The report that a node shows on itself: as planned when it is made, and as it ran after each run of a sampler."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING

from comfy.patcher_extension import WrappersMP

from ..comfyui.page import encoder_reports, send_report
from ..comfyui.wrappers import REPORT, set_wrapper
from .report import report_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

REPORT_KEY = "halfsafe_report"
TOKEN = "halfsafe_token"


class LiveReport:
    """Sends the report of a node's model whenever a sampler's run of it ends.

    ``token``: what the page knows the node's result by, which a cached result keeps.
    """

    def __init__(self, node_id: str | None):
        self.node_id, self.token = node_id, uuid.uuid4().hex

    def sampling(self, executor, *args, **kwargs):
        """Run a sampler, and send what its run was like."""
        try:
            return executor(*args, **kwargs)
        finally:
            send_report(self.node_id, self.token, report_json(executor.class_obj.model_patcher))


def report_json(patcher: ModelPatcher) -> str:
    """Return the report of a model as JSON text."""
    return json.dumps(report_of(patcher, encoder_reports()).to_json(), allow_nan=False)


def with_live_report(patcher: ModelPatcher, node_id: str | None) -> tuple[ModelPatcher, dict[str, list[str]]]:
    """Return a clone of the model that reports on its runs, and the node's ui output: the report as planned."""
    clone, live = patcher.clone(), LiveReport(node_id)
    set_wrapper(clone, REPORT, live.sampling, WrappersMP.OUTER_SAMPLE)
    return clone, {REPORT_KEY: [report_json(clone)], TOKEN: [live.token]}
