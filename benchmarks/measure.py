"""One measurement in a process of its own: `python -m benchmarks.measure NAME FILE FOLDER` prints seconds and memory as JSON.

Memory is the anonymous resident memory of this process (RssAnon on Linux), sampled by a thread, above what it was
before the work began: pages mapped from the model file are not in it. Null where the system does not tell it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from setup.environment import ROOT

SAMPLING_SECONDS = 0.002


class AnonymousMemory:
    """Bytes of anonymous memory at the start and at the peak of a `with` block."""

    def __enter__(self) -> AnonymousMemory:
        gc.collect()
        self.start = self.peak = anonymous_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def above_start(self) -> int | None:
        return None if self.start is None else self.peak - self.start

    def _watch(self) -> None:
        while self.start is not None:
            self.peak = max(self.peak, anonymous_bytes())
            if self._done.wait(SAMPLING_SECONDS):
                return


def anonymous_bytes() -> int | None:
    """RssAnon of this process, or None."""
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
    return None


def load_halfsafe(path: Path, storage: str = "fp8_e4m3fn") -> dict:
    """HalfsafeLoadDiffusionModel to scaled fp8 or another storage."""
    from support import inprocess

    node = inprocess.node_classes(inprocess.load_pack())["HalfsafeLoadDiffusionModel"]
    return _load(lambda: node.execute(path.name, storage, "auto").args[0])


def load_core(path: Path) -> dict:
    """ComfyUI's UNETLoader with weight_dtype fp8_e4m3fn: a cast without a scale."""
    import nodes

    return _load(lambda: nodes.UNETLoader().load_unet(path.name, "fp8_e4m3fn")[0])


def convert_halfsafe(path: Path, storage: str = "fp8_e4m3fn") -> dict:
    """convert_file, one weight at a time."""
    from halfsafe.precision.commands.convert import convert_file
    from halfsafe.precision.plan.rules import rules_from

    target = path.with_name("halfsafe-converted.safetensors")
    return timed(lambda: convert_file(path, target, storage, rules_from())) | _size(target)


def convert_read_all(path: Path) -> dict:
    """Read all, quantize all, save all, as conversion scripts do; the same layers in the same format."""
    from safetensors.torch import save_file

    target = path.with_name("read-all-converted.safetensors")
    return timed(lambda: save_file(_quantized_at_once(path), target)) | _size(target)


def _quantized_at_once(path: Path) -> dict:
    import torch
    from halfsafe.precision.formats.checkpoint import read_checkpoint
    from halfsafe.precision.formats.format import comfy_quant_tensor
    from halfsafe.precision.plan.layers import plan_file
    from halfsafe.precision.plan.rules import rules_from
    from safetensors.torch import load_file

    tensors = load_file(path)
    checkpoint = read_checkpoint(tensors, {}, path)
    plans = plan_file(checkpoint, checkpoint.prefix, "fp8_e4m3fn", rules_from())
    result = {}
    for name, tensor in tensors.items():
        layer = name.removesuffix(".weight")
        if name not in plans or plans[name].storage != "fp8_e4m3fn":
            result[name] = tensor
            continue
        scale = tensor.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
        result[name] = (tensor.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        result[f"{layer}.weight_scale"] = scale
        result[f"{layer}.comfy_quant"] = comfy_quant_tensor({"format": "float8_e4m3fn"})
    return result


MEASUREMENTS: dict[str, Callable[[Path], dict]] = {
    "load_halfsafe": load_halfsafe,
    "load_int8": partial(load_halfsafe, storage="int8"),
    "load_core": load_core,
    "convert_halfsafe": convert_halfsafe,
    "convert_int8": partial(convert_halfsafe, storage="int8"),
    "convert_read_all": convert_read_all,
}


def _load(load: Callable) -> dict:
    """A load in inference mode, in which ComfyUI runs nodes; outside of it each quantized weight is copied once more."""
    import torch

    model = []
    with torch.inference_mode():
        result = timed(lambda: model.append(load()))
        size = weight_bytes(model.pop())
        again = timed(lambda: model.append(load()))
    return result | {"weight_bytes": size, "again_seconds": again["seconds"], "again_cpu_seconds": again["cpu_seconds"]}


def weight_bytes(patcher) -> int:
    tensors = patcher.model.diffusion_model.parameters()
    return sum(getattr(tensor, "_qdata", tensor).nbytes for tensor in tensors)


def timed(work: Callable) -> dict:
    with AnonymousMemory() as memory:
        began, computed = time.perf_counter(), time.process_time()
        work()
        seconds, computed = time.perf_counter() - began, time.process_time() - computed
    return {"seconds": seconds, "cpu_seconds": computed, "anonymous_bytes": memory.above_start}


def _size(path: Path) -> dict:
    size = path.stat().st_size
    path.unlink()
    return {"written_bytes": size}


def set_up(folder: Path) -> None:
    """ComfyUI and the pack in this process, its model folders in `folder`."""
    sys.path[:] = [str(ROOT / "tests"), *(path for path in sys.path if Path(path) != ROOT)]
    importlib.import_module("conftest")
    importlib.import_module("support.inprocess").setup_comfyui(Path(os.environ["COMFYUI_DIR"]), folder, "--cpu")
    importlib.import_module("nodes")


def main() -> None:
    """Run the measurement named on the command line."""
    name, path, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    with contextlib.redirect_stdout(io.StringIO()):
        set_up(folder)
        result = MEASUREMENTS[name](path)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
