"""Halfsafe's ComfyUI nodes."""

import logging

from comfy_api.latest import ComfyExtension, io

from ..precision.devices.detect import PROFILE_VARIABLE
from ..precision.devices.names import drop_wrong_name
from . import accumulation, analysis, compare, compute, guard, loaders, measure, report, rules, save
from .host.kitchen import warn_once

NODES: list[type[io.ComfyNode]] = [*loaders.NODES, *save.NODES, *rules.NODES, *compute.NODES, *accumulation.NODES, *guard.NODES, *report.NODES, *analysis.NODES, *compare.NODES, *measure.NODES]


class HalfsafeExtension(ComfyExtension):
    async def on_load(self) -> None:
        if problem := drop_wrong_name(PROFILE_VARIABLE):
            logging.error("Halfsafe: %s", problem)
        warn_once()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
