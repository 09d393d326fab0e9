"""Everything a GPU is needed for, in one go: `python -m benchmarks gpu --comfyui DIR [--out FILE] [--only ROW ...] [--save]`.

In the order of what is most worth knowing where time runs out: what the probes found; constants of the cost model; the tests of tests/gpu; then
SDXL, Flux, and Wan 1.3B at their real widths, in ComfyUI's own loader and in each setting of the pack, under dynamic VRAM and without it. A row
has the seconds to load, host and device time of a call against ComfyUI's own, its products by dtype, its kernels by name, the most memory of the
first and of a later call, and the error against fp32. A call is the model's alone, as in the midst of a sampler's run; SDXL's has two images.

Each part is a process of its own, ended where it outlasts --seconds; each row is written as it comes, and none that fails ends the run. Exit code
1 where a row has a problem, 2 where a target is missed. `--dry-run` does the same on a CPU with small models, to see that every line works.
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
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from setup import machine
from setup.environment import ROOT, Environment

from . import reporting
from .gpu_constants import constants
from .host import load_comfy
from .host_time import cores_own, scaled
from .large_models import ON_A_GPU

SETTINGS = {
    "auto": ("fp16", "auto"),
    "fp16_safe": ("fp16", "fp16_safe"),
    "auto, guard": ("fp16", "auto"),
    "fp16_safe, guard": ("fp16", "fp16_safe"),
    "fp8": ("fp8_e4m3fn", "auto"),
    "fp8 products": ("fp8_e4m3fn", "fp8"),
    "int8": ("int8", "auto"),
    "bf16": ("as_file", "bf16"),
    "fp32": ("fp32", "fp32"),
    "fp8 file": ("as_file", "auto"),
    "fp8 file, fp8 products": ("as_file", "fp8"),
}
"""Setting -> the storage and compute asked for; those of an fp8 file are held against ComfyUI's own run of it."""
CORE = ("core fp16", "core fp8")
IN_FP16 = ("core fp16", *list(SETTINGS)[:4])
OF_A_FILE = ("core fp8", "fp8 file", "fp8 file, fp8 products")
PARTS = {
    "SDXL, dynamic VRAM": IN_FP16,
    "Flux, dynamic VRAM": (*OF_A_FILE, "core fp16", "int8", "fp8", "fp8 products", "auto", "fp16_safe"),
    "SDXL": (*IN_FP16, *list(SETTINGS)[4:9]),
    "Wan 1.3B, video": ("core fp16", "auto", "fp16_safe", "fp8"),
    "Wan 1.3B, dynamic VRAM": IN_FP16,
    "Wan 1.3B": (*IN_FP16, *list(SETTINGS)[4:9]),
    "Flux": (*IN_FP16, *list(SETTINGS)[4:9], *OF_A_FILE),
}
"""Model and state -> its rows."""
CALLS = {
    "SDXL": ("sdxl", 77, {"size": 128, "batch": 2}),
    "Wan 1.3B": ("wan", 512, {"size": 64, "frames": 9}),
    "Flux": ("flux", 256, {"size": 128}),
}
"""Model -> family, tokens of text, latent."""
VIDEO = (1, 16, 21, 60, 104)
"""The latent of 81 frames of 832 x 480: 32,760 tokens."""
REPEATS, PAIRS, NAMES = 3, 3, 12
TEST_SECONDS = 150
TARGETS = {"auto": 1.02, "auto, guard": 1.03, "fp16_safe": 1.25}
"""Device or host time of a call in a setting, whichever is larger, against ComfyUI's own fp16."""
READS = ("tolist", "item", "cpu", "__bool__")


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--out", type=Path, help="write the result here after every row")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no row after this time, and end one that lasts")
    parser.add_argument("--only", nargs="+", default=(), metavar="ROW", help='only rows whose name begins so: "SDXL, dynamic VRAM", "Flux: int8"')
    parser.add_argument("--dry-run", action="store_true", help="small models on the CPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_part(args)
    ends = time.monotonic() + args.seconds
    result = machine.gpu_conditions(Environment(Path(sys.executable), args.comfyui.resolve())) | {"benchmark": "gpu", "dry_run": args.dry_run, "rows": []}
    for rows in _rows(args, ends):
        result["rows"] += rows
        result["targets"] = _targets(result["rows"])
        if args.out:
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if args.save and not args.dry_run:
        reporting.save(result)
    print(json.dumps(result, indent=2))
    if any("problem" in row for row in result["rows"]):
        return 1
    return 0 if args.dry_run else reporting.exit_code(result)


def is_wanted(name: str, only: tuple[str, ...]) -> bool:
    """Tell whether a row was asked for."""
    return not only or any(name.startswith(each) for each in only)


def _rows(args: argparse.Namespace, ends: float) -> Iterator[list[dict]]:
    """Yield the rows of each part, in order."""
    yield from _in_a_process(args, "device", ends)
    for name, graphs in (("tests", False), ("tests of CUDA graphs", True)):
        if is_wanted(name, args.only):
            began = time.monotonic()
            yield [{"row": name, **run_tests(args, graphs, ends), "took_seconds": round(time.monotonic() - began, 1)}]
    for part in PARTS:
        yield from _in_a_process(args, part, ends)


def names_of(part: str) -> list[str]:
    """List the rows of a part."""
    return ["probes", "constants"] if part == "device" else [f"{part}: {setting}" for setting in PARTS[part]]


def _in_a_process(args: argparse.Namespace, part: str, ends: float) -> Iterator[list[dict]]:
    """Yield each row as its process writes it; and what became of the process where rows are missing."""
    wanted = [name for name in names_of(part) if is_wanted(name, args.only)]
    if not wanted:
        return
    with tempfile.TemporaryDirectory(prefix="halfsafe-gpu-") as folder:
        lines = Path(folder) / "rows.jsonl"
        lines.touch()
        options = ["--comfyui", str(args.comfyui.resolve()), "--part", part, "--out", str(lines), "--only", *wanted]
        command = [sys.executable, "-m", "benchmarks.gpu", *options, *(["--dry-run"] if args.dry_run else [])]
        with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log) as process:
            seen = 0
            while True:
                ended = process.poll() is not None
                rows = [json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines()]
                if rows[seen:]:
                    yield rows[seen:]
                    seen = len(rows)
                if ended:
                    break
                if time.monotonic() > ends:
                    process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(1)
            if left := wanted[seen:]:
                log.seek(0)
                why = "the time was up" if time.monotonic() > ends else f"its process ended with {process.returncode}: {log.read()[-500:]}"
                yield [{"row": name, "problem": why} for name in left]


def run_tests(args: argparse.Namespace, graphs: bool, ends: float) -> dict:
    """Run tests/gpu, those that capture graphs by themselves; outcome of each test, of one that hung too."""
    lines = (args.out or Path(tempfile.gettempdir()) / "gpu.json").absolute().with_suffix(".graphs.jsonl" if graphs else ".tests.jsonl")
    lines.write_text("", encoding="utf-8")
    more = {"COMFYUI_DIR": str(args.comfyui.resolve()), "HALFSAFE_TEST_LINES": str(lines), "HALFSAFE_TEST_SECONDS": str(TEST_SECONDS * (8 if args.dry_run else 1))}
    environ = os.environ | more | ({"HALFSAFE_DRY_RUN": "1"} if args.dry_run else {}) | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if graphs:
        # "cudaMallocAsync does not yet support checkPoolLiveAllocations" (PyTorch #158641): torch captures no graph under it.
        environ |= {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}
    chosen = ("-k", "cuda_graphs" if graphs else "not cuda_graphs")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu", *chosen]
    left = ends - time.monotonic()
    try:
        ran = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=None if left == float("inf") else max(1, left))
        problem = "" if ran.returncode == 0 else ran.stdout[-500:] + ran.stderr[-500:]
    except subprocess.TimeoutExpired:
        problem = "the time was up"
    last = {line["test"].split("::")[-1]: line for line in map(json.loads, lines.read_text(encoding="utf-8").splitlines())}
    bad = {test: line.get("why", "")[-300:] for test, line in last.items() if line["outcome"] in ("failed", "begun")}
    row = {"passed": sum(line["outcome"] == "passed" for line in last.values()), "skipped": sum(line["outcome"] == "skipped" for line in last.values()), "failed": bad}
    return row if row["passed"] and not problem else row | {"problem": problem or "no test passed"}


def run_part(args: argparse.Namespace) -> int:
    """Measure the rows of a part and write each as a line."""
    is_dynamic = "dynamic VRAM" in args.part
    # ComfyUI's main.py sets its own switch where it turns this allocator on (cuda_malloc.py).
    more = ("--cuda-malloc",) if "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else ()
    comfy = load_comfy(args, on_cpu=args.dry_run, more=more, dynamic=is_dynamic)
    from support.tiny_models import small_sizes

    with small_sizes() if args.dry_run else contextlib.nullcontext():
        for name, make in _makers(comfy, args.part, args.dry_run):
            if not is_wanted(name, args.only):
                continue
            row, began = {}, time.monotonic()
            try:
                row = make()
            except Exception as error:  # a row that fails is a result too
                row = {"problem": f"{type(error).__name__}: {error}"[:500]}
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"row": name, **row, "took_seconds": round(time.monotonic() - began, 1)}) + "\n")
    return 0


def _makers(comfy, part: str, dry: bool) -> list[tuple[str, Callable[[], dict]]]:
    if part == "device":
        return [("probes", probes_found), ("constants", partial(constants, dry))]
    model = Model(comfy, part, dry)
    return [(f"{part}: {setting}", partial(model.row, setting)) for setting in PARTS[part]]


def probes_found() -> dict:
    """What `doctor` tells of this device; whether ``torch._int_mm`` multiplies with its second operand in either layout."""
    import torch
    from halfsafe.precision.commands.doctor import diagnose

    device = "cuda" if torch.cuda.is_available() else "cpu"
    left, right = (torch.ones(size, dtype=torch.int8, device=device) for size in ((32, 64), (64, 32)))
    return {"doctor": diagnose(), "int_mm": {"row-major": _said(torch._int_mm, left, right), "column-major": _said(torch._int_mm, left, right.t().contiguous().t())}}


def _said(function: Callable, *args) -> str:
    try:
        function(*args)
        wait()
    except RuntimeError as error:
        return str(error)[:300]
    return "right"


class Model:
    """Measure one model: a file with normal weights of its widths, ComfyUI's own loaders, and each setting against those."""

    def __init__(self, comfy, part: str, dry: bool):
        self.comfy, self.dry = comfy, dry
        self.name, _, self.state = part.partition(", ")
        self.family, self.tokens, self.size = CALLS[self.name]
        self.path = comfy.folder / f"{self.family}_measured.safetensors"
        self._cores: dict[str, object] = {}

    def row(self, setting: str) -> dict:
        """Measure ComfyUI's own call, or that of a setting in turns with ComfyUI's."""
        from support import families

        if not self._cores:
            self._prepare()
        start = time.perf_counter()
        if setting in CORE:
            model = self._core(setting)
            with self._lying(model):
                return self._row(model, start, {"ours": model})
        of_a_file = setting in OF_A_FILE
        core = self._core("core fp8" if of_a_file else "core fp16")
        start = time.perf_counter()
        model = families.load(self.comfy, self._scaled() if of_a_file else self.path, *SETTINGS[setting])
        if "guard" in setting:
            model = self.comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
        with self._lying(core, model):
            return self._row(model, start, {"plain": core, "ours": model})

    def _row(self, model, start: float, sides: dict) -> dict:
        """Measure the first call, later ones in turns, and one by itself."""
        from comfy.model_management import load_models_gpu
        from support.matmul_spy import MatmulSpy

        load_models_gpu(list(sides.values()))
        for side in sides.values():
            side.pre_run()
        runs = {name: partial(self._run, side) for name, side in sides.items()}
        row = {"loaded_seconds": round(time.perf_counter() - start, 2)}
        result, first_peak = peak(runs["ours"])
        row |= {"error": self._error(result)}
        taken: dict[str, list[dict]] = {name: [] for name in runs}
        for index in range(1 if self.dry else PAIRS):
            for name in sorted(runs, reverse=bool(index % 2)):
                taken[name].append(timed(runs[name]))
        for clock in taken["ours"][0]:
            row[clock] = statistics.median(one[clock] for one in taken["ours"])
            if "plain" in taken:
                pairs = zip(taken["plain"], taken["ours"], strict=True)
                row[f"{clock}_to_core"] = round(statistics.median(ours[clock] / plain[clock] for plain, ours in pairs), 4)
        with MatmulSpy(model.model) as spy:
            runs["ours"]()
        products = Counter(f"{' x '.join(product.operands)} to {product.result}" for product in spy.seen)
        row |= {"first_peak_bytes": first_peak, "peak_bytes": peak(runs["ours"])[1], "products": dict(products)}
        row |= kernels_of(runs["ours"])
        for side in sides.values():
            side.cleanup()
        return row

    def _prepare(self) -> None:
        """Write the file, and have the call and its result in fp32."""
        import torch
        from support import families

        self._write()
        exact = families.load(self.comfy, self.path, "fp32", "fp32")
        text = families.conditioning(self.family, length=self.tokens)
        self.call = families.capture(exact, self.family, **({} if self.dry else {"cond": text, **self.size}))
        self.x = self.call.args[0]
        if self.state == "video" and not self.dry:
            self.x = torch.randn(VIDEO, generator=torch.Generator().manual_seed(2)).to(self.x)
            self.reference = None  # in fp32 it takes half a minute, and the same model without it has an error
        else:
            self.reference = families.replay(exact, self.call)
        del exact
        families.unload_models()

    def _core(self, name: str):
        """Load by ComfyUI's own loader: a file in fp16, or its weights in fp8 with their scales."""
        import comfy.sd
        import torch

        if name not in self._cores:
            model = cores_own(self.path, torch.float16) if name == "core fp16" else comfy.sd.load_diffusion_model(str(self._scaled()))
            self._cores[name] = model
        return self._cores[name]

    def _scaled(self) -> Path:
        target = self.path.with_name(f"scaled_{self.path.name}")
        return target if target.exists() else scaled(self.comfy, self.path)

    def _lying(self, *models) -> contextlib.AbstractContextManager:
        """Lend the weights as under dynamic VRAM where a CPU has to show that the lines work."""
        if not (self.dry and self.state == "dynamic VRAM"):
            return contextlib.nullcontext()
        from comfy.model_management import load_models_gpu
        from support.dynamic_vram import aimdo_stubbed

        load_models_gpu(list(models))
        return aimdo_stubbed(*models, state="resident")

    def _write(self) -> None:
        """Write a file with normal weights; a small one in a dry run."""
        from support import families

        if self.dry:
            families.write_narrow(self.family, self.comfy.folder).replace(self.path)
        else:
            write_normal(ON_A_GPU[self.name], self.path, "cuda")

    def _run(self, patcher):
        from support import families

        return families.apply(patcher, self.call, self.x)

    def _error(self, result) -> float | None:
        """How far what the model subtracts from the latent is from fp32's, relative."""
        if self.reference is None:
            return None
        subtracted = self.x.float().cpu() - result.float().cpu()
        error = ((subtracted - self.reference.float().cpu()).norm() / self.reference.float().cpu().norm()).item()
        return float(f"{error:.2e}") if error == error else None


def write_normal(build: Callable, path: Path, device: str) -> None:
    """Write a model with normal weights, drawn on a device, that keep the size of what goes through."""
    import comfy.ops
    import torch
    from safetensors.torch import save_file
    from support.tiny_models import with_weights

    generator = torch.Generator(device).manual_seed(0)
    with with_weights():
        inner = build(device=device, dtype=torch.float16, operations=comfy.ops.disable_weight_init)[0]
    with torch.no_grad():
        for name, parameter in inner.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.fill_(0 if name.endswith("bias") else 1)
    save_file({key: value.contiguous().cpu() for key, value in inner.state_dict().items()}, str(path))


@contextlib.contextmanager
def clock_of_reads() -> Iterator[Callable[[], float]]:
    """Yield what this thread has spent inside of reads of tensors, where it waits for the device and spins."""
    import torch

    spent = [0.0]

    def stopped(read: Callable) -> Callable:
        def run(*args, **kwargs):
            start = time.thread_time()
            try:
                return read(*args, **kwargs)
            finally:
                spent[0] += time.thread_time() - start

        return run

    with contextlib.ExitStack() as undo:
        for name in READS:
            undo.enter_context(mock.patch.object(torch.Tensor, name, stopped(getattr(torch.Tensor, name))))
        yield lambda: spent[0]


def timed(call: Callable) -> dict[str, float]:
    """Seconds of a call over several after one that is not timed: on the wall, on the host's own thread without what it
    waits for the device, and on the device by CUDA's events."""
    import torch

    call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if torch.cuda.is_available() else []
    wait()
    with clock_of_reads() as waited:
        host, start = time.thread_time(), time.perf_counter()
        for event in events[:1]:
            event.record()
        for _ in range(REPEATS):
            call()
        for event in events[1:]:
            event.record()
        host = (time.thread_time() - host - waited()) / REPEATS
    wait()
    clocks = {"seconds": (time.perf_counter() - start) / REPEATS, "host_seconds": host}
    return clocks | ({"device_seconds": events[0].elapsed_time(events[1]) / 1000 / REPEATS} if events else {})


def peak(call: Callable) -> tuple[object, int | None]:
    """Return a call's result, and the device memory that it allocated beyond what was there; None on a CPU."""
    import torch

    if not torch.cuda.is_available():
        return call(), None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    wait()
    return result, torch.cuda.max_memory_allocated() - before


def kernels_of(call: Callable) -> dict:
    """Count the kernels of a call, name those that take longest, and tell how long the device waits between them; on a
    CPU operations stand for kernels."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    on_cuda = torch.cuda.is_available()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]) as profiled:
        call()
        wait()
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    events = [event for event in profiled.events() if event.device_type == kind and not event.name.startswith(("Memcpy", "Memset"))]
    counts, micros = Counter(event.name for event in events), Counter()
    for event in events:
        micros[event.name] += event.time_range.elapsed_us()
    named = {name[:120]: {"count": counts[name], "microseconds": round(taken, 1)} for name, taken in micros.most_common(NAMES)}
    found = {"kernels": len(events), "longest_kernels": named}
    if on_cuda and events:
        span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
        found["device_idle_share"] = round(1 - sum(micros.values()) / span, 3)
    return found


def wait() -> None:
    """Wait for the device."""
    import torch

    with contextlib.suppress(AssertionError, RuntimeError):
        torch.cuda.synchronize()


def _targets(rows: list[dict]) -> dict[str, dict]:
    """Hold the larger of wall and device time of each setting against its limit."""
    found = {}
    for row in rows:
        setting = row["row"].partition(": ")[2]
        if setting in TARGETS and "problem" not in row:
            ratio = max(row[key] for key in ("seconds_to_core", "device_seconds_to_core") if key in row)
            found[row["row"]] = reporting.target(ratio, TARGETS[setting])
    return found


if __name__ == "__main__":
    sys.exit(main())
