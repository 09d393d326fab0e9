"""A ComfyUI with this pack in the process of a benchmark."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from setup import machine
from setup.environment import ROOT, Environment


def load_comfy(
    args: argparse.Namespace, on_cpu: bool = True, more: tuple[str, ...] = (), dynamic: bool = False
) -> SimpleNamespace:
    """A ComfyUI and this pack in this process, with a models folder that goes away with it.

    Raises:
        RuntimeError: ``dynamic``, and comfy-aimdo does not work on this GPU.
    """
    sys.path[:] = [str(ROOT / "tests"), *(p for p in sys.path if Path(p).absolute() != ROOT)]
    import conftest  # noqa: F401  it makes the pack importable as `halfsafe`
    from setup.comfyui_server import make_base_directory
    from support import inprocess

    keep = tempfile.TemporaryDirectory(prefix="halfsafe-bench-")
    base = make_base_directory(Path(keep.name), ROOT)
    inprocess.setup_comfyui(args.comfyui.resolve(), base, *(["--cpu"] if on_cpu else []), *more)
    if dynamic and not on_cpu and not inprocess.turn_on_dynamic_vram():
        raise RuntimeError(
            "comfy-aimdo, which lends memory under dynamic VRAM, does not work with this driver or device"
        )
    logging.disable(logging.WARNING)
    run = inprocess.runner(inprocess.node_classes(inprocess.load_pack()))
    return SimpleNamespace(run=run, folder=base / "models" / "diffusion_models", keep=keep)


def conditions(args: argparse.Namespace) -> dict:
    """What this process measures with."""
    return machine.conditions(Environment(Path(sys.executable), args.comfyui.resolve()))
