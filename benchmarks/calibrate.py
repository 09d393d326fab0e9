"""Weights rounded by a calibration against weights rounded to nearest, on trained models and on inputs that were not calibrated with.

The models: `trained.py`. "layers": relative error of each layer's result on inputs that the unchanged model met, mean over the layers,
with weights alone, and products: int8 or fp8 inputs beside them; "output": of what the model gives with every layer's weight changed.
Each on tests of the kind that was calibrated with, and of others. Cost: one weight of each width, in CPU time of one thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

from . import reporting
from .host import load_comfy
from .onnx_graph import Product
from .trained import Trained, minilm, shapes_model, unet

STORAGES = ("int8", "fp8_e4m3fn", "w6a8", "w4a8")
ROWS = 512
COSTS = ((3072, 256, "int8"), (3072, 512, "int8"), (3072, 256, "w4a8"), (5120, 256, "int8"), (5120, 512, "int8"), (5120, 256, "w4a8"))
LIMITS = {("int8", "weights"): 0.0045, ("int8", "products"): 0.0080, ("w6a8", "products"): 0.0125, ("w4a8", "products"): 0.040}
FINAL = {"int8": 0.85, "w4a8": 0.75}
DEFAULT = ("calibrated", "calibrated, blocks of 512")


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one calibration of each model, and no cost")
    parser.add_argument("--storages", nargs="+", default=STORAGES, choices=STORAGES)
    parser.add_argument("--models", nargs="+", default=["minilm", "unet", "shapes"], choices=["minilm", "unet", "shapes"])
    parser.add_argument("--add", action="store_true", help="keep the saved rows of other models and storages")
    args = parser.parse_args()
    torch.set_num_threads(1)
    comfy = load_comfy(args)
    makers = {"minilm": minilm, "unet": unet, "shapes": lambda: shapes_model(comfy)}
    with torch.no_grad():
        rows = [row for name in args.models for row in rows_of(makers[name](), args.storages, args.quick)]
        costs = [] if args.quick else [cost(*sizes) for sizes in COSTS]
    if args.add:
        earlier = json.loads((reporting.FOLDER / "calibrate.json").read_text(encoding="utf-8"))
        made = {(row["model"], row["storage"]) for row in rows}
        rows = [*(row for row in earlier["rows"] if (row["model"], row["storage"]) not in made), *rows]
        costs = costs or earlier["cost"]
    result = {"benchmark": "calibrate", "rows": rows, "cost": costs, "targets": targets(rows)}
    if args.save:
        reporting.save(result)
    print(markdown(result))
    for name, found in result["targets"].items():
        print(f"{'met   ' if found['met'] else 'MISSED'} {name}: {found['measured']} (limit {found['limit']})")
    return reporting.exit_code(result)


def rows_of(model: Trained, storages: Sequence[str], quick: bool = False) -> Iterator[dict]:
    """A row for each storage, how it is rounded, and what it is tested on."""
    tested = {test: Recorder() for test in model.tests}
    exact = {test: [model.run(tested[test], one) for one in ones] for test, ones in model.tests.items()}
    weights = next(iter(tested.values())).weights
    first = next(iter(model.calibrations))
    wanted = {name: ones for name, ones in model.calibrations.items() if not quick or name == first}
    variants = {"nearest": None, **{name: calibrated(model, ones, 1024) for name, ones in wanted.items()}}
    if not quick:
        variants |= {f"{first}, blocks of {width}": calibrated(model, model.calibrations[first], width) for width in model.widths}
    for storage in storages:
        for name, products in variants.items():
            print(f"{time.process_time():.0f} s: {model.name}: {storage}, {name}", file=sys.stderr, flush=True)
            held = {layer: stored(weight, storage, products and products[layer]) for layer, weight in weights.items()}
            tokens = 0 if products is None else max(found.tokens for found in products.values())
            for test, ones in model.tests.items():
                row = {"model": model.name, "layers": len(held), "storage": storage, "rounding": name, "tokens": tokens, "test": test}
                for kind, inputs in (("weights", lambda x: x), ("products", inputs_of(storage))):
                    met = tested[test].rows().items()
                    errors = [error(F.linear(x, weights[n]), F.linear(inputs(x), held[n])) for n, x in met if fits(weights[n], storage)]
                    row[kind] = round(sum(errors) / len(errors), 5)
                made = [model.run(changed(held), one) for one in ones]
                row["output"] = round(sum(map(error, exact[test], made)) / len(made), 5)
                yield row


class Recorder:
    """Multiplies as the model does, and keeps each layer's weight and rows spread over its inputs."""

    def __init__(self):
        self.weights: dict[str, torch.Tensor] = {}
        self._rows: dict[str, list[torch.Tensor]] = {}

    def __call__(self, name: str, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        self.weights[name] = weight
        self._rows.setdefault(name, []).append(rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()].clone())
        return F.linear(x, weight, bias)

    def rows(self) -> dict[str, torch.Tensor]:
        """The kept inputs of each layer."""
        return {name: torch.cat(rows) for name, rows in self._rows.items()}


def calibrated(model: Trained, ones: tuple, width: int) -> dict:
    """What the layers meet in some runs of the model."""
    from halfsafe.precision.calibrate.products import Products

    found: dict[str, Products] = {}

    def product(name: str, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
        found.setdefault(name, Products.empty(x.shape[-1], width)).add(x)
        return F.linear(x, weight, bias)

    for one in ones:
        model.run(product, one)
    return found


def fits(weight: torch.Tensor, storage: str) -> bool:
    """Whether a storage can hold a weight."""
    from halfsafe.precision.calibrate.weights import CODES

    return not CODES[storage].why_not(weight.shape[1])


def stored(weight: torch.Tensor, storage: str, products) -> torch.Tensor:
    """A weight as a storage holds it, in fp32; as it is where that cannot."""
    from halfsafe.precision.calibrate.rounding import rounded
    from halfsafe.precision.calibrate.weights import CODES

    if not fits(weight, storage):
        return weight
    codes = CODES[storage]
    turned, group = codes.turned(weight), codes.group(weight.shape[1])
    params = codes.prepare(turned)
    if products is None or not products.tokens:
        return codes.turned(codes.nearest(turned, params)[1])
    blocks = products.blocks if group is None else products.rotated(group)
    return codes.turned(rounded(turned, blocks, products.tokens, lambda values, at: codes.nearest(values, params, at)[1])[0])


def inputs_of(storage: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """How a product in a storage rounds its inputs: int8 rotated with a scale per token, or fp8 with one per tensor."""
    from halfsafe.precision.formats.int8 import dequantize_rows, quantize_rows, rotation_group
    from halfsafe.precision.formats.quantize import activation_scale

    def int8(x: torch.Tensor) -> torch.Tensor:
        group = rotation_group(x.shape[-1])
        return dequantize_rows(*quantize_rows(x.reshape(-1, x.shape[-1]), group), group).view(x.shape)

    def fp8(x: torch.Tensor) -> torch.Tensor:
        scale = activation_scale(x, torch.float8_e4m3fn)
        return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale

    return fp8 if storage.startswith("fp8") else int8


def changed(held: dict[str, torch.Tensor]) -> Product:
    """Multiply by weights as they are held."""
    return lambda name, x, weight, bias: F.linear(x, held[name], bias)


def error(exact: torch.Tensor, found: torch.Tensor) -> float:
    """The relative error of a result."""
    return float((found - exact).norm() / exact.norm())


def cost(columns: int, width: int, storage: str) -> dict:
    """CPU seconds of a square weight, the bytes of what is known of its inputs, and CPU hours of 12 and 14 billion such weights."""
    from halfsafe.precision.calibrate.products import Products, products_bytes

    products = Products.empty(columns, width)
    products.add(torch.randn(2048, columns))
    weight = torch.randn(columns, columns)
    began = time.process_time()
    stored(weight, storage, products)
    seconds = time.process_time() - began
    hours = {f"cpu_hours_of_{billions}_billion": round(seconds * billions * 1e9 / columns**2 / 3600, 2) for billions in (12, 14)}
    return {"columns": columns, "storage": storage, "width": width, "cpu_seconds": round(seconds, 1), "bytes": products_bytes(columns, width)} | hours


def targets(rows: list[dict]) -> dict:
    """Errors of MiniLM's layers, and of the shapes model's final latents as a share of rounding to nearest."""
    found = {}
    nearest = {(row["model"], row["storage"], row["test"]): row["output"] for row in rows if row["rounding"] == "nearest"}
    for row in rows:
        storage, rounding = row["storage"], row["rounding"]
        if row["model"] == "MiniLM" and rounding in DEFAULT:
            limits = {kind: limit for (name, kind), limit in LIMITS.items() if name == storage}
            found |= {f"{storage} {kind}, MiniLM's layers, {rounding}": reporting.target(row[kind], limit) for kind, limit in limits.items()}
        if row["model"] == "shapes" and rounding in DEFAULT and storage in FINAL:
            share = row["output"] / nearest["shapes", storage, row["test"]]
            found[f"{storage}, shapes, {row['test']}, {rounding}, to nearest"] = reporting.target(round(share, 3), FINAL[storage])
    return found


def markdown(result: dict) -> str:
    """The rows as a table."""
    head = "| model | storage | rounding | tokens | test | layers, weights / products | output |\n|---|---|---|---|---|---|---|"
    lines = [
        f"| {row['model']} | {row['storage']} | {row['rounding']} | {row['tokens'] or ''} | {row['test']} | {row['weights']} / {row['products']} "
        f"| {row['output']} |"
        for row in result["rows"]
    ]
    return "\n".join([head, *lines, *map(str, result["cost"])])


if __name__ == "__main__":
    sys.exit(main())
