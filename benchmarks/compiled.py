"""What torch.compile makes of `fp16_safe` beside plain fp16, counted on fake CUDA tensors at the shapes of large models.

`python -m benchmarks compiled --comfyui DIR [--json] [--save] [--models NAME ...]`; no GPU, no weights. Counted: the kernels
of one call of ComfyUI's own model in one graph as inductor schedules them for an H100, products included, and the bytes
that they move, beside those of eager code. The counted state is a clean model's, of two blocks of each kind.
"""

from __future__ import annotations

import argparse
import re
import sys

from . import reporting
from .cost import LIMITS, WAYS, _as_loaded, _base_model, _count, _executed, _moved
from .host import conditions, load_comfy
from .large_models import BUILD

MODELS = tuple(name for name in LIMITS if name != "SDXL")
COMPARED = WAYS[:2]


def run_compiled(args: argparse.Namespace) -> dict:
    """Kernels and bytes of each model and arithmetic, eager and compiled."""
    load_comfy(args)
    rows = {name: {way: _row(name, way) for way in COMPARED} for name in args.models or MODELS}
    return {"benchmark": "compiled", "models": rows, "targets": {name: _target(row) for name, row in rows.items()}}


def _target(row: dict) -> dict:
    """What `fp16_safe` moves beyond fp16, to the same in eager code."""
    extra = {kind: row["fp16_safe"][kind]["bytes"] - row["fp16"][kind]["bytes"] for kind in ("compiled", "eager")}
    return reporting.target(round(extra["compiled"] / extra["eager"], 3), 1.0)


def _row(name: str, way: str) -> dict:
    eager = _count(way, BUILD[name])
    print(name, way, file=sys.stderr, flush=True)
    (graph,) = _graphs(name, way)
    compiled = {"kernels": graph.written + graph.products, "written": graph.written, "bytes": graph.bytes}
    return {"eager": {"kernels": len(eager.kernels), "bytes": _moved(eager.kernels)}, "compiled": compiled}


def _graphs(name: str, way: str) -> list:
    """The graphs of the second call: the first one calibrates."""
    import torch
    from comfy_extras.nodes_torch_compile import skip_torch_compile_dict
    from support.fake_cuda import AnsweredReads, attention_of_a_gpu
    from support.inductor_kernels import Inductor
    from torch._subclasses.fake_tensor import FakeTensorMode

    dtype = torch.float32 if way == "fp16_safe" else torch.float16
    inductor = Inductor()
    with FakeTensorMode(allow_non_fake_inputs=True), attention_of_a_gpu(), AnsweredReads(1.0), torch.no_grad():
        import comfy.ops

        with torch.device("cuda"):
            inner, x, given = BUILD[name](device="cuda", dtype=torch.float16, operations=comfy.ops.manual_cast)
        if way == "fp16_safe":
            _as_loaded(inner)
        run = _executed(_base_model(inner), way)
        given = {key: value.to(dtype) for key, value in given.items()}
        call = x.to(dtype), torch.empty(x.shape[0], device="cuda")
        if run.wrapper is not None:
            run(*call, **given)
        torch._dynamo.reset()
        re.purge()  # torch traces through it only where the pattern is in its cache
        run.forward = torch.compile(inner, backend=inductor.backend, options={"guard_filter_fn": skip_torch_compile_dict})
        run(*call, **given)
    return inductor.graphs


def as_text(result: dict) -> str:
    """A table of kernels and bytes, then the targets."""
    lines = ["| model | eager: fp16, fp16_safe | compiled | bytes to fp16's: eager | compiled |", "|---|---|---|---|---|"]
    for name, row in result["models"].items():
        plain, safe = (row[way] for way in COMPARED)
        kernels = [f"{plain[kind]['kernels']}, {safe[kind]['kernels']}" for kind in ("eager", "compiled")]
        moved = [f"{safe[kind]['bytes'] / plain[kind]['bytes']:.2f}" for kind in ("eager", "compiled")]
        lines.append(f"| {' | '.join([name, *kernels, *moved])} |")
    for name, held in result["targets"].items():
        lines.append(f"target {name}: bytes beyond fp16's, compiled to eager: {held['measured']} against {held['limit']}")
    return "\n".join(lines)


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--models", nargs="*", choices=LIMITS, help="only these")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    return reporting.told(conditions(args) | run_compiled(args), args, as_text)


if __name__ == "__main__":
    sys.exit(main())
