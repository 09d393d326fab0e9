"""Single Linear layers on a GPU: torch's, ComfyUI's and ours, and kernels that could take the place of their parts."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from . import gpu_models

LAYERS = {
    "SDXL 640": (8192, 640, 5120),
    "SDXL 1280": (2048, 1280, 1280),
    "Flux": (4352, 3072, 12288),
    "Wan 14B": (32760, 5120, 13824),
    "host": (32, 256, 256),
}
"""Layer -> rows, inputs, outputs; in the last one arithmetic takes no time."""
FORMATS = {"fp8": ("float8_e4m3fn", "TensorCoreFP8E4M3Layout"), "int8": ("int8_tensorwise", "TensorWiseINT8Layout")}
WARM_UP, TIMES, CALLS, PROFILED = 5, 5, 20, 10


def ways_timed(layer: str, dry: bool) -> dict:
    """Measure each way to run a layer: microseconds of the device, without gaps, and of the host, or why it does not run."""
    import torch

    with torch.inference_mode():
        found = {way: _timed(call) for way, call in _ways(*LAYERS["host" if dry else layer]).items()}
    shown = [f"{way} {one.get('device_us', one.get('host_us', '-'))}" for way, one in found.items()]
    return {"ways": found, "said": ", ".join(shown)}


def _timed(call: Callable) -> dict:
    import torch

    try:
        for _ in range(WARM_UP):
            call()
        gpu_models.wait()
        host = []
        for _ in range(TIMES):
            start = time.thread_time()
            for _ in range(CALLS):
                call()
            host.append((time.thread_time() - start) / CALLS * 1e6)
            gpu_models.wait()
        found = {"host_us": round(min(host), 1)}
        if torch.cuda.is_available():
            taken = gpu_models.busy(lambda: [call() for _ in range(PROFILED)])
            found |= {
                "device_us": round(taken["busy_ms"] * 1e3 / PROFILED, 2),
                "kernels": taken["kernels"] / PROFILED,
            }
        return found
    except Exception as error:  # a kernel that this device or version lacks is a result too
        return {"problem": f"{type(error).__name__}: {error}"[:160]}


def _ways(rows: int, inputs: int, outputs: int) -> dict[str, Callable]:
    """What runs a layer, by name."""
    import torch
    import torch.nn.functional as F
    from comfy_kitchen.backends import cuda as kitchen
    from halfsafe.precision.arithmetic.products import wide_product

    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(rows, inputs, device=device).half()
    weight = (torch.randn(outputs, inputs, device=device) * inputs**-0.5).half()
    bias, wide = weight.new_zeros(outputs), torch.zeros(rows, outputs, device=device)
    scale, fp8, x8 = wide.new_ones(()), weight.to(torch.float8_e4m3fn), x.to(torch.float8_e4m3fn)
    codes, scales = torch.ones_like(weight, dtype=torch.int8), torch.full((outputs, 1), 0.01, device=device)
    group = 256 if inputs % 256 == 0 else 64
    scaled_mm = partial(torch._scaled_mm, x8, fp8.t(), out_dtype=torch.float16, bias=bias)
    of_rows = {"scale_a": wide.new_ones(rows, 1), "scale_b": wide.new_ones(1, outputs), "out_dtype": torch.bfloat16}

    def scale_in_two():
        return torch.linalg.vector_norm(x, float("inf"), dtype=torch.float32) * (1 / 448)

    def quantized_rows():
        size = x.abs().amax(1, keepdim=True).float() * (1 / 448)
        return (x / size).to(torch.float8_e4m3fn), size

    return {
        "fp16": lambda: F.linear(x, weight, bias),
        **{f"core {name}": partial(layer, x) for name, layer in _cores(fp8, codes, scale, scales, bias, group).items()},
        **{
            f"ours {name}": partial(run, x)
            for name, run in _ours(_cores(fp8, codes, scale, scales, bias, group)).items()
        },
        "part: fp8 unpacked": lambda: kitchen.dequantize_per_tensor_fp8(fp8, scale, torch.float16),
        "part: fp8 unpacked by torch": lambda: fp8.to(torch.float16),
        "part: addmm of fp8 data and a factor": lambda: torch.addmm(bias, x, fp8.to(x.dtype).t(), alpha=0.5),
        "part: scale in two": scale_in_two,
        "part: fp8 quantized": lambda: kitchen.quantize_per_tensor_fp8(x, scale, torch.float8_e4m3fn),
        "part: fp8 quantized by rows, inductor": torch.compile(quantized_rows, dynamic=False)
        if device == "cuda"
        else quantized_rows,
        "part: scaled_mm": lambda: scaled_mm(scale_a=scale, scale_b=scale),
        "part: scaled_mm, fast sums": lambda: scaled_mm(scale_a=scale, scale_b=scale, use_fast_accum=True),
        "part: scaled_mm, scales of rows": lambda: torch._scaled_mm(x8, fp8.t(), **of_rows),
        "part: int8 unpacked, rotated": lambda: kitchen.dequantize_int8_convrot_weight_dtype(codes, scales, group, 1),
        "part: int8 unpacked": lambda: kitchen.dequantize_int8_simple_dtype(codes, scales, 1),
        "part: int8_linear": lambda: kitchen.int8_linear(x, codes, scales, bias, x.dtype, False, 256),
        "part: int8_linear, rotated": lambda: kitchen.int8_linear(x, codes, scales, bias, x.dtype, True, group),
        "part: int8 quantized": lambda: kitchen.quantize_int8_rowwise(x),
        "part: _int_mm": lambda: torch._int_mm(codes[: max(rows, 32)], codes.t()),
        "part: _weight_int8pack_mm": lambda: torch._weight_int8pack_mm(x.bfloat16(), codes, scales[:, 0].bfloat16()),
        "part: fp16 to fp32": lambda: wide_product(x, weight.t()),
        "part: fp32 plus fp16 bias": lambda: torch.add(bias, wide, alpha=1.0, out=wide),
    }


def _cores(fp8, codes, scale, scales, bias, group: int) -> dict[str, Callable]:
    """ComfyUI's own Linear over fp8 and int8 weights, multiplied as stored and unpacked."""
    import comfy.ops
    import comfy.quant_ops
    import torch
    from comfy_kitchen.tensor import QuantizedTensor

    outputs, inputs = fp8.shape
    half = bias.dtype

    def layer(stored: str, unpacks: bool) -> torch.nn.Module:
        module = comfy.ops.mixed_precision_ops(compute_dtype=half).Linear(inputs, outputs, device=fp8.device)
        module.quant_format, module.layout_type = FORMATS[stored]
        parameters = comfy.quant_ops.get_layout_class(module.layout_type).Params
        settings = {"scale": scale, "orig_dtype": half, "orig_shape": (outputs, inputs)}
        if stored == "int8":
            settings |= {"scale": scales, "convrot": True, "convrot_groupsize": group}
        data = QuantizedTensor(fp8 if stored == "fp8" else codes, module.layout_type, parameters(**settings))
        module._parameters["weight"] = torch.nn.Parameter(data, requires_grad=False)
        module._parameters["bias"] = torch.nn.Parameter(bias, requires_grad=False)
        module._full_precision_mm = unpacks
        return module

    return {
        "fp8 unpacked": layer("fp8", True),
        "fp8 products": layer("fp8", False),
        "int8 unpacked": layer("int8", True),
        "int8 products": layer("int8", False),
    }


def _ours(cores: dict) -> dict[str, Callable]:
    """The forwards that Halfsafe puts on such layers."""
    from halfsafe.nodes.host.comfyui.weights import Bound
    from halfsafe.nodes.host.compute.bound import Fp8Linear, Int8Linear

    kinds = {"fp8 products": Fp8Linear, "int8 products": Int8Linear}
    return {name: kinds.get(name, Bound)(layer) for name, layer in cores.items()}
