"""Everything a GPU is needed for, in one go: `python -m benchmarks gpu --comfyui DIR [--out FILE] [--save]`.

Device facts; the tests of tests/gpu, a row each; then for SDXL, Wan 1.3B and a part of Flux at their real widths, in ComfyUI's own fp16 and
in each setting of the pack: seconds to load, host and device time of a call against that fp16, kernels, device memory, error against fp32.
Each row is written as it comes, and none that fails ends the run. Exit code 1 where a row has a problem, 2 where a target is missed.
`--dry-run` does the same on a CPU with small models, to see that every line works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from setup import machine
from setup.environment import ROOT, Environment

from . import reporting
from .host import load_comfy
from .large_models import ON_A_GPU

SETTINGS = {
    "auto": ("fp16", "auto"),
    "auto, guard": ("fp16", "auto"),
    "fp16_safe": ("fp16", "fp16_safe"),
    "fp16_safe, guard": ("fp16", "fp16_safe"),
    "bf16": ("as_file", "bf16"),
    "fp8": ("fp8_e4m3fn", "auto"),
    "fp8 products": ("fp8_e4m3fn", "fp8"),
    "int8": ("int8", "auto"),
    "fp32": ("fp32", "fp32"),
}
MODELS = {"SDXL": ("sdxl", {"size": 128}), "Wan 1.3B": ("wan", {"size": 64, "frames": 9}), "Flux": ("flux", {"size": 128})}
CALLS, PAIRS = 3, 3
TEST_SECONDS = 150
TARGETS = {"auto": 1.02, "auto, guard": 1.03, "fp16_safe": 1.25}
"""Device or host time of a call in a setting, whichever is larger, against ComfyUI's own fp16."""


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--out", type=Path, help="write the result here after every row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time")
    parser.add_argument("--dry-run", action="store_true", help="small models on the CPU")
    args = parser.parse_args()
    ends = time.monotonic() + args.seconds
    result = machine.gpu_conditions(Environment(Path(sys.executable), args.comfyui.resolve())) | {"benchmark": "gpu", "dry_run": args.dry_run, "rows": []}
    for name, make in _rows(args):
        row, began = {}, time.monotonic()
        try:
            if began > ends:
                raise TimeoutError("the time was up before it")
            row = make()
        except Exception as error:  # a row that fails is a result too
            row = {"problem": f"{type(error).__name__}: {error}"[:500]}
        result["rows"].append({"row": name, **row, "took_seconds": round(time.monotonic() - began, 1)})
        result["targets"] = _targets(result["rows"])
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.save and not args.dry_run:
        reporting.save(result)
    print(json.dumps(result, indent=2))
    if any("problem" in row for row in result["rows"]):
        return 1
    return 0 if args.dry_run else reporting.exit_code(result)


def _rows(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], dict]]]:
    """Yield name and maker of each row. The tests come first, in a process of their own."""
    yield "tests", lambda: run_tests(args)
    comfy = load_comfy(args, on_cpu=args.dry_run)
    from support.tiny_models import small_sizes

    with small_sizes() if args.dry_run else contextlib.nullcontext():
        for name in MODELS:
            model = Model(comfy, name, args.dry_run)
            yield f"{name}: core fp16", model.plain
            for setting in SETTINGS:
                yield f"{name}: {setting}", partial(model.compared, setting)
            yield f"{name}: unloaded", model.forget


def run_tests(args: argparse.Namespace) -> dict:
    """Run tests/gpu; outcome of each test, of one that hung too."""
    lines = (args.out or Path(tempfile.gettempdir()) / "gpu.json").absolute().with_suffix(".tests.jsonl")
    lines.write_text("", encoding="utf-8")
    more = {"COMFYUI_DIR": str(args.comfyui.resolve()), "HALFSAFE_TEST_LINES": str(lines), "HALFSAFE_TEST_SECONDS": str(TEST_SECONDS * (8 if args.dry_run else 1))}
    environ = os.environ | more | ({"HALFSAFE_DRY_RUN": "1"} if args.dry_run else {}) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    ran = subprocess.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    last = {line["test"].split("::")[-1]: line for line in map(json.loads, lines.read_text(encoding="utf-8").splitlines())}
    bad = {test: line.get("why", "")[-300:] for test, line in last.items() if line["outcome"] in ("failed", "begun")}
    row = {"passed": sum(line["outcome"] == "passed" for line in last.values()), "skipped": sum(line["outcome"] == "skipped" for line in last.values()), "failed": bad}
    return row if ran.returncode == 0 and row["passed"] else row | {"problem": ran.stdout[-500:] + ran.stderr[-500:]}


class Model:
    """Measure one model: a file with normal weights of its widths, ComfyUI's own fp16, and each setting against that."""

    def __init__(self, comfy, name: str, dry: bool):
        self.comfy, self.name, self.dry = comfy, name, dry
        self.family, self.size = MODELS[name]
        self.path = comfy.folder / f"{self.family}_measured.safetensors"

    def plain(self) -> dict:
        """Write the file, load it by ComfyUI's own loader and time a call."""
        import torch
        from support import families

        self._write()
        exact = families.load(self.comfy, self.path, "fp32", "fp32")
        self.call = families.capture(exact, self.family, **({} if self.dry else self.size))
        self.reference = self._run(exact).float().cpu()
        start = time.perf_counter()
        self.core = families.stock(self.path, torch.float16)
        row = {"loaded_seconds": round(time.perf_counter() - start, 2)} | timed(lambda: self._run(self.core))
        return row | {"error": self._error(self._run(self.core))} | alone(lambda: self._run(self.core))

    def compared(self, setting: str) -> dict:
        """Load the model in a setting of the pack and time calls in turns with ComfyUI's own fp16."""
        from support import families

        start = time.perf_counter()
        model = families.load(self.comfy, self.path, *SETTINGS[setting])
        if "guard" in setting:
            model = self.comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
        row = {"loaded_seconds": round(time.perf_counter() - start, 2), "error": self._error(self._run(model))}
        sides = {"plain": lambda: self._run(self.core), "ours": lambda: self._run(model)}
        taken: dict[str, list[dict]] = {name: [] for name in sides}
        for index in range(1 if self.dry else PAIRS):
            for name in sorted(sides, reverse=bool(index % 2)):
                taken[name].append(timed(sides[name]))
        for clock in taken["ours"][0]:
            row[clock] = statistics.median(one[clock] for one in taken["ours"])
            pairs = zip(taken["plain"], taken["ours"], strict=True)
            row[f"{clock}_to_core"] = round(statistics.median(ours[clock] / plain[clock] for plain, ours in pairs), 4)
        return row | alone(sides["ours"])

    def forget(self) -> dict:
        """Unload the model's clones and remove its file."""
        from support.families import unload_models

        self.core = self.reference = None
        unload_models()
        self.path.unlink(missing_ok=True)
        return {}

    def _write(self) -> None:
        """Write a file with normal weights that keep the size of what goes through; a small one in a dry run."""
        import comfy.ops
        import torch
        from safetensors.torch import save_file
        from support import families, tiny_models

        if self.dry or self.family == "wan":
            made = families.write_narrow(self.family, self.comfy.folder) if self.dry else tiny_models.wan_1_3b_shaped(self.path)
            made.replace(self.path)
            return
        generator = torch.Generator().manual_seed(0)
        inner = ON_A_GPU[self.name](device="cpu", dtype=torch.float16, operations=comfy.ops.disable_weight_init)[0]
        with torch.no_grad():
            for name, parameter in inner.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
                else:
                    parameter.fill_(0 if name.endswith("bias") else 1)
        save_file({key: value.contiguous() for key, value in inner.state_dict().items()}, str(self.path))

    def _run(self, patcher):
        from support import families

        return families.replay(patcher, self.call)

    def _error(self, result) -> float | None:
        error = ((result.float().cpu() - self.reference).norm() / self.reference.norm()).item()
        return float(f"{error:.2e}") if error == error else None


def timed(call: Callable) -> dict[str, float]:
    """Seconds of a call over several after one that is not timed: on the host's own thread, and on the device by CUDA's events."""
    import torch

    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if torch.cuda.is_available() else []
    wait()
    host, start = time.thread_time(), time.perf_counter()
    for event in events[:1]:
        event.record()
    for _ in range(CALLS):
        call()
    for event in events[1:]:
        event.record()
    host = (time.thread_time() - host) / CALLS
    wait()
    clocks = {"seconds": (time.perf_counter() - start) / CALLS, "host_seconds": host}
    return clocks | ({"device_seconds": events[0].elapsed_time(events[1]) / 1000 / CALLS} if events else {})


def alone(call: Callable) -> dict:
    """Count the kernels of a call, and the device memory it allocates beyond what was there; empty on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return {}
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait()
    peak = torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        call()
        wait()
    names = [event.name for event in profiled.events() if event.device_type == DeviceType.CUDA]
    return {"kernels": sum(not name.startswith(("Memcpy", "Memset")) for name in names), "peak_bytes": peak}


def wait() -> None:
    """Wait for the device."""
    import torch

    with contextlib.suppress(AssertionError, RuntimeError):
        torch.cuda.synchronize()


def _targets(rows: list[dict]) -> dict[str, dict]:
    """Hold the larger of host and device time of each setting against its limit."""
    found = {}
    for row in rows:
        setting = row["row"].partition(": ")[2]
        if setting in TARGETS and "problem" not in row:
            ratio = max(row[key] for key in ("seconds_to_core", "device_seconds_to_core") if key in row)
            found[row["row"]] = reporting.target(ratio, TARGETS[setting])
    return found


if __name__ == "__main__":
    sys.exit(main())
