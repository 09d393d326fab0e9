"""Signal to noise ratio in dB of each storage and product over outputs of three trained models: `python -m benchmarks decibels`.

10 log10(sum exact^2 / sum (given - exact)^2), exact in fp32, over the whole output of one call of the model, and over the
output of each layer for the inputs of the exact call, as the mean and the worst of all layers. In each row the same layers
are rounded: those that the default preset stores in 8 bits. Weights are made by the pack's conversion and read by its
reader; the operands of products are rounded in the same way and multiplied in fp32 (`rounding.py`). `final`: of the latent
after eight steps. `loader`: of the same latent, with the pack's own loader, compute setting and kernels for a CPU.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from setup.environment import kitchen_folder, provide_kitchen

from . import reporting
from .host import conditions, load_comfy

if TYPE_CHECKING:
    from types import SimpleNamespace

    from .trained_models import TrainedModel

ROWS = (
    ("fp16", "fp16_safe"),
    ("fp16", "fp16"),
    ("fp16", "fp16 sums"),
    ("bf16", "bf16"),
    ("Q8_0", "unpacked"),
    ("int8", "unpacked"),
    ("int8", "bf16"),
    ("int8", "int8"),
    ("int8, not rotated", "unpacked"),
    ("int8, not rotated", "int8, not rotated"),
    ("fp8_e4m3fn", "unpacked"),
    ("fp8_e4m3fn", "bf16"),
    ("fp8_e4m3fn", "fp8_e4m3fn"),
    ("fp8_e4m3fn, no scale", "unpacked"),
    ("mxfp8", "unpacked"),
    ("mxfp8", "mxfp8"),
    ("fp8_e5m2", "unpacked"),
    ("fp8_e5m2", "fp8_e4m3fn"),
    ("w6a8", "unpacked"),
    ("w6a8", "int8"),
    ("w4a8", "unpacked"),
    ("w4a8", "int8"),
    ("nvfp4", "unpacked"),
    ("nvfp4", "nvfp4"),
)
"""Storage of the weights, and product."""
LOADED = ("fp16", "bf16", "int8", "fp8_e4m3fn", "fp8_e5m2", "mxfp8", "nvfp4")
"""Storages that the pinned ComfyUI holds."""
LAYER_COMPUTE = {"unpacked": "", "int8": "int8", "fp8_e4m3fn": "fp8"}
"""Product -> the compute setting of a rule for the layers of a model that the loader computes in fp32."""
WHOLE_COMPUTE = ("fp16_safe", "fp16", "bf16")
"""Products that the loader computes the whole model in."""
WITH_FP8 = "sm_89"
"""A device profile with fp8 products, which torch has on a CPU too, where the pack takes none."""
INT8_BEYOND_FP8 = 10.0
"""What the rule of storage assumes int8 to be nearer than fp8, both unpacked, over the whole output, mean of the models."""


def main() -> int:
    """Print the table, and save it where asked."""
    parser = reporting.parser(__doc__)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    # 6-bit weights came with comfy-kitchen 0.2.40; the pinned ComfyUI installs an earlier one.
    with contextlib.redirect_stdout(sys.stderr):
        sys.path.insert(0, str(provide_kitchen(Path(sys.executable))))
    host = load_comfy(args)
    import torch

    from . import trained_models

    torch.set_num_threads(1)
    models: dict[str, dict] = {}
    with torch.inference_mode():
        for make in (lambda: trained_models.shapes_model(host), trained_models.minilm, trained_models.terrain_unet):
            model = make()
            print(model.name, file=sys.stderr, flush=True)
            models[model.name] = of_model(model)
            if model.sample:
                exact = model.sample()
                add_loaded(host, models[model.name]["rows"], exact)
                models[model.name]["comfyui_cast_to_fp8"] = of_comfyuis_cast(host, exact)
    result = {"benchmark": "decibels", **conditions(args), "comfy_kitchen": kitchen_folder().name.rpartition("-")[2]}
    result["torch_threads"] = torch.get_num_threads()
    result["transformers"] = importlib.metadata.version("transformers")
    result |= {"models": models, "targets": targets(models)}
    return reporting.told(result, args, as_text)


def of_model(model: TrainedModel) -> dict:
    """Return what is measured of a model, and its figures by the title of the row."""
    from .rounding import Rounding, inputs_of, measured

    linears = stored_by_default(model)
    calls = {"call": model.call} | ({"final": model.sample} if model.sample else {})
    rows = measured(
        linears,
        calls,
        {title(*row): Rounding(*row) for row in ROWS},
        inputs_of(linears, model.call),
        progress=print_row,
    )
    parameters = sum(linear.weight.numel() for linear in linears.values())
    return {"about": model.about, "layers": len(linears), "parameters_of_layers": parameters, "rows": rows}


def print_row(name: str, figures: dict) -> None:
    print(f"  {name}: {in_db(figures['call'])}", file=sys.stderr, flush=True)


def title(storage: str, product: str) -> str:
    return f"{storage} / {product}"


def stored_by_default(model: TrainedModel) -> dict:
    """Return the layers of a model that the default preset stores in 8 bits."""
    from halfsafe.precision.plan.facts import LayerSpec
    from halfsafe.precision.plan.layers import plan_storage
    from halfsafe.precision.plan.rules import rules_from

    specs = [LayerSpec(name, "Linear", tuple(linear.weight.shape)) for name, linear in model.linears.items()]
    plans = plan_storage(specs, "int8", rules_from())
    return {name: linear for name, linear in model.linears.items() if plans[name].storage == "int8"}


def add_loaded(host: SimpleNamespace, rows: dict[str, dict], exact) -> None:
    """Add the final latent of the shapes model as the pack's own loader stores and computes it."""
    from halfsafe.precision.plan.presets import DEFAULT_PRESET
    from support import families

    from . import trained_models
    from .rounding import snr

    path = trained_models.shapes_file(host)
    for storage, product in ROWS:
        if storage in LOADED and product in (*LAYER_COMPUTE, *WHOLE_COMPUTE):
            wanted = LAYER_COMPUTE.get(product)
            rules = None
            if wanted:
                rules = host.run("HalfsafeLayerRules", rules=f"re:. compute={wanted}", preset=DEFAULT_PRESET)[0]
            with mock.patch.dict(os.environ, {"HALFSAFE_DEVICE_PROFILE": WITH_FP8} if wanted == "fp8" else {}):
                model = families.load(host, path, storage, "fp32" if wanted is not None else product, rules)
                given = trained_models.sampled(model, host)
            rows[title(storage, product)]["loader"] = round(snr(exact, given), 5)


def of_comfyuis_cast(host: SimpleNamespace, exact) -> float:
    """Return the dB of the final latent with ComfyUI's own loader and `weight_dtype` = `fp8_e4m3fn`, which casts all layers."""
    import torch
    from support import families

    from . import trained_models
    from .rounding import snr

    model = families.stock(trained_models.shapes_file(host), torch.float8_e4m3fn)
    return round(snr(exact, trained_models.sampled(model, host)), 5)


def targets(models: dict[str, dict]) -> dict[str, dict]:
    """Judge what the rule of storage assumes of int8 and fp8."""
    beyond = [
        model["rows"][title("int8", "unpacked")]["call"] - model["rows"][title("fp8_e4m3fn", "unpacked")]["call"]
        for model in models.values()
    ]
    mean = round(math.fsum(beyond) / len(beyond), 1)
    return {"int8_beyond_fp8_db": reporting.target(mean, INT8_BEYOND_FP8, at_least=True)}


def mean_of(rows: list[dict]) -> float | None:
    """Return the mean over the models of a row's whole outputs; None if one overflows."""
    outputs = [row["call"] for row in rows]
    return None if None in outputs else math.fsum(outputs) / len(outputs)


def in_db(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def cells(models: dict[str, dict], storage: str, product: str) -> list[str]:
    """Return a row's cells of the table: the mean of the models, then of each the whole output and its layers."""
    rows = [model["rows"][title(storage, product)] for model in models.values()]
    layers = [f"{in_db(row['layers_mean'])} ({in_db(row['layers_worst'])})" for row in rows]
    return [in_db(mean_of(rows)), *(f"{in_db(row['call'])}, {own}" for row, own in zip(rows, layers, strict=True))]


def as_text(result: dict) -> str:
    """Rows of storage and product: the cells, and the final latent, emulated and from the loader."""
    models = result["models"]
    heads = ["weights", "product", "dB", *(f"{name}: output, layers (worst)" for name in models), "final, loader"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for storage, product in ROWS:
        found = [model["rows"][title(storage, product)] for model in models.values()]
        loader = next((f"{in_db(row['final'])}, {in_db(row['loader'])}" for row in found if "loader" in row), "-")
        lines.append(f"| {' | '.join([storage, product, *cells(models, storage, product), loader])} |")
    for name, held in result["targets"].items():
        lines.append(f"target {name} >= {held['limit']}: {held['measured']} {'met' if held['met'] else 'MISSED'}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
