"""Load a real ComfyUI and this pack into the test process."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).absolute().parent.parent.parent


def setup_comfyui(comfyui: Path, base: Path, *extra_args: str) -> None:
    """Put ComfyUI on `sys.path` and parse its command line as `main.py` does, before anything of it is imported."""
    if "comfy.cli_args" in sys.modules:
        raise RuntimeError("ComfyUI is already imported in this process.")
    sys.path.insert(0, str(comfyui))
    command = ["main.py", "--base-directory", str(base), "--database-url", "sqlite:///:memory:", "--disable-api-nodes"]
    saved, sys.argv = sys.argv, [*command, *extra_args]
    try:
        importlib.import_module("comfy.options").enable_args_parsing()
        importlib.import_module("comfy.cli_args")
    finally:
        sys.argv = saved
    _use_base_directory(base)


def turn_on_dynamic_vram() -> bool:
    """Do what ``main.py`` of ComfyUI 0.30 does, before anything touches CUDA; tell whether comfy-aimdo works here. Its log level too:
    without one comfy-aimdo writes each allocation to stderr."""
    import comfy_aimdo.control

    comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    devices = [device for device in comfy.model_management.get_all_torch_devices() if device.type == "cuda"]
    if not devices:
        return False
    try:
        works = comfy_aimdo.control.init_devices((device.index, 0) for device in devices)
    except TypeError:  # comfy-aimdo 0.4.9
        works = comfy_aimdo.control.init_devices(device.index for device in devices)
    if works:
        comfy_aimdo.control.set_log_warning()  # as ``main.py`` sets one of its levels; before, it logs each allocation
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    return bool(works)


def end_of(stderr: str, letters: int = 4000) -> str:
    """The end of what a process wrote, without comfy-aimdo's own log."""
    return "\n".join(line for line in stderr.splitlines() if not line.startswith("aimdo: "))[-letters:]


def benchmark(name: str) -> ModuleType:
    """A file of `benchmarks/`, whose folder's parent is on no path: it holds a `nodes` beside ComfyUI's."""
    if "benchmarks" not in sys.modules:
        folder = ROOT / "benchmarks"
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules["benchmarks"] = importlib.util.module_from_spec(spec)
    return importlib.import_module(f"benchmarks.{name}")


def load_pack() -> ModuleType:
    """Run the pack's `__init__.py` as `halfsafe`, so that tests and nodes share one copy of every module."""
    spec = importlib.util.spec_from_file_location(
        "halfsafe", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    module = sys.modules["halfsafe"]
    module.__spec__, module.__file__ = spec, str(ROOT / "__init__.py")
    spec.loader.exec_module(module)
    return module


def node_classes(pack: ModuleType) -> dict[str, type]:
    """The pack's nodes by id, as ComfyUI's loader gets them."""

    async def collect() -> list[type]:
        extension = pack.comfy_entrypoint()
        extension = await extension if asyncio.iscoroutine(extension) else extension
        await extension.on_load()
        return await extension.get_node_list()

    return {node.GET_SCHEMA().node_id: node for node in asyncio.run(collect())}


def runner(nodes: dict[str, type]) -> Callable[..., tuple]:
    """``run(node id, **inputs)``: execute one of the nodes and return its outputs as a tuple."""

    def run(node_id: str, **inputs: object) -> tuple:
        return tuple(nodes[node_id].execute(**inputs).args)

    return run


def _use_base_directory(base: Path) -> None:
    import folder_paths

    for kind in ("output", "temp", "input", "user"):
        getattr(folder_paths, f"set_{kind}_directory")(str(base / kind))
