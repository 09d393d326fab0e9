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


def report_json(patcher: ModelPatcher) -> str:
    """Return the report of a model as JSON text."""
    return json.dumps(report_of(patcher, encoder_reports()).to_json(), allow_nan=False)


def with_live_report(patcher: ModelPatcher, node_id: str | None) -> tuple[ModelPatcher, dict[str, list[str]]]:
    """Return a clone of the model that reports on its runs, and the node's ui output: the report as planned.

    The page knows the node's result by a token, which a cached result keeps.
    """
    clone, token = patcher.clone(), uuid.uuid4().hex

    def sampling(executor, *args, **kwargs):
        try:
            return executor(*args, **kwargs)
        finally:
            send_report(node_id, token, report_json(executor.class_obj.model_patcher))

    set_wrapper(clone, REPORT, sampling, WrappersMP.OUTER_SAMPLE)
    return clone, {REPORT_KEY: [report_json(clone)], TOKEN: [token]}
