"""What `fp16_safe` costs beside plain fp16, counted on fake CUDA tensors at the shapes of large models.

`python -m benchmarks cost --comfyui DIR [--json] [--save] [--models NAME ...]`; no GPU, no weights. Counted: every kernel of one
denoiser call of ComfyUI's own model, its bytes, and each read by the host, by layer. The counted state is a clean model's, whose
ranges all fit, in eager code; in a compiled graph the amax of an operand is found in the kernel that makes it. The times are estimates from the counts, for these assumptions:

- A product takes its operations at the card's peak times an efficiency, any other kernel its bytes at 0.85 of the memory's
  bandwidth, and each launch 2 microseconds more. No cache, no overlap on the device.
- The host runs ahead of the device: a call takes the longer of the two (`to fp16`: beside the CPU where that is worse). The host's time is
  host_time.py's with weights as they lie by default (on NVIDIA in VRAM under dynamic VRAM, elsewhere ready; no LoRA) and 2.5 microseconds a launch;
  `server` is the CPU that measured it, `desktop` half of it.
  `on the device` is the estimate without the host, as of a CUDA graph.
- A read by the host takes 20 microseconds and empties the queue: the device waits for the gap that was measured there.
- Peaks in TFLOPS for fp16 with fp32 sums, for fp32, and GB/s, from NVIDIA's data sheets of each card;
  efficiencies of matmuls and of attention are round figures of published measurements, but for the H200, where they are those that
  benchmarks/gpu.py measured. fp32 runs at 0.85 and 0.55 of its peak.
- Counts are of two blocks of each kind (Flux: one and two) with the model's ends, but of all of SDXL. Times are of the whole model: what twice as many
  blocks add is taken as often as the model has it, the ends once.
- ComfyUI's rope is one kernel, as comfy-kitchen's is on CUDA.

`measured` has what was measured on an H200 beside what these assumptions say of the same model.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from unittest import mock

from . import reporting
from .cost_cards import CARDS, CPUS, DRIVER, READ, TOYS, Card, Kernel
from .host import conditions, load_comfy
from .large_models import BUILD, ON_A_GPU, TWICE

NEED_IT = ("T4", "V100", "2080 Ti", "RX 6800", "M1 Max")
"""The cards that have no bf16, or none that is fast."""
LIMITS = {
    "Wan 1.3B": dict.fromkeys(NEED_IT, 1.02),
    "Wan 14B": dict.fromkeys(NEED_IT, 1.02),
    "Flux": dict.fromkeys(NEED_IT, 1.04),
    "Qwen-Image": dict.fromkeys(NEED_IT, 1.04),
    "SDXL": dict.fromkeys(NEED_IT, 1.11) | {"V100": 1.115},
}
WAYS = ("fp16", "fp16_safe", "fp32")
WHOLE = {"Wan 1.3B": 15, "Wan 14B": 20, "Flux": 19, "Qwen-Image": 30}
"""How many times the blocks that are counted a model has."""
WITHOUT_BF16 = ("T4", "V100", "2080 Ti")
MEASURED = {
    "SDXL": ("gpu_h200", "ready", "SDXL", 1.0),
    "SDXL, dynamic VRAM": ("gpu_h200_dynamic_vram", "dynamic VRAM, resident", "SDXL", 1.0),
    "Flux, dynamic VRAM": ("gpu_h200_dynamic_vram", "dynamic VRAM, resident", "Flux", 8 / 76),
}
"""Part of benchmarks/gpu.py on an H200 -> its file, how weights lay, model, and its share of the whole model's blocks, a double one for two."""


@dataclass
class Counted:
    """One call of a model in one arithmetic."""

    kernels: list[Kernel]
    reads: int
    modes: dict[str, str] = field(default_factory=dict)
    repeated: list[Kernel] = field(default_factory=list)
    times: int = 0
    """How often the whole model has ``repeated``, the kernels of as many blocks as were counted, beyond them."""
    host: dict[str, float] = field(default_factory=dict)
    gap: dict[str, float] = field(default_factory=dict)
    """How weights lie -> seconds of the host, as measured: of a call, and from one call's last product to the next one's first beyond ComfyUI's."""

    def on_device(self, card: Card) -> float:
        return sum(kernel.seconds(card) for kernel in self.kernels) + self.times * sum(
            kernel.seconds(card) for kernel in self.repeated
        )

    def on_host(self, card: Card, cpu: str) -> float:
        return CPUS[cpu] * self.host[card.weights] + DRIVER * (len(self.kernels) + self.times * len(self.repeated))

    def seconds(self, card: Card, cpu: str = "server") -> float:
        """The longer of both, and what reads add to it; see the module's assumptions."""
        return (
            max(self.on_device(card) + CPUS[cpu] * self.gap[card.weights], self.on_host(card, cpu)) + READ * self.reads
        )


def run_cost(args: argparse.Namespace) -> dict:
    """Counts and estimates of every model in every arithmetic."""
    load_comfy(args)
    rows = {name: _model_rows(name) for name in args.models or LIMITS}
    cards = {name: vars(card) for name, card in CARDS.items()}
    measured = {part: _measured(part) for part, (*_, model, _) in MEASURED.items() if model in rows}
    return {"benchmark": "cost", "cards": cards, "models": rows, "measured": measured, "targets": _targets(rows)}


def _model_rows(name: str) -> dict:
    counted = {way: _whole(name, way) for way in WAYS}
    print(name, file=sys.stderr, flush=True)
    plain = counted["fp16"]
    ways = {way: _way(found, plain) for way, found in counted.items()}
    safe = counted["fp16_safe"]
    estimates = {card: {way: found.seconds(CARDS[card]) for way, found in counted.items()} for card in CARDS}
    beside = {
        cpu: {name: round(safe.seconds(card, cpu) / plain.seconds(card, cpu), 3) for name, card in CARDS.items()}
        for cpu in CPUS
    }
    to_fp16 = {card: max(of[card] for of in beside.values()) for card in CARDS}
    device = {card: round(safe.on_device(CARDS[card]) / plain.on_device(CARDS[card]), 3) for card in CARDS}
    guarded = replace(plain, reads=1, **_host_of(name, "plain, guard"))
    guard = {card: round(guarded.seconds(CARDS[card]) / of["fp16"], 3) for card, of in estimates.items()}
    host_bound = [
        f"{name}, {cpu}"
        for cpu in CPUS
        for name, card in CARDS.items()
        if plain.on_host(card, cpu) > plain.on_device(card)
    ]
    of_fp32 = {card: round(of["fp32"] / of["fp16_safe"], 2) for card, of in estimates.items()}
    ratios = {"to_fp16": to_fp16, "beside": beside, "on_device": device, "guard": guard, "bound_by_host": host_bound}
    return {"counts": ways, "seconds": estimates, **ratios, "fp32_to_safe": of_fp32}


def _host_of(name: str, setting: str) -> dict[str, dict[str, float]]:
    """What host_time.py measured of a setting by how weights lie: seconds of a call and of its gap; of ComfyUI's own call without one."""
    toy, blocks = TOYS[name]
    rows = json.loads((reporting.FOLDER / "host_time.json").read_text(encoding="utf-8"))["rows"]
    host, gap = {}, {}
    for weights in {card.weights for card in CARDS.values()} | {weights for _, weights, *_ in MEASURED.values()}:
        measured = {row["setting"]: row for row in rows if (row["model"], row["weights"]) == (toy, weights)}
        found = measured.get(setting, {"to_core": 1.0, "gap_above_core_ms": 0.0})
        host[weights] = blocks * measured["plain"]["core_ms"] * found["to_core"] / 1e3
        gap[weights] = max(0.0, found["gap_above_core_ms"]) / 1e3
    return {"host": host, "gap": gap}


def _measured(part: str) -> dict:
    """Milliseconds of a call in fp16 and what `fp16_safe` takes of it: estimated for an H200, and as measured."""
    file, weights, model, blocks = MEASURED[part]
    card, seconds = replace(CARDS["H200"], weights=weights), {}
    for way, setting in (("fp16", ""), ("fp16_safe", "fp16_safe")):
        of_whole = _host_of(model, setting)
        host = {lie: blocks * taken for lie, taken in of_whole["host"].items()}
        counted = replace(_count(way, ON_A_GPU[model]), **of_whole | {"host": host})
        seconds[way] = {"device": counted.on_device(card), "call": counted.seconds(card)}
    rows = {
        row["row"]: row for row in json.loads((reporting.FOLDER / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    }
    plain, safe = rows[f"{part}: core fp16"], rows[f"{part}: fp16_safe"]
    return {
        "estimated": {
            "fp16_ms": round(1e3 * seconds["fp16"]["call"], 1),
            "fp16_ms_on_device": round(1e3 * seconds["fp16"]["device"], 1),
            "to_fp16": round(seconds["fp16_safe"]["call"] / seconds["fp16"]["call"], 3),
        },
        "measured": {"fp16_ms": round(1e3 * plain["seconds"], 1), "to_fp16": safe["seconds_to_core"]},
    }


def _way(found: Counted, plain: Counted) -> dict:
    """Kernels and bytes beyond plain fp16: of a whole call, an attention, and the layer with an fp16 result that has the most."""
    mine, theirs = (Counter(kernel.layer for kernel in of.kernels) for of in (found, plain))
    layers = [layer for layer in mine if layer not in ("", "attention")]
    fp16 = [layer for layer in layers if found.modes.get(layer, "fp16") == "fp16"]
    return {
        "kernels": len(found.kernels),
        "kernels_beyond_fp16": len(found.kernels) - len(plain.kernels),
        "bytes": _moved(found.kernels),
        "bytes_to_fp16": round(_moved(found.kernels) / _moved(plain.kernels), 3),
        "reads": found.reads,
        "layers": len(layers),
        "layers_with_fp16_results": len(fp16),
        "kernels_of_layer_with_fp16_result": max((mine[layer] - theirs[layer] for layer in fp16), default=0),
        "kernels_per_attention": round(
            (mine["attention"] - theirs["attention"]) / sum(k.kind == "attention" for k in plain.kernels), 2
        ),
    }


def _moved(kernels: list[Kernel]) -> int:
    return sum(kernel.read + kernel.written for kernel in kernels)


def _targets(rows: dict) -> dict:
    targets = {}
    for name, row in rows.items():
        for card, limit in LIMITS[name].items():
            found = row["to_fp16"].get(card, max(row["to_fp16"].values()))
            targets[f"{name}: fp16_safe to fp16, {card}"] = reporting.target(found, limit)
        # results/cost.json, saved earlier, has this target as "kernels of a proven layer".
        targets[f"{name}: kernels added to a layer with an fp16 result"] = reporting.target(
            row["counts"]["fp16_safe"]["kernels_of_layer_with_fp16_result"], 2
        )
        if name.startswith(("Wan", "Flux")):
            slowest = min(row["fp32_to_safe"][card] for card in WITHOUT_BF16)
            targets[f"{name}: fp32 to fp16_safe"] = reporting.target(slowest, 3.0, at_least=True)
    return targets


def _whole(name: str, way: str) -> Counted:
    """A model's counts, with what its other blocks add."""
    found = _count(way, BUILD[name])
    if name in TWICE:
        added = Counter(map(_cost_of, _count(way, TWICE[name]).kernels)) - Counter(map(_cost_of, found.kernels))
        found.repeated, found.times = [Kernel("", *cost) for cost in added.elements()], WHOLE[name] - 1
    return replace(found, **_host_of(name, "fp16_safe" if found.reads else ""))


def _cost_of(kernel: Kernel) -> tuple:
    return tuple(value for name, value in vars(kernel).items() if name != "layer")


def _count(way: str, build: Callable) -> Counted:
    """One call that calibrates nothing, after one that does, without inference mode, which hides casts; every read is answered with a number that fits."""
    import torch
    from support.fake_cuda import AnsweredReads, attention_of_a_gpu
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .cost_kernels import Costs, rope_in_one_kernel

    dtype = torch.float32 if way in ("fp32", "fp16_safe") else torch.float16
    fakes, reads = FakeTensorMode(allow_non_fake_inputs=True), AnsweredReads(1.0)
    with fakes, attention_of_a_gpu(), _marked_attention(), rope_in_one_kernel(), reads, torch.no_grad():
        import comfy.ops

        stored = torch.float32 if way == "fp32" else torch.float16
        with torch.device("cuda"):
            inner, x, given = build(device="cuda", dtype=stored, operations=comfy.ops.manual_cast)
        if way == "fp16_safe":
            _as_loaded(inner)
        model = _base_model(inner)
        run = _executed(model, way)
        given = {key: value.to(dtype) for key, value in given.items()}
        call = (x.to(dtype), torch.empty(x.shape[0], device="cuda"))
        if run.compute:
            run(*call, **given)
        reads.places, reads.foreign = [], 0
        with Costs(inner).watching() as costs:
            run(*call, **given)
        modes = run.modes()
    return Counted(costs.seen, len(reads.places), modes)


def _as_loaded(inner) -> None:
    """What the loader does to a model that runs in fp16_safe."""
    from halfsafe.nodes.host.load.models import hold_norms_in_fp32

    hold_norms_in_fp32(inner.modules())


class _Patcher(SimpleNamespace):
    """What is read of a ModelPatcher without patches; hashed by identity, as ComfyUI's is."""

    __hash__ = object.__hash__


def _base_model(inner):
    import torch

    model = torch.nn.Module()
    model.diffusion_model = inner
    options: dict = {}
    model.__dict__["current_patcher"] = _Patcher(
        model=model,
        model_options=options,
        load_device=torch.device("cpu"),
        patches={},
        patches_uuid=None,
        attachments={},
        object_patches={},
    )
    model.__dict__ |= {"current_weight_patches_uuid": None, "manual_cast_dtype": torch.float32}
    return model


class _executed:
    """A model in one arithmetic, called as ComfyUI's sampler does."""

    def __init__(self, model, way: str):
        from halfsafe.nodes.host.replay.interceptor import COMPUTE, Interceptor

        self.model = model
        self.compute = _safe(model) if way == "fp16_safe" else None
        self.wrapper = Interceptor({COMPUTE: self.compute} if self.compute else {})

    def __call__(self, x, t, **given):
        call = _Executor(self.model, given, self.model.diffusion_model)
        options = {"sigmas": t}
        return self.wrapper(call, x, t, None, None, None, options)

    def modes(self) -> dict[str, str]:
        standing = self.compute.standing(self.model.current_patcher) if self.compute else {}
        return {name: forward.mode for name, forward in standing.items()}


class _Executor:
    def __init__(self, model, given: dict, forward: Callable):
        from comfy.model_base import BaseModel

        self.class_obj, self.given, self.forward = model, given, forward
        self.original = BaseModel._apply_model.__get__(model)

    def __call__(self, x, t, c_concat, c_crossattn, control, transformer_options, **extra):
        return self.forward(x, t, **self.given, transformer_options=transformer_options)


def _safe(model):
    from halfsafe.nodes.host.comfyui.layers import matrix_layers
    from halfsafe.nodes.host.compute.executor import Compute
    from halfsafe.precision.formats.layer_plan import LayerPlan
    from halfsafe.precision.plan.choice import Choice
    from halfsafe.precision.plan.compute import ComputePlan

    decisions = {name: LayerPlan(mode="fp16_wide") for name, _ in matrix_layers(model)}
    return Compute(ComputePlan(Choice("fp16_safe", "fp16_safe"), decisions))


@contextlib.contextmanager
def _marked_attention() -> Iterator[None]:
    """Every attention is a layer of that name."""
    from comfy.ldm.modules import attention

    from .cost_kernels import inside

    original = attention.attention_pytorch

    def marked(*args, **kwargs):
        with inside("attention"):
            return original(*args, **kwargs)

    marked.__name__ = original.__name__
    with contextlib.ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            for function in (
                ("optimized_attention", "optimized_attention_masked") if name.startswith("comfy.ldm") else ()
            ):
                if hasattr(module, function):
                    undo.enter_context(mock.patch.object(module, function, marked))
        yield


def as_text(result: dict) -> str:
    """A table for each model, then the targets."""
    lines = []
    for name, row in result["models"].items():
        lines += [
            f"\n{name}",
            "| | kernels | beyond fp16 | bytes to fp16 | reads | layers in fp16 |",
            "|---|---|---|---|---|---|",
        ]
        for way, found in row["counts"].items():
            fp16 = f"{found['layers_with_fp16_results']} of {found['layers']}" if way == "fp16_safe" else ""
            lines.append(
                f"| {way} | {found['kernels']} | {found['kernels_beyond_fp16']:+} | {found['bytes_to_fp16']} | {found['reads']} | {fp16} |"
            )
        lines.append(f"bound by the host: {', '.join(row['bound_by_host']) or 'no card'}")
        lines += [
            f"{cpu}: " + ", ".join(f"{card} {value}" for card, value in of.items()) for cpu, of in row["beside"].items()
        ]
        for key in ("to_fp16", "on_device", "guard", "fp32_to_safe"):
            lines.append(f"{key}: " + ", ".join(f"{name} {value}" for name, value in row[key].items()))
    for part, found in result["measured"].items():
        lines.append(f"{part}, H200: " + ", ".join(f"{name} {values}" for name, values in found.items()))
    for key, held in result["targets"].items():
        lines.append(f"target {key}: {held['measured']} against {held['limit']} {'met' if held['met'] else 'MISSED'}")
    return "\n".join(lines)


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=LIMITS, help="only these")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    return reporting.told(conditions(args) | run_cost(args), args, as_text)


if __name__ == "__main__":
    sys.exit(main())
