"""Constants of the cost model (cost_cards.py) as a GPU has them: each kernel of a layer at the shapes of four."""

from __future__ import annotations

import time
from collections.abc import Callable

SHAPES = {
    "SDXL": (8192, 640, 5120),
    "Flux": (4352, 3072, 12288),
    "Wan 1.3B": (32760, 1536, 8960),
    "Wan 14B": (32760, 5120, 13824),
}
"""Layer -> rows, inputs and outputs of its matmul."""
TIMES = 20


def constants(dry: bool) -> dict:
    """Measure each kernel at each shape: microseconds, and TFLOPS of a product or GB/s of any other; or why it does not run."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {"small": (64, 64, 128)} if dry else SHAPES
    found: dict[str, dict] = {}
    with torch.inference_mode():
        for name, (rows, inputs, outputs) in shapes.items():
            flops = 2 * rows * inputs * outputs
            for kernel, (run, moved) in _kernels(rows, inputs, outputs, device).items():
                found.setdefault(kernel, {})[name] = _measured(run, flops if moved is None else None, moved)
    return {"kernels": found}


def _kernels(rows: int, inputs: int, outputs: int, device: str) -> dict[str, tuple[Callable, int | None]]:
    """Kernel -> what runs it, and the bytes that it moves; None for a product."""
    import torch
    from halfsafe.precision.arithmetic.products import wide_product
    from halfsafe.precision.devices.probes import scaled_mm

    x, weight = torch.randn(rows, inputs, device=device).half(), torch.randn(outputs, inputs, device=device).half()
    bias, wide = torch.zeros(outputs, device=device, dtype=torch.float16), torch.zeros(rows, outputs, device=device)
    fp8, number = weight.to(torch.float8_e4m3fn), torch.zeros(1, device=device)
    x8, one = x.to(torch.float8_e4m3fn), torch.ones((), device=device)
    codes = torch.ones(outputs, inputs, dtype=torch.int8, device=device)

    def int8_linear():
        import comfy_kitchen

        return comfy_kitchen.int8_linear(x, codes, one, out_dtype=torch.float16)

    def norm():
        torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32, out=number[0])

    return {
        "fp16 product": (lambda: torch.nn.functional.linear(x, weight), None),
        "fp16 product to fp32": (lambda: wide_product(x, weight.t()), None),
        "fp8 product": (lambda: scaled_mm(x8, fp8.t()), None),
        "int8 product": (int8_linear, None),
        "fp32 plus fp16 bias": (lambda: torch.add(bias, wide, alpha=1.0, out=wide), 8 * wide.numel()),
        "fp32 to fp16": (lambda: wide.half(), 6 * wide.numel()),
        "infinity norm": (norm, 2 * x.numel()),
        "fp8 unpacked": (lambda: fp8.to(torch.float16).mul_(one), 7 * fp8.numel()),
    }


def _measured(run: Callable, flops: int | None, moved: int | None) -> dict:
    import torch

    try:
        run()
    except (RuntimeError, NotImplementedError, TypeError, ImportError) as error:
        return {"problem": f"{type(error).__name__}: {error}"[:200]}
    seconds = _seconds(run) if torch.cuda.is_available() else _seconds_of_a_cpu(run)
    rate = (
        {"tflops": round(flops / seconds / 1e12, 2)}
        if flops is not None
        else {"gb_per_second": round(moved / seconds / 1e9, 1)}
    )
    return {"microseconds": round(1e6 * seconds, 1), **rate}


def _seconds(run: Callable) -> float:
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(TIMES):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / TIMES


def _seconds_of_a_cpu(run: Callable) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
