"""Host time of a model call: CPU time of the thread in each setting against ComfyUI's own fp16, in the same process.

Toys of real structure (SDXL with 70 transformer blocks, Flux with 19 and 38, Wan with 40), narrow, and every product, convolution and attention
replaced by a constant of the right shape, so that arithmetic costs nothing and what is left is Python. A GPU that waits for the host waits
for this. "ready": weights lie in fp16 as they are multiplied; "cast": in bf16, cast in each call as under dynamic VRAM. "gap": from the last product of a call to the first of the next, while a GPU has nothing to do. Ratios of medians of pairs.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from . import reporting
from .host import conditions, load_comfy

SETTINGS = {
    "auto": ("as_file", "auto", False),
    "auto, guard": ("as_file", "auto", True),
    "fp16_safe": ("as_file", "fp16_safe", False),
    "fp16_safe, guard": ("as_file", "fp16_safe", True),
}
TARGETS = {"auto": 1.02, "auto, guard": 1.05, "fp16_safe": 1.25, "fp16_safe, guard": 1.28}
GAP_MS = 1.0
DTYPES = {"ready": "float16", "cast": "bfloat16"}
CALLS, PAIRS = 5, 9


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--models", nargs="+", default=("Wan", "Flux", "SDXL"))
    args = parser.parse_args()
    comfy = load_comfy(args, more=("--use-pytorch-cross-attention",))
    import torch

    torch.set_num_threads(1)
    rows = [row for name in args.models for weights in DTYPES for row in _rows(comfy, name, weights)]
    targets = {f"{row['model']}, {row['setting']}": reporting.target(row["to_core"], TARGETS[row["setting"]]) for row in rows if row["weights"] == "cast"}
    targets |= {f"{row['model']}, {row['setting']}, gap": reporting.target(row["gap_above_core_ms"], GAP_MS) for row in rows if row["weights"] == "cast"}
    return reporting.told(conditions(args) | {"benchmark": "host_time", "rows": rows, "targets": targets}, args, as_text)


def _rows(comfy, name: str, weights: str) -> Iterator[dict]:
    import torch
    from support import families

    dtype = getattr(torch, DTYPES[weights])
    family, path = write(comfy, name, dtype)
    core = families.stock(path, dtype)
    core.set_model_compute_dtype(torch.float16)
    call = families.capture(core, family)
    layers = sum(hasattr(module, "weight") and module.weight is not None for module in core.model.diffusion_model.modules())
    for setting, (storage, compute, guard) in SETTINGS.items():
        with as_nvidia():
            model = families.load(comfy, path, storage, compute)
            if guard:
                model = comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
            ours, theirs = _prepared(model, call), _prepared(core, call)
            with stubbed() as clock:
                taken = [(_timed(theirs, clock), _timed(ours, clock)) for _ in range(PAIRS)]
        ratio = statistics.median(b[0] / a[0] for a, b in taken)
        seconds = statistics.median(b[0] for _, b in taken)
        row = {"model": name, "weights": weights, "setting": setting, "ms": round(1e3 * seconds, 2), "to_core": round(ratio, 3)}
        above = statistics.median(b[1] - a[1] for a, b in taken)
        row |= {"us_a_layer": round(1e6 * (seconds - statistics.median(a[0] for a, _ in taken)) / layers, 1), "gap_above_core_ms": round(1e3 * above, 2)}
        print(row, file=sys.stderr, flush=True)
        yield row


def write(comfy, name: str, dtype) -> tuple[str, object]:
    """Write a narrow model with the real number of blocks; return its family and path."""
    import torch
    from comfy.ops import disable_weight_init
    from safetensors.torch import save_file
    from support import tiny_models

    from .large_models import _flux

    path = comfy.folder / f"{name}.safetensors"
    if name == "Wan":
        return "wan", tiny_models.wan(path, dim=128, blocks=40, ffn=256, dtype=dtype)
    if name == "SDXL":
        levels = {"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10}
        inner = tiny_models._unet(tiny_models.sdxl_unet_config() | levels)
    else:
        inner = _flux(hidden=256, double=19, single=38)(device="meta", dtype=torch.float16, operations=disable_weight_init)[0]
    tensors = {key: torch.full(value.shape, 1e-3, dtype=dtype) for key, value in inner.state_dict().items()}
    save_file(tensors, str(path))
    return name.lower(), path


@contextlib.contextmanager
def as_nvidia() -> Iterator[None]:
    """Decide as on an NVIDIA card: on a CPU ``auto`` is fp32."""
    os.environ["HALFSAFE_DEVICE_PROFILE"] = "sm_86"
    try:
        yield
    finally:
        del os.environ["HALFSAFE_DEVICE_PROFILE"]


def _prepared(model, call) -> Callable[[], object]:
    """Load a model, make the calls that measure, and return a clean call of it."""
    from comfy.model_management import load_models_gpu
    from support import families

    load_models_gpu([model])
    model.pre_run()
    x = call.args[0]
    families.apply(model, call, x)
    families.apply(model, call, x)
    return lambda: families.apply(model, call, x)


def _timed(run: Callable[[], object], clock: list[float]) -> tuple[float, float]:
    """Return CPU seconds of a call, and of its part before the first and after the last product."""
    seconds, gaps = [], []
    for _ in range(CALLS):
        clock.clear()
        start = time.thread_time()
        run()
        end = time.thread_time()
        seconds.append(end - start)
        gaps.append(clock[0] - start + end - clock[-1])
    return min(seconds), min(gaps)


@contextlib.contextmanager
def stubbed() -> Iterator[list[float]]:
    """Replace torch's products by constants of their shape; yield the times at which they were asked for."""
    import torch
    import torch.nn.functional as F

    clock: list[float] = []

    def constant(shape: tuple, dtype) -> torch.Tensor:
        clock.append(time.thread_time())
        return torch.full(shape, 0.01, dtype=dtype)

    def linear(x, weight, bias=None):
        return constant((*x.shape[:-1], weight.shape[0]), x.dtype)

    def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        steps, around = (value if isinstance(value, tuple) else (value, value) for value in (stride, padding))
        size = [(x.shape[2 + i] + 2 * around[i] - weight.shape[2 + i]) // steps[i] + 1 for i in range(2)]
        return constant((x.shape[0], weight.shape[0], *size), x.dtype)

    def attention(q, k, v, *args, **kwargs):
        return constant((*q.shape[:-1], v.shape[-1]), q.dtype)

    stubs = {(F, "linear"): linear, (F, "conv2d"): conv2d, (F, "scaled_dot_product_attention"): attention}
    stubs[torch, "mm"] = lambda x, y, out_dtype=None: constant((x.shape[0], y.shape[1]), out_dtype or x.dtype)
    before = {place: getattr(*place) for place in stubs}
    try:
        for (module, name), stub in stubs.items():
            setattr(module, name, stub)
        yield clock
    finally:
        for (module, name), original in before.items():
            setattr(module, name, original)


def as_text(result: dict) -> str:
    """Write the rows as a table."""
    lines = ["| model | weights | setting | ms | to core | us a layer | gap above core's, ms |", "|---|---|---|---|---|---|---|"]
    keys = ("model", "weights", "setting", "ms", "to_core", "us_a_layer", "gap_above_core_ms")
    return "\n".join([*lines, *("| " + " | ".join(str(row[key]) for key in keys) + " |" for row in result["rows"])])


if __name__ == "__main__":
    sys.exit(main())
