"""What a GPU is needed for, in five minutes: `python -m benchmarks gpu --comfyui DIR [--out FILE] [--only ITEM ...] [--seconds 300] [--save]`.

The items, in order:

rules          what the probes found, constants of the cost model, and a case of each rule of the CUDA rule book on the device
tests          tests/gpu
storages       SDXL and a part of Flux under dynamic VRAM, in each storage and in products of fp8
fp16_safe      SDXL in fp16_safe, without dynamic VRAM and under it
static clones  a small model loaded static while dynamic VRAM is on, in each storage and compute; then compiled by TorchCompileModel
streamed       Flux with a third of its weights in VRAM: fp16, int8, fp8
video          Wan 1.3B at 81 frames
server         demo.py: a ComfyUI server, four pictures

A row of a model has the seconds to load, host and device time of a call against ComfyUI's own, its products by dtype, the most memory of the
first and of a later call, and the error against fp32; with --kernels its kernels by name too, which takes as long as all else. A call is the
model's alone, as in the midst of a sampler's run; SDXL's has two images.

Each part is a process of its own. A row that fails, hangs or ends its process is a row with its problem, and the others go on. What is not
timed runs side by side, before what is. --only takes items and beginnings of rows: "storages", "Flux, dynamic VRAM: int8". A table of the rows ends the
run; --out has all of them, as they come. Exit code 1 where a row has a problem, 2 where a target is missed. `--dry-run` does the same on a
CPU with small models, to see that every line works.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from unittest import mock

from setup import machine
from setup.environment import Environment

from . import gpu_checks, reporting
from .gpu_constants import constants
from .gpu_rows import measured
from .gpu_table import as_table
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
    "fp8 file": ("as_file", "auto"),
    "fp8 file, products": ("as_file", "fp8"),
}
"""Setting -> the storage and compute asked for; those of an fp8 file are held against ComfyUI's own run of it."""
CORE = ("core fp16", "core fp8")
OF_A_FILE = ("core fp8", "fp8 file", "fp8 file, products")
STORED = ("core fp16", "auto", "int8", "fp8", "fp8 products")
SAFE = ("fp16_safe", "fp16_safe, guard")
TESTS, DEMO, CLONES = "tests: tests/gpu", "server: demo.py", "static clones"
PARTS = {
    "device": ("probes", "constants", "rules"),
    "tests": ("tests/gpu",),
    CLONES: ("loaded", "compiled"),
    "server": ("demo.py",),
    "SDXL, dynamic VRAM": (*STORED, *SAFE),
    "Flux, dynamic VRAM": (*STORED, *OF_A_FILE, "fp16_safe"),
    "SDXL": ("core fp16", "auto", *SAFE),
    "Flux, streamed": ("core fp16", "int8", "fp8"),
    "Wan 1.3B, video": ("core fp16", "fp16_safe", "int8", "fp8"),
}
"""Model and state, or what is asked -> its rows."""
UNTIMED = ("tests", CLONES, "server")
ITEMS = {
    "rules": ("device",),
    "tests": ("tests",),
    "storages": ("SDXL, dynamic VRAM", "Flux, dynamic VRAM"),
    "fp16_safe": ("SDXL: ", *(f"SDXL, dynamic VRAM: {setting}" for setting in ("core fp16", *SAFE))),
    CLONES: (CLONES,),
    "streamed": ("Flux, streamed",),
    "video": ("Wan 1.3B, video",),
    "server": ("server",),
}
"""Item -> how its rows begin."""
CALLS = {
    "SDXL": ("sdxl", 77, {"size": 128, "batch": 2}),
    "Wan 1.3B": ("wan", 512, {"size": 64, "frames": 9}),
    "Flux": ("flux", 256, {"size": 128}),
}
"""Model -> family, tokens of text, latent."""
VIDEO = (1, 16, 21, 60, 104)
"""The latent of 81 frames of 832 x 480: 32,760 tokens."""
REPEATS, PAIRS, NAMES = 2, 3, 12
LONG = 0.3
"""A call of so many seconds is timed one by one, in two pairs."""
ACTIVATIONS = 2 << 30
"""Bytes beside the weights that a streamed model is left."""
ROW_SECONDS = 60
TARGETS = {"auto": 1.02, "auto, guard": 1.03, "fp16_safe": 1.25}
"""Device or host time of a call in a setting, whichever is larger, against ComfyUI's own fp16."""
READS = ("tolist", "item", "cpu", "__bool__")


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--out", type=Path, help="write the result here after every row")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no row after this time, and end one that lasts"
    )
    parser.add_argument("--only", nargs="+", default=(), metavar="ITEM", help="only these items or rows")
    parser.add_argument("--kernels", action="store_true", help="kernels of each call by name")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--dry-run", action="store_true", help="small models on the CPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--rows", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        return run_part(args)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    result = machine.gpu_conditions(Environment(Path(sys.executable), args.comfyui.resolve())) | {
        "benchmark": "gpu",
        "dry_run": args.dry_run,
        "rows": [],
    }
    run_all(args, chosen(tuple(args.only)), result, time.monotonic() + args.seconds)
    if args.save and not args.dry_run:
        reporting.save(result)
    print(json.dumps(result, indent=2) if args.json else as_table(result))
    if any("problem" in row for row in result["rows"]):
        return 1
    return 0 if args.dry_run else reporting.exit_code(result)


def chosen(only: tuple[str, ...]) -> list[str]:
    """List the rows that are asked for, by item or by how they begin, in order."""
    begin = [start for each in only for start in ITEMS.get(each, (each,))]
    return [name for name in all_rows() if not only or any(name.startswith(start) for start in begin)]


def all_rows() -> list[str]:
    """List every row, in order."""
    return [f"{part}: {setting}" for part, settings in PARTS.items() for setting in settings]


def run_all(args: argparse.Namespace, names: list[str], result: dict, ends: float) -> None:
    """Add the rows with these names to a result: the device's first, what is not timed side by side, the others one after another."""
    lock = threading.Lock()

    def tell(row: dict) -> None:
        with lock:
            result["rows"] = sorted([*result["rows"], row], key=lambda one: names.index(one["row"]))
            result["targets"] = _targets(result["rows"])
            if args.out:
                args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")

    def run(part: str) -> None:
        wanted = [name for name in names if name.startswith(f"{part}: ")]
        for row in rows_of(args, part, wanted, ends):
            tell(row)

    run("device")
    with ThreadPoolExecutor(len(UNTIMED)) as pool:
        list(pool.map(run, UNTIMED))
    for part in (part for part in PARTS if part not in ("device", *UNTIMED)):
        run(part)


def rows_of(args: argparse.Namespace, part: str, names: list[str], ends: float) -> Iterator[dict]:
    """Yield the rows of a part: its own process makes them, but for tests and the demo, which are processes."""
    if part not in ("tests", "server"):
        longest = ROW_SECONDS * (10 if args.dry_run else 1)
        yield from measured(names, partial(_command, args, part), ends, longest)
    elif names:
        began = time.monotonic()
        row = (gpu_checks.run_tests if part == "tests" else gpu_checks.run_demo)(args, ends)
        yield {"row": names[0], **row, "took_seconds": round(time.monotonic() - began, 1)}


def _command(args: argparse.Namespace, part: str, names: list[str], lines: Path) -> list[str]:
    options = ["--comfyui", str(args.comfyui.resolve()), "--part", part, "--out", str(lines), "--rows", *names]
    switches = [f"--{name.replace('_', '-')}" for name in ("dry_run", "kernels") if getattr(args, name)]
    return [sys.executable, "-m", "benchmarks.gpu", *options, *switches]


def run_part(args: argparse.Namespace) -> int:
    """Measure rows of a part and write each as a line; end after one that left the device in a state that no kernel runs in."""
    is_dynamic = any(state in args.part for state in ("dynamic VRAM", "streamed", CLONES))
    # ComfyUI's main.py sets its own switch where it turns this allocator on (cuda_malloc.py).
    more = ("--cuda-malloc",) if "cudaMallocAsync" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") else ()
    comfy = load_comfy(args, on_cpu=args.dry_run, more=more, dynamic=is_dynamic)
    from support.tiny_models import small_sizes

    with small_sizes() if args.dry_run else contextlib.nullcontext():
        for name, make in _makers(comfy, args):
            began = time.monotonic()
            try:
                row = make()
            except Exception as error:  # a row that fails is a result too
                row = {"problem": f"{type(error).__name__}: {error}"[:500]}
            with args.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"row": name, **row, "took_seconds": round(time.monotonic() - began, 1)}) + "\n")
            if "problem" in row and not _device_answers():
                return 0
    return 0


def _makers(comfy, args: argparse.Namespace) -> list[tuple[str, Callable[[], dict]]]:
    made: dict[str, Callable[[], dict]]
    if args.part == "device":
        made = {"probes": probes_found, "constants": partial(constants, args.dry_run), "rules": gpu_checks.rules}
    elif args.part == CLONES:
        made = {
            "loaded": partial(gpu_checks.static_clones, comfy),
            "compiled": partial(gpu_checks.compiled_clones, comfy, args.dry_run),
        }
    else:
        model = Model(comfy, args.part, args.dry_run, args.kernels)
        made = {setting: partial(model.row, setting) for setting in PARTS[args.part]}
    rows = {f"{args.part}: {setting}": make for setting, make in made.items()}
    return [(name, rows[name]) for name in args.rows]


def _device_answers() -> bool:
    """False after an error that no later kernel of the process survives, such as an illegal address."""
    import torch

    try:
        torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu").sum().item()
    except RuntimeError:
        return False
    return True


def probes_found() -> dict:
    """What `doctor` tells of this device."""
    from halfsafe.precision.report.doctor import diagnose

    found = diagnose()
    failed = [probe["name"] for probe in found["probes"] if probe["ok"] is False]
    return {"said": f"{found['device']['label']}; failed: {', '.join(failed) or 'none'}", "doctor": found}


class Model:
    """Measure one model: a file with normal weights of its widths, ComfyUI's own loaders, and each setting against those."""

    def __init__(self, comfy, part: str, dry: bool, kernels: bool):
        self.comfy, self.dry, self.kernels = comfy, dry, kernels
        self.name, _, self.state = part.partition(", ")
        self.family, self.tokens, self.size = CALLS[self.name]
        self.path = comfy.folder / f"{self.family}_measured.safetensors"
        self._cores: dict[str, object] = {}
        self._alone: dict[str, float] = {}

    def row(self, setting: str) -> dict:
        """Measure ComfyUI's own call, or that of a setting in turns with ComfyUI's."""
        from support import families

        if not self._cores:
            self._prepare()
        if self.state == "streamed":
            families.unload_models()
        start = time.perf_counter()
        if setting in CORE:
            model = self._core(setting)
            with self._lying(model):
                return self._row(model, start, {"ours": model})
        of_a_file = setting in OF_A_FILE
        sides = {} if self.state == "streamed" else {"plain": self._core("core fp8" if of_a_file else "core fp16")}
        start = time.perf_counter()
        model = families.load(self.comfy, self._scaled() if of_a_file else self.path, *SETTINGS[setting])
        if "guard" in setting:
            model = self.comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
        sides["ours"] = model
        with self._lying(*sides.values()):
            return self._row(model, start, sides)

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
        began = time.perf_counter()
        runs["ours"]()
        wait()
        long = time.perf_counter() - began > LONG
        taken: dict[str, list[dict]] = {name: [] for name in runs}
        for index in range(1 if self.dry else PAIRS - long):
            for name in sorted(runs, reverse=bool(index % 2)):
                taken[name].append(timed(runs[name], 1 if long else REPEATS))
        for clock in taken["ours"][0]:
            row[clock] = statistics.median(one[clock] for one in taken["ours"])
            if "plain" in taken:
                pairs = zip(taken["plain"], taken["ours"], strict=True)
                row[f"{clock}_to_core"] = round(
                    statistics.median(ours[clock] / plain[clock] for plain, ours in pairs), 4
                )
        with MatmulSpy(model.model) as spy:
            runs["ours"]()
        products = Counter(f"{' x '.join(product.operands)} to {product.result}" for product in spy.seen)
        row |= {"first_peak_bytes": first_peak, "peak_bytes": peak(runs["ours"])[1], "products": dict(products)}
        if self.kernels:
            row |= kernels_of(runs["ours"])
        if self.state == "streamed":
            row |= self._beside_the_first(row, model)
        for side in sides.values():
            side.cleanup()
        return row

    def _beside_the_first(self, row: dict, model) -> dict:
        """What a row that was measured alone takes beside ComfyUI's own, which came first, and how much of the weights stayed in VRAM."""
        held = {"held_share": round(model.loaded_size() / model.model_size(), 2)}
        if not self._alone:
            self._alone = {clock: row[clock] for clock in ("seconds", "device_seconds") if clock in row}
            return held
        return held | {f"{clock}_to_core": round(row[clock] / alone, 4) for clock, alone in self._alone.items()}

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
        if self.state == "streamed" and not self.dry:
            self._leave_room_for_a_third()

    def _leave_room_for_a_third(self) -> None:
        """Reserve VRAM as ComfyUI's --reserve-vram does, so that a third of the weights in 16 bit fits beside what a call needs."""
        import comfy.model_management
        import comfy_aimdo.control
        import torch

        reserved = torch.cuda.mem_get_info()[0] - self.path.stat().st_size // 3 - ACTIVATIONS
        comfy_aimdo.control.init(simple_vram_headroom=reserved)
        comfy.model_management.EXTRA_RESERVED_VRAM = reserved

    def _core(self, name: str):
        """Load by ComfyUI's own loader: a file in fp16, or its weights in fp8 with their scales."""
        import comfy.sd
        import torch

        if name not in self._cores:
            model = (
                cores_own(self.path, torch.float16)
                if name == "core fp16"
                else comfy.sd.load_diffusion_model(str(self._scaled()))
            )
            self._cores[name] = model
        return self._cores[name]

    def _scaled(self) -> Path:
        target = self.path.with_name(f"scaled_{self.path.name}")
        return target if target.exists() else scaled(self.comfy, self.path)

    def _lying(self, *models) -> contextlib.AbstractContextManager:
        """Lend the weights as under dynamic VRAM where a CPU has to show that the lines work."""
        state = {"dynamic VRAM": "resident", "streamed": "streamed"}.get(self.state)
        if not (self.dry and state):
            return contextlib.nullcontext()
        from comfy.model_management import load_models_gpu
        from support.dynamic_vram import aimdo_stubbed

        load_models_gpu(list(models))
        return aimdo_stubbed(*models, state=state)

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


def timed(call: Callable, repeats: int = REPEATS) -> dict[str, float]:
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
        for _ in range(repeats):
            call()
        for event in events[1:]:
            event.record()
        host = (time.thread_time() - host - waited()) / repeats
    wait()
    clocks = {"seconds": (time.perf_counter() - start) / repeats, "host_seconds": host}
    return clocks | ({"device_seconds": events[0].elapsed_time(events[1]) / 1000 / repeats} if events else {})


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
    events = [
        event
        for event in profiled.events()
        if event.device_type == kind and not event.name.startswith(("Memcpy", "Memset"))
    ]
    counts, micros = Counter(event.name for event in events), Counter()
    for event in events:
        micros[event.name] += event.time_range.elapsed_us()
    named = {
        name[:120]: {"count": counts[name], "microseconds": round(taken, 1)}
        for name, taken in micros.most_common(NAMES)
    }
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
