"""Halfsafe's ComfyUI nodes."""

import logging

from comfy_api.latest import ComfyExtension, io

from ..precision.base.debug_log import set_log_level
from ..precision.devices.detect import drop_wrong_profile
from . import accumulation, analysis, calibrate, compare, compute, guard, loaders, measure, report, rules, save
from .host.comfyui.metal import hold_8_bits_on_metal
from .host.comfyui.page import errors_explained
from .host.comfyui.self_test import check_core
from .host.compute.bound import AS_STORED
from .host.guard.watch import watch_every_run
from .host.reporting.routes import serve_page

FILES = (loaders, save, rules, compute, accumulation, guard, report, analysis, compare, measure, calibrate)
NODES: list[type[io.ComfyNode]] = [node for file in FILES for node in file.NODES]
for node in NODES:
    node.execute = classmethod(errors_explained()(node.execute.__func__))


class HalfsafeExtension(ComfyExtension):
    async def on_load(self) -> None:
        for problem in filter(None, (drop_wrong_profile(), set_log_level())):
            logging.error("Halfsafe: %s", problem)
        hold_8_bits_on_metal()
        check_core(AS_STORED)
        watch_every_run()
        serve_page()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
