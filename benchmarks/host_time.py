"""Host time of a model call: CPU time of the thread in each setting against ComfyUI's own call, in the same process.

Toys of real structure (SDXL with 70 transformer blocks, Flux with 19 and 38, Wan with 40), narrow, and every product, convolution and attention
replaced by a constant of the right shape, and the operand of each look by one number, so that what is left is Python; layers multiply as on CUDA, and calls are those of one run of a sampler. A GPU that waits for the host waits for this.
"ready": weights lie in fp16 as they are multiplied, as without dynamic VRAM; "dynamic VRAM, resident": the same weights as NVIDIA's users have them by
default, comfy-aimdo's own calls stubbed; "dynamic VRAM, streamed": copied from pinned memory in each call, as where VRAM is short; "cast": in bf16, cast to
fp16 in each call; "fp8": stored in fp8, beside ComfyUI's own run of the same weights and scales; "fp8 products" and "int8" multiply as stored, "int8 unpacked" as fp8; "with LoRA": one of rank 16 beside each
quantized layer. The 8-bit ones are also compared
with ComfyUI's call of the same model in fp16, whose weights lie alike (``functions_to_fp16``). comfy-kitchen's kernels run their own functions of Python, without the calls into its CUDA library; ``kitchen`` counts these. On a GPU there are more: the stream
is looked up, and ComfyUI's own call asks for the current device at each export of a tensor. "gap": what a GPU waits for between two calls: from where the host has waited for a call, or from
its last product where nothing waits, to the first product of the next.
Ratios of medians of pairs; functions of Python are counted, which no other work on the machine disturbs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from unittest import mock

from . import reporting
from .host import conditions, load_comfy

WEIGHTS = {
    "ready": ("as_file", "float16", "auto"),
    "dynamic VRAM, resident": ("as_file", "float16", "auto"),
    "dynamic VRAM, streamed": ("as_file", "float16", "auto"),
    "cast": ("as_file", "bfloat16", "fp16"),
    "fp8": ("fp8_e4m3fn", "float16", "fp16"),
    "fp8, dynamic VRAM, resident": ("fp8_e4m3fn", "float16", "fp16"),
    "fp8 products": ("fp8_e4m3fn", "float16", "fp8"),
    "fp8 products, dynamic VRAM, resident": ("fp8_e4m3fn", "float16", "fp8"),
    "int8": ("int8", "float16", "int8"),
    "int8, dynamic VRAM, resident": ("int8", "float16", "int8"),
    "int8 unpacked": ("int8", "float16", "fp16"),
    "int8 unpacked, dynamic VRAM, resident": ("int8", "float16", "fp16"),
    "fp8 with LoRA": ("fp8_e4m3fn", "float16", "fp16"),
    "int8 with LoRA": ("int8", "float16", "int8"),
    "int8 with LoRA, dynamic VRAM, resident": ("int8", "float16", "int8"),
    "int8 with LoRA, dynamic VRAM, streamed": ("int8", "float16", "int8"),
}
"""How weights lie -> the storage asked for, the file's dtype, and the compute that is ComfyUI's own there."""
TO_FP16 = {
    "fp8": 1.35,
    "fp8 products": 1.5,
    "int8": 1.6,
    "int8 unpacked": 1.3,
    "fp8 with LoRA": 2.0,
    "int8 with LoRA": 2.0,
}
"""Most functions of Python of a quantized model in its plain setting for one of ComfyUI's own in fp16, by how weights are stored."""
TARGETS = {"plain": 1.02, "plain, guard": 1.05, "fp16_safe": 1.25, "fp16_safe, guard": 1.28}
FUNCTIONS = {"plain": 1.02, "plain, guard": 1.03, "fp16_safe": 1.12, "fp16_safe, guard": 1.14}
"""Most functions of Python for one of ComfyUI's, under dynamic VRAM."""
GAP_MS = 1.0
CALLS, PAIRS = 3, 9


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--models", nargs="+", default=("Wan", "Flux", "SDXL"))
    parser.add_argument("--weights", nargs="+", default=tuple(WEIGHTS))
    parser.add_argument("--settings", nargs="+", default=tuple(TARGETS))
    parser.add_argument("--count", action="store_true", help="count functions and take no time")
    args = parser.parse_args()
    comfy = load_comfy(args, more=("--use-pytorch-cross-attention",))
    import torch
    from support.tiny_models import small_sizes

    torch.set_num_threads(1)
    with small_sizes():
        rows = [row for name in args.models for weights in args.weights for row in _rows(comfy, name, weights, args)]
    named = {", ".join(row[key] for key in ("model", "weights", "setting")): row for row in rows}
    targets = {}
    for name, row in named.items():
        if "functions_to_fp16" in row and row["setting"] == "plain":
            targets[f"{name}, functions to fp16"] = reporting.target(
                row["functions_to_fp16"], TO_FP16[row["weights"].partition(", ")[0]]
            )
        if row["weights"].startswith("dynamic VRAM"):
            targets[f"{name}, functions"] = reporting.target(row["functions_to_core"], FUNCTIONS[row["setting"]])
        if "ms" in row:
            targets[name] = reporting.target(row["to_core"], TARGETS[row["setting"]])
            targets[f"{name}, gap"] = reporting.target(row["gap_above_core_ms"], GAP_MS)
    return reporting.told(
        conditions(args)
        | {"benchmark": "host_functions" if args.count else "host_time", "rows": rows, "targets": targets},
        args,
        as_text,
    )


def _rows(comfy, name: str, weights: str, args) -> Iterator[dict]:
    from support.measures import functions_run

    stored, _, way = weights.partition(", ")
    # Decided as on an NVIDIA card: on a CPU ``auto`` is fp32. fp8 products need one that has them.
    os.environ["HALFSAFE_DEVICE_PROFILE"] = "sm_89" if stored == "fp8 products" else "sm_86"
    core, call, load = loaded(comfy, name, weights)
    of_fp16 = _functions_in_fp16(comfy, name, way or "ready") if stored in TO_FP16 else None
    for setting in args.settings:
        row = {"model": name, "weights": weights, "setting": setting, "file": WEIGHTS[weights][1]}
        with side_by_side(core, load(setting), call, weights) as (theirs, ours, clock):
            if not args.count:
                row |= _times(theirs, ours, clock, "fp16_safe" not in setting)
            of_core, count = (functions_run(run)["call"] for run in (theirs, ours))
            row |= {"functions": count, "functions_to_core": round(count / of_core, 3), "kitchen": in_kitchen(ours)}
        if of_fp16:
            row["functions_to_fp16"] = round(count / of_fp16, 3)
        print(row, file=sys.stderr, flush=True)
        yield row


def in_kitchen(run: Callable[[], object]) -> int:
    """Count the functions of Python of comfy-kitchen in a piece of work, and those that they call."""
    import comfy_kitchen

    folder = os.path.dirname(comfy_kitchen.__file__)
    outermost, count = [], 0

    def note(frame, event: str, _) -> None:
        nonlocal count
        if event == "call":
            if not outermost and frame.f_code.co_filename.startswith(folder):
                outermost.append(frame)
            count += bool(outermost)
        elif event == "return" and outermost and frame is outermost[0]:
            outermost.clear()

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


def _functions_in_fp16(comfy, name: str, weights: str) -> int:
    """Count the functions of ComfyUI's own call of a model in fp16."""
    from support.measures import functions_run

    core, call, load = loaded(comfy, name, weights)
    with side_by_side(core, load("plain"), call, weights) as (theirs, _, _):
        return functions_run(theirs)["call"]


def _times(theirs: Callable, ours: Callable, clock: list[float], hides: bool) -> dict[str, float]:
    """Time two calls in turns; what they take and how they stand to each other."""
    from halfsafe.nodes.host.guard.clamps import hiding_is_seen

    taken = [(_timed(theirs, clock), _timed(ours, clock, hiding_is_seen if hides else None)) for _ in range(PAIRS)]
    seconds, of_core = (statistics.median(pair[i][0] for pair in taken) for i in (1, 0))
    row = {
        "ms": round(1e3 * seconds, 2),
        "core_ms": round(1e3 * of_core, 2),
        "to_core": round(statistics.median(b[0] / a[0] for a, b in taken), 3),
    }
    return row | {"gap_above_core_ms": round(1e3 * statistics.median(b[1] - a[1] for a, b in taken), 2)}


def loaded(comfy, name: str, weights: str) -> tuple:
    """Load a model as ComfyUI does; return it, a call of it, and what loads it in a setting of the pack."""
    import torch
    from support import families

    storage, dtype, plain = WEIGHTS[weights]
    family, path = write(comfy, name, getattr(torch, dtype))
    quantized = storage != "as_file"
    core = cores_own(scaled(comfy, path, storage) if quantized else path, None if quantized else getattr(torch, dtype))

    def load(setting: str):
        model = families.load(comfy, path, storage, "fp16_safe" if "fp16_safe" in setting else plain)
        model = with_lora(model) if "LoRA" in weights else model
        return (
            comfy.run("HalfsafeNaNGuard", model=model, on_nan="retry_higher", max_retries=8)[0]
            if "guard" in setting
            else model
        )

    return core, families.capture(core, family), load


def with_lora(model):
    """Add a LoRA of rank 16 to each quantized layer of a model."""
    from comfy.quant_ops import QuantizedTensor
    from comfy.sd import load_lora_for_models
    from support.model_files import lora

    named = model.model.diffusion_model.named_modules()
    shapes = {
        name: tuple(module.weight.shape)
        for name, module in named
        if isinstance(getattr(module, "weight", None), QuantizedTensor)
    }
    return load_lora_for_models(model, None, lora(shapes, rank=16), 1.0, 0.0)[0]


@contextlib.contextmanager
def side_by_side(core, model, call, weights: str) -> Iterator[tuple]:
    """Yield a clean call of each of two models, whose weights lie as asked for, and the clock of both."""
    from comfy.model_management import load_models_gpu
    from support.dynamic_vram import aimdo_stubbed

    load_models_gpu([core, model])
    state = weights.partition("dynamic VRAM, ")[2]
    with as_on_cuda(), aimdo_stubbed(core, model, state=state) if state else contextlib.nullcontext():
        theirs, ours = prepared(core, call), prepared(model, call)
        with stubbed() as clock:
            yield theirs, ours, clock


def write(comfy, name: str, dtype) -> tuple[str, object]:
    """Write a narrow model with the real number of blocks; return its family and path."""
    from comfy.ldm.flux.model import Flux
    from support import tiny_models as tiny

    path = comfy.folder / f"{name}.safetensors"
    if name == "Wan":
        return "wan", tiny.wan(path, dim=128, blocks=40, ffn=256, dtype=dtype)
    if name == "Flux":
        config = dict(
            in_channels=16,
            out_channels=16,
            vec_in_dim=768,
            context_in_dim=4096,
            hidden_size=128,
            mlp_ratio=4.0,
            num_heads=1,
            depth=19,
        )
        config |= dict(
            depth_single_blocks=38,
            axes_dim=[16, 56, 56],
            theta=10000,
            patch_size=2,
            qkv_bias=True,
            guidance_embed=True,
            txt_ids_dims=[],
        )
        return "flux", tiny.write_shapes(path, tiny.shapes_of(tiny.on_meta(Flux, **config)), dtype, 0)
    sizes = {"model_channels": 64}
    metadata = tiny.sized(sizes, {"model_channels": 320})
    return "sdxl", tiny.write_shapes(path, sdxl_shapes(**sizes), dtype, 0, metadata=metadata)


def sdxl_shapes(model_channels: int = 320) -> dict[str, tuple[int, ...]]:
    """Return the shapes of SDXL's weights. A fifth of its width, 64, gives each layer the rotation group of its int8 weight."""
    from support import tiny_models as tiny

    config = tiny.sdxl_unet_config() | {"model_channels": model_channels, "channel_mult": [1, 2, 4]}
    config |= {"transformer_depth_output": [0, 0, 0, 2, 2, 2, 10, 10, 10], "transformer_depth_middle": 10}
    return tiny.shapes_of(tiny.unet(config))


def scaled(comfy, path, storage="fp8_e4m3fn"):
    """Write a model's quantized weights and scales as ComfyUI itself saves them."""
    from safetensors import safe_open
    from safetensors.torch import save_file
    from support import families

    weights = families.load(comfy, path, storage, "fp16").model.diffusion_model.state_dict()
    target = path.with_name(f"scaled_{path.name}")
    with safe_open(str(path), "pt") as file:
        save_file({name: weight.contiguous() for name, weight in weights.items()}, target, file.metadata())
    return target


def cores_own(path, dtype):
    """Load a file as ComfyUI does on a device that multiplies in fp16."""
    import comfy.sd
    import torch
    from comfy import model_management

    with mock.patch.object(model_management, "should_use_fp16", lambda *args, **kwargs: True):
        model = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype})
    if dtype != torch.float16:
        model.set_model_compute_dtype(torch.float16)
    return model


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Multiply as on CUDA: wide matrix products alone have fp32 results, and none is made of fp32 operands; comfy-kitchen's kernels are those of its CUDA backend."""
    import torch
    from comfy_kitchen.backends import cuda
    from halfsafe.nodes.host.comfyui import kernels
    from halfsafe.precision.arithmetic import linear

    plain = torch.mm
    copies, bound = (functools.cache(each.__wrapped__) for each in (kernels._copies, kernels._exporting_in_c))
    ours = mock.Mock(wraps=kernels.registry, get_implementation=lambda name, kwargs=None: getattr(cuda, name))
    with (
        mock.patch.multiple(kernels, registry=ours, _unpacking={}, _exporting_in_c=bound, _copies=copies),
        mock.patch.multiple(
            cuda,
            _C=_library(cuda),
            torch=_torch_without_cuda(),
            _turing_device_cache={-1: False},
            _cuda_device_supports_cutlass_int8_dequant=lambda tensor: True,
        ),
        mock.patch.object(linear, "has_wide_output", lambda device, kind: kind == "linear"),
        mock.patch.object(linear, "is_emulated", lambda device: False),
        mock.patch.object(torch, "mm", lambda x, y, out_dtype=None: plain(x.to(out_dtype), y.to(out_dtype))),
    ):
        yield


def _library(backend) -> types.SimpleNamespace:
    """Return functions of C that do nothing and return something true, by the names of comfy-kitchen's CUDA library."""
    return types.SimpleNamespace(
        **dict.fromkeys(re.findall(r"\b_C\.(\w+)\(", inspect.getsource(backend)), "done".format)
    )


def _torch_without_cuda() -> types.ModuleType:
    """Return torch with streams that are one object, and tensors of zeros in place of memory that no kernel fills."""
    import torch

    stream = types.SimpleNamespace(cuda_stream=0)
    changed = types.ModuleType("torch")
    vars(changed).update(vars(torch))
    changed.cuda = types.SimpleNamespace(current_stream=lambda device: stream)
    changed.empty, changed.empty_like = torch.zeros, torch.zeros_like
    return changed


def prepared(model, call) -> Callable[[], object]:
    """Make the calls of a loaded model that measure, and return a clean call of it."""
    from support import families

    model.pre_run()
    x = call.args[0]
    families.apply(model, call, x)
    families.apply(model, call, x)
    return lambda: families.apply(model, call, x)


def _timed(run: Callable[[], object], clock: list[float], in_a_run=None) -> tuple[float, float]:
    """Return CPU seconds of a call, and of its part before the first product and after the wait for the last."""
    seconds, gaps = [], []
    with in_a_run or contextlib.nullcontext():
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
    """Replace torch's products by constants of their shape; yield the times at which they were asked for and waited for."""
    import torch
    import torch.nn.functional as F

    clock: list[float] = []
    read, waits = torch.Tensor.tolist, []

    def constant(shape: tuple, dtype) -> torch.Tensor:
        waits.clear()
        clock.append(time.thread_time())
        return torch.full(shape, 0.01, dtype=dtype)

    def tolist(tensor):
        found = read(tensor)
        if clock and not waits:
            waits.append(tensor)
            clock.append(time.thread_time())
        return found

    def linear(x, weight, bias=None):
        if type(weight) not in (torch.Tensor, torch.nn.Parameter):
            weight.dequantize()
        return constant((*x.shape[:-1], weight.shape[0]), x.dtype)

    def conv2d(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        steps, around = (value if isinstance(value, tuple) else (value, value) for value in (stride, padding))
        size = [(x.shape[2 + i] + 2 * around[i] - weight.shape[2 + i]) // steps[i] + 1 for i in range(2)]
        return constant((x.shape[0], weight.shape[0], *size), x.dtype)

    def attention(q, k, v, *args, **kwargs):
        return constant((*q.shape[:-1], v.shape[-1]), q.dtype)

    stubs = {(F, "linear"): linear, (F, "conv2d"): conv2d, (F, "scaled_dot_product_attention"): attention}
    stubs[torch, "_scaled_mm"] = lambda x, y, out_dtype, **how: constant((x.shape[0], y.shape[1]), out_dtype)
    stubs[torch, "mm"] = lambda x, y, out_dtype=None: constant((x.shape[0], y.shape[1]), out_dtype or x.dtype)
    stubs[torch.Tensor, "tolist"] = tolist
    norm, numbers = torch.linalg.vector_norm, {}

    def norm_of_one(x, *args, **kwargs):
        if (key := (x.shape, x.dtype)) not in numbers:
            numbers[key] = x.abs().amax().reshape(1)
        return norm(numbers[key], *args, **kwargs)

    stubs[torch.linalg, "vector_norm"] = norm_of_one
    with contextlib.ExitStack() as undo:
        for place, stub in stubs.items():
            undo.enter_context(mock.patch.object(*place, stub))
        yield clock


def as_text(result: dict) -> str:
    """Write the rows as a table."""
    keys = list(dict.fromkeys(key for row in result["rows"] for key in row))
    lines = ["| " + " | ".join(keys).replace("_", " ") + " |", "|---" * len(keys) + "|"]
    return "\n".join(
        [*lines, *("| " + " | ".join(str(row.get(key, "")) for key in keys) + " |" for row in result["rows"])]
    )


if __name__ == "__main__":
    sys.exit(main())
