"""Models at their real widths on a GPU, with random weights made there: `fp16_safe` beside plain fp16, as they are, compiled and as
CUDA graphs; and the kernels of a call beside those that the cost model counts. See gpu.py."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator

from .clock import timed, wait
from .cost_cards import CARDS, LAUNCH, READ
from .large_models import BUILD, ON_A_GPU, SMALL

WAYS = ("fp16", "fp16_safe")
WHOLE = ("SDXL", "Flux")
COMPILED = {"compiled": {}, "CUDA graphs": {"mode": "reduce-overhead"}}
IN_ORDER = (("Flux", "compiled"), ("SDXL, 22 of 70 blocks", "CUDA graphs"), ("Flux", "CUDA graphs"), ("SDXL, 22 of 70 blocks", "compiled"))
"""What tells most comes first: compiling takes minutes, and the time may be up. SDXL whole is traced for longer than the command may take."""
DRY_BACKEND, DRY_CARD = {"compiled": "aot_eager", "CUDA graphs": "eager"}, "H100"
KINDS = {"product": ("gemm", "cutlass", "xmma", "cudnn", "conv", "wgrad", "nvjet"), "attention": ("flash", "fmha", "attention")}
PAIRS = 3


def model_rows(dry: bool) -> Iterator[dict]:
    """For each model, run as it is: its profile; then seconds, reads by the host, memory, and how fp16_safe compares."""
    for name in WHOLE:
        sides = {way: _eager(*_on_device(_built(name, dry), way), way) for way in WAYS}
        yield {"model": name, "profile": {way: _profile(name, way, call, dry) for way, call in sides.items()}}
        yield {"model": name, "run": "eager"} | _compared(sides)


def compiled_rows(dry: bool) -> Iterator[dict]:
    """The same of compiled models, with the seconds until a compiled call has run three times."""
    for name, how in IN_ORDER:
        options = {"backend": DRY_BACKEND[how]} if dry else COMPILED[how]
        made = {way: _compiled(*_on_device(_built(name, dry), way), way, options) for way in WAYS}
        row = _compared({way: call for way, (call, _) in made.items()})
        yield {"model": name, "run": how, "compile_seconds": {way: round(seconds, 1) for way, (_, seconds) in made.items()}} | row


def _built(name: str, dry: bool) -> Callable:
    return (SMALL if dry else ON_A_GPU)[name]


def _on_device(build: Callable, way: str):
    """A model in fp16 with normal weights that keep the size of what goes through, as the loader has it, and the arguments of a call."""
    import comfy.ops
    import torch

    from .cost import _as_loaded, _base_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    with torch.device(device), torch.no_grad():
        inner, x, given = build(device=device, dtype=torch.float16, operations=comfy.ops.manual_cast)
        for name, parameter in inner.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, (parameter[0].numel()) ** -0.5, generator=generator)
            else:
                parameter.fill_(0 if name.endswith("bias") else 1)
        given = {key: value.normal_(generator=generator) for key, value in given.items()}
        call = (x.normal_(generator=generator), torch.full((x.shape[0],), 0.5)), given
    if way == "fp16_safe":
        _as_loaded(inner)
    return _base_model(inner.eval().requires_grad_(False)), call


def _eager(model, call, way: str) -> Callable:
    """A call in one arithmetic, after one that calibrates."""
    return _calls(model, call, way)[0]


def _calls(model, call, way: str) -> tuple[Callable, object]:
    import torch

    from .cost import _executed

    run = _executed(model, way)
    dtype = torch.float32 if way == "fp16_safe" else torch.float16
    (x, t), given = call[0], {key: value.to(dtype) for key, value in call[1].items()}

    def go():
        with torch.inference_mode():
            return run(x.to(dtype), t, **given)

    go()
    return go, run


def _compiled(model, call, way: str, options: dict) -> tuple[Callable, float]:
    """A call of the compiled model, and the seconds until it has run three times."""
    import torch

    go, run = _calls(model, call, way)
    torch._dynamo.reset()
    graph, start = torch.compile(model.diffusion_model, **options), time.perf_counter()

    def compiled():
        run.forward = graph
        try:
            return go()
        finally:
            run.forward = None

    for _ in range(3):  # traces, records, replays
        compiled()
    wait()
    return compiled, time.perf_counter() - start


def _compared(sides: dict[str, Callable]) -> dict:
    """Both arithmetics of a model in turns."""
    import torch

    taken: dict[str, list[dict]] = {way: [] for way in WAYS}
    row: dict = {way: {"reads": _waits(sides[way]), "peak_bytes": peak_bytes(sides[way])} for way in WAYS}
    for index in range(PAIRS):
        for way in sorted(WAYS, reverse=bool(index % 2)):
            taken[way].append(timed(sides[way]))
    for way, found in taken.items():
        row[way] |= {clock: statistics.median(one[clock] for one in found) for clock in ("seconds", "device_seconds") if found[0][clock] is not None}
    for clock in ("seconds", "device_seconds"):
        if clock in row["fp16"]:
            pairs = zip(taken["fp16"], taken["fp16_safe"], strict=True)
            row[f"{clock}_to_fp16"] = round(statistics.median(safe[clock] / plain[clock] for plain, safe in pairs), 4)
    plain, safe = (sides[way]().float() for way in WAYS)
    return row | {"finite": bool(torch.isfinite(plain).all() and torch.isfinite(safe).all()), "difference": _difference(plain, safe)}


def _difference(plain, safe) -> float | None:
    found = ((safe - plain).norm() / plain.norm()).item()
    return round(found, 5) if found == found else None


def peak_bytes(call: Callable) -> int | None:
    """The most device memory a call allocates beyond what was allocated before it."""
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait()
    return torch.cuda.max_memory_allocated() - before


def _waits(call: Callable) -> int | None:
    """How often a call makes the host wait for the device."""
    import torch

    if not torch.cuda.is_available():
        return None
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def _profile(name: str, way: str, call: Callable, dry: bool) -> dict:
    """Kernels and milliseconds by kind, measured and as the cost model has them, and the kernels that took longest."""
    import torch

    card = DRY_CARD if dry else next((card for card in CARDS if card in torch.cuda.get_device_name()), None)
    return _measured(call) | {"cost_model": _estimated(name, way, card)}


def _measured(call: Callable) -> dict:
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, supported_activities

    with profile(activities=list(supported_activities() & {ProfilerActivity.CUDA, ProfilerActivity.CPU})) as profiled:
        call()
        wait()
    events = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    kinds = {kind: {"kernels": 0, "ms": 0.0} for kind in (*KINDS, "other", "memcpy", "memset")}
    longest: dict[str, list] = {}
    for event in events:
        ms = event.time_range.elapsed_us() / 1000
        kind = kind_of_kernel(event.name)
        kinds[kind] = {"kernels": kinds[kind]["kernels"] + 1, "ms": round(kinds[kind]["ms"] + ms, 4)}
        seen = longest.setdefault(event.name[:120], [0, 0.0])
        seen[0], seen[1] = seen[0] + 1, round(seen[1] + ms, 4)
    return {"kinds": kinds, "longest": dict(sorted(longest.items(), key=lambda one: -one[1][1])[:25])}


def kind_of_kernel(name: str) -> str:
    """Tell a kernel's kind by its name, as the cost model has them."""
    lower = name.lower()
    if lower.startswith(("memcpy", "memset")):
        return lower[:6]
    found = [kind for kind in ("attention", "product") if any(part in lower for part in KINDS[kind])]
    return found[0] if found else "other"


def _estimated(name: str, way: str, card: str | None) -> dict | None:
    """The cost model's kernels and milliseconds by kind on a card; None where it has neither model nor card."""
    from .cost import _count

    if card is None or ON_A_GPU[name] is not BUILD[name]:
        return None
    counted = _count(way, BUILD[name])
    kinds = {kind: {"kernels": 0, "ms": 0.0} for kind in (*KINDS, "other")}
    for kernel in counted.kernels:
        kinds[kernel.kind]["kernels"] += 1
        kinds[kernel.kind]["ms"] += 1000 * kernel.seconds(CARDS[card])
    return {"card": card, "kinds": kinds, "ms": 1000 * counted.seconds(CARDS[card]), "reads": counted.reads, "launch_us": 1e6 * LAUNCH, "read_us": 1e6 * READ}
