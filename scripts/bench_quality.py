"""How exact the quantization formats are on trained weights and true activations: `python scripts/bench_quality.py --comfyui DIR`.

For each model of `trained.py` and each format of `quantized_formats.py`, against fp32: the error of each layer's output on inputs that
the unchanged model met (mean over the layers), and of the model's own output with every layer changed. Weights alone, and products in
the format, where it has some. Layers whose number of inputs every format can hold are changed, a convolution's as rows of its kernel's
size. Nothing is calibrated. Packages are downloaded into the cache: 122 MB, and comfy-kitchen for mxfp8, nvfp4, w4a8.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import reporting
import torch
import torch.nn.functional as F
import trained
from environment import Environment
from onnx_graph import Product
from quantized_formats import Format, formats

ROWS = 512
DIVISOR = 32


def main() -> int:
    parser = reporting.parser(__doc__)
    names = ["shapes", "minilm", "terrain"]
    parser.add_argument("--models", nargs="+", default=names, choices=names, help="these alone; saved beside the rows that a file has of others")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    kitchen = trained.use_kitchen()
    makers = {"shapes": lambda: trained.shapes_model(args), "minilm": trained.minilm, "terrain": trained.terrain}
    _importable()
    result = reporting.conditions(Environment(Path(sys.executable), args.comfyui.resolve())) | {"benchmark": "quality", "comfy_kitchen": kitchen}
    rows = [row for name in args.models for row in rows_of(makers[name](), formats())]
    result["rows"] = sorted(rows + _of_others({row["model"] for row in rows}), key=lambda row: row["model"]) if args.save else rows
    result["targets"] = targets(result["rows"])
    if args.save:
        reporting.save(result)
    print(json.dumps(result, indent=2) if args.json else markdown(result["rows"]))
    return reporting.exit_code(result)


def _of_others(measured: set[str]) -> list[dict]:
    """The saved rows of models that were not measured now."""
    path = reporting.FOLDER / "quality.json"
    return [row for row in json.loads(path.read_text(encoding="utf-8"))["rows"] if row["model"] not in measured] if path.exists() else []


def _importable() -> None:
    sys.path.insert(0, str(Path(__file__).absolute().parent.parent / "tests"))
    import conftest  # noqa: F401  it makes the pack importable as `halfsafe`


class Recorder:
    """Multiplies as the model does, and keeps each layer's weight and rows spread over its inputs, of its first call."""

    def __init__(self):
        self.weights: dict[str, torch.Tensor] = {}
        self.rows: dict[str, torch.Tensor] = {}

    def __call__(self, name: str, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
        if weight.shape[1] % DIVISOR == 0 and name not in self.rows:
            rows = x.reshape(-1, x.shape[-1])
            self.weights[name] = weight.contiguous()
            self.rows[name] = rows[torch.linspace(0, len(rows) - 1, min(ROWS, len(rows))).long()].clone()
        return F.linear(x, weight, bias)


def rows_of(model: trained.Trained, found: dict[str, Format]) -> Iterator[dict]:
    """A row for each format on a model."""
    recorder = Recorder()
    exact = model.run(recorder)
    for name, form in found.items():
        print(f"{model.name}: {name}", file=sys.stderr, flush=True)
        held = {layer: form.weight(weight) for layer, weight in recorder.weights.items()}
        row = {"model": model.name, "layers": len(held), "format": name, "bits": form.bits}
        for kind, inputs in (("weights", None), ("products", form.inputs)):
            if kind == "products" and inputs is None:
                continue
            row[kind] = _number(_mean(layer_errors(recorder, held, inputs)))
            row[f"model_{kind}"] = _number(relative_error(exact, model.run(changed(held, inputs))))
        yield row


def layer_errors(recorder: Recorder, held: dict[str, torch.Tensor], inputs) -> list[float]:
    """The relative error of each layer's output without its bias."""
    errors = []
    for layer, rows in recorder.rows.items():
        made = F.linear(inputs(rows) if inputs else rows, held[layer])
        errors.append(relative_error(F.linear(rows, recorder.weights[layer]), made))
    return errors


def changed(held: dict[str, torch.Tensor], inputs) -> Product:
    """Multiply by the weights that a format holds, of inputs as it rounds them."""

    def product(name: str, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
        if name not in held:
            return F.linear(x, weight, bias)
        if inputs:
            x = inputs(x.reshape(-1, x.shape[-1])).view(x.shape)
        return F.linear(x, held[name], bias)

    return product


def relative_error(exact: torch.Tensor, found: torch.Tensor) -> float:
    """The norm of the difference by that of the exact values."""
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _number(value: float) -> float | None:
    return float(f"{value:.3g}") if math.isfinite(value) else None


def targets(rows: list[dict]) -> dict[str, dict]:
    """Rotated int8 is to have half of fp8's error at most, in weights and in products, on every model's layers."""
    by_name = {(row["model"], row["format"]): row for row in rows}
    ratios = {
        kind: max(row[kind] / by_name[model, "fp8_e4m3fn"][kind] for (model, name), row in by_name.items() if name == "int8, rotated")
        for kind in ("weights", "products")
    }
    return {f"int8_to_fp8_{kind}": reporting.target(round(ratio, 3), 0.5) for kind, ratio in ratios.items()}


def markdown(rows: list[dict]) -> str:
    """The rows as a table."""
    keys = ("weights", "products", "model_weights", "model_products")
    lines = ["| model | format | bits | layers, weights | layers, products | output, weights | output, products |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        figures = " | ".join(f"{row[key]:.4f}" if row.get(key) is not None else "-" for key in keys)
        lines.append(f"| {row['model']} | {row['format']} | {row['bits']:g} | {figures} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
