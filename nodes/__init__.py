"""Halfsafe's ComfyUI nodes."""

from comfy_api.latest import ComfyExtension, io

from . import accumulation, analysis, compare, compute, guard, loaders, report, rules, save

NODES: list[type[io.ComfyNode]] = [*loaders.NODES, *save.NODES, *rules.NODES, *compute.NODES, *accumulation.NODES, *guard.NODES, *report.NODES, *analysis.NODES, *compare.NODES]


class HalfsafeExtension(ComfyExtension):
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return NODES
