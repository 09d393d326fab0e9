"""Single Linear layers of real models on a GPU: time and kernels beside plain fp16. See gpu.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from .clock import kernels, timed

# Tokens, inputs and outputs: a video of 81 frames at 480p, a picture of 1024 x 1024.
LAYERS = {
    "Wan 14B attention": (32760, 5120, 5120),
    "Wan 14B feed forward": (32760, 5120, 13824),
    "Wan 1.3B attention": (32760, 1536, 1536),
    "Wan 1.3B attention, one frame": (1024, 1536, 1536),
    "Flux attention": (4608, 3072, 3072),
    "Flux feed forward": (4608, 3072, 12288),
    "SDXL 640": (4096, 640, 640),
    "SDXL 1280": (1024, 1280, 1280),
}
LOUD = 1e6
PAIRS = 5


def layer_rows(dry: bool) -> Iterator[dict]:
    """For each layer: fp16 operands with an fp32 result, unscaled and scaled, beside the plain product."""
    for name, shape in ({"small": (64, 64, 64)} if dry else LAYERS).items():
        yield {"name": name, "shape": shape} | _row(*shape)


def _row(tokens: int, inputs: int, outputs: int) -> dict:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    layer = torch.nn.Linear(inputs, outputs, device=device, dtype=torch.float16)
    x = torch.randn(tokens, inputs, device=device, generator=generator)
    half = x.half()
    with torch.inference_mode():
        sides = {"plain": lambda: layer(half), "safe": _safe(layer, x), "safe, scaled": _safe(layer, x * LOUD)}
        row = {"kernels": {name: kernels(side) for name, side in sides.items()}}
        return row | _times(sides)


def _safe(layer, x) -> Callable:
    """A call of a layer whose range was measured already."""
    from halfsafe.precision.arithmetic.calibration import Calibration
    from halfsafe.precision.arithmetic.linear import SafeOperation
    from support.plain_weights import plain_weights

    calibration = Calibration()
    operation = SafeOperation(layer, calibration.scale("layer"), calibration, plain_weights)
    calibration.run(lambda: operation(x))
    return lambda: calibration.run(lambda: operation(x))


def _times(sides: dict[str, Callable]) -> dict:
    taken: dict[str, list[dict]] = {name: [] for name in sides}
    for index in range(PAIRS):
        for name in sorted(sides, reverse=bool(index % 2)):
            taken[name].append(timed(sides[name]))
    clock = "device_seconds" if taken["plain"][0]["device_seconds"] is not None else "seconds"
    pairs = {name: [b[clock] / a[clock] for a, b in zip(taken["plain"], times, strict=True)] for name, times in taken.items()}
    return {
        "microseconds": {name: round(1e6 * statistics.median(one[clock] for one in times), 1) for name, times in taken.items()},
        "to_plain": {name: round(statistics.median(ratios), 3) for name, ratios in pairs.items()},
    }
