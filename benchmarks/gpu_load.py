"""Loading a model and its first call, in a process of its own: `python -m benchmarks.gpu_load --comfyui DIR FILE STORAGE [--dynamic] [--core | --on-cpu]`.

Prints JSON: seconds until the model is there and until the first call has ended, and the host's anonymous memory meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path

from .clock import wait
from .measure import AnonymousMemory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("storage")
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--dynamic", action="store_true", help="with ComfyUI's dynamic VRAM")
    parser.add_argument("--core", action="store_true", help="with ComfyUI's own loader")
    parser.add_argument("--on-cpu", action="store_true", help="with weights quantized on the CPU")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    from .host import load_comfy

    load_comfy(args, on_cpu=args.dry_run)
    from support import dynamic_process, families

    if args.dynamic and not dynamic_process.turn_on():
        print(json.dumps({"unavailable": "no dynamic VRAM here"}))
        return 0
    with AnonymousMemory() as memory:
        start = time.perf_counter()
        model = _core(args) if args.core else _ours(args)
        loaded = time.perf_counter()
        families.capture(model, "wan", size=8, frames=1)
        wait()
        ended = time.perf_counter()
    print(json.dumps({"loaded_seconds": loaded - start, "first_call_seconds": ended - start, "anonymous_bytes": memory.above_start}))
    return 0


def _core(args: argparse.Namespace):
    import torch
    from comfy.sd import load_diffusion_model

    return load_diffusion_model(str(args.file), {} if args.storage == "as_file" else {"dtype": torch.float8_e4m3fn})


def _ours(args: argparse.Namespace):
    from halfsafe.nodes.host.load import tensors
    from halfsafe.nodes.host.load.models import load_diffusion_model
    from halfsafe.precision.plan.rules import Rules

    if args.on_cpu:
        tensors.quantizing_device = contextlib.nullcontext
    return load_diffusion_model(str(args.file), args.storage, "auto", Rules(), disable_dynamic=not args.dynamic)


if __name__ == "__main__":
    sys.exit(main())
