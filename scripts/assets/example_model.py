"""Make builtin_model/: model, text encoder and VAE of the sidebar's *Show me*. The model overflows in fp16, and draws one picture.

    COMFYUI_DIR=<folder> .venv/bin/python scripts/assets/example_model.py

Model and VAE are those of tests/assets, whose text encoder is a CLIP-L of 250 MB. What that makes of one prompt is built
into a CLIP of 16 channels instead: its position embeddings are the principal components of the model's own text
embeddings, its words and layers are zero. Everything that writes to the model's residual stream is made larger, and its weights are stored in scaled fp8.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import train_shapes
from safetensors.torch import load_file
from support import inprocess, shapes, tiny_models

EXAMPLES, NAME = train_shapes.ROOT / "builtin_model", "halfsafe_example.safetensors"
DRAWN = shapes.Shape("red", "heart")
WIDTH, LAYERS = 16, 3
PADDED = 4096  # what ComfyUI fills up the features of a CLIP of type sd3 to, which gives pooled ones of any width too


def main() -> None:
    for folder in ("diffusion_models", "text_encoders", "vae"):
        (EXAMPLES / folder).mkdir(parents=True, exist_ok=True)
    shutil.copyfile(shapes.VAE, EXAMPLES / "vae" / NAME)
    with tempfile.TemporaryDirectory() as folder:
        inprocess.setup_comfyui(Path(os.environ["COMFYUI_DIR"]), Path(folder), "--cpu", "--use-pytorch-cross-attention")
        (features, extra), *_ = shapes.conditioning(Path(folder), DRAWN)
    model = {name: tensor.float() for name, tensor in load_file(shapes.MODEL).items()}
    encoder = built_in(model, features[0].float(), extra["pooled_output"][0].float())
    train_shapes.write(EXAMPLES / "text_encoders" / NAME, encoder)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / NAME
        train_shapes.write(whole, shapes.overflowing(model))
        smaller = [
            "convert",
            str(whole),
            str(EXAMPLES / "diffusion_models"),
            "--storage",
            "fp8_e4m3fn",
            "--preset",
            "none",
            "--force",
        ]
        subprocess.run([sys.executable, str(train_shapes.ROOT), *smaller], check=True)


def built_in(model: dict[str, torch.Tensor], features: torch.Tensor, pooled: torch.Tensor) -> dict[str, torch.Tensor]:
    """Let the model read one prompt from a narrow CLIP of type sd3; return that CLIP's tensors."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ model[f"{name}.weight"].T + model[f"{name}.bias"]

    def constant(name: str, value: torch.Tensor, width: int) -> None:
        """Make a layer give one value whatever it is given."""
        model[f"{name}.bias"], model[f"{name}.weight"] = value, torch.zeros(len(value), width)

    constant("vector_in.in_layer", linear("vector_in.in_layer", pooled), len(pooled))
    constant("txt_in.c_embedder.in_layer", linear("txt_in.c_embedder.in_layer", features.mean(dim=0)), PADDED)
    embedded = linear("txt_in.input_embedder", features)
    mean = embedded.mean(dim=0)
    components, scales, directions = torch.linalg.svd(embedded - mean, full_matrices=False)
    constant("txt_in.input_embedder", mean, PADDED)
    model["txt_in.input_embedder.weight"][:, :WIDTH] = directions[:WIDTH].T
    print(f"Lost of the text: {scales[WIDTH:].square().sum() / embedded.square().sum():.1e}", flush=True)

    encoder = {name: torch.zeros(shape) for name, shape in tiny_models.clip_l_shapes(WIDTH, LAYERS).items()}
    encoder["text_model.embeddings.position_embedding.weight"] = components[:, :WIDTH] * scales[:WIDTH]
    return encoder


if __name__ == "__main__":
    main()
