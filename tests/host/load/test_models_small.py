"""The small models are what ComfyUI takes for the real families, and they sample to something finite."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support import families, tiny_models

CLASSES = {
    "wan": "WAN21",
    "flux": "Flux",
    "sd3": "SD3",
    "hunyuan_video": "HunyuanVideo",
    "ltxv": "LTXV",
    "sdxl": "SDXL",
}

def load(path: Path, dtype: torch.dtype | None = None):
    import comfy.sd

    model = comfy.sd.load_diffusion_model(str(path), model_options={"dtype": dtype} if dtype else {})
    if dtype:
        model.set_model_compute_dtype(dtype)
    return model


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_family_is_detected_and_samples(family: str, small_models: Path) -> None:
    model = load(small_models / "diffusion_models" / f"{family}.safetensors")
    assert type(model.model).__name__ == CLASSES[family]
    result = families.sample(model, family, steps=2)
    assert result.isfinite().all()
    assert result.std() > 0.1


def test_overflowing_wan_is_finite_in_bf16_only(tmp_path: Path) -> None:
    path = tiny_models.wan_overflowing(tmp_path / "wan.safetensors")
    assert families.sample(load(path, torch.bfloat16), "wan", steps=2).isfinite().all()
    assert families.sample(load(path, torch.float16), "wan", steps=2).isnan().all()


def test_small_vaes_decode_to_the_right_size(small_models: Path) -> None:
    import comfy.sd
    import comfy.utils

    for name, latent in (("wan_vae", (1, 16, 1, 4, 4)), ("sd_vae", (1, 4, 4, 4))):
        vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(small_models / "vae" / f"{name}.safetensors")))
        picture = vae.decode(torch.randn(latent, generator=torch.Generator().manual_seed(1)))
        assert picture.shape[-3:] == (32, 32, 3)
        assert 0.01 < picture.std() < 1


def test_small_checkpoint_brings_all_three_parts(small_models: Path) -> None:
    import comfy.sd

    path = str(small_models / "checkpoints" / "sd15_checkpoint.safetensors")
    model, clip, vae, _ = comfy.sd.load_checkpoint_guess_config(path)
    vae.throw_exception_if_invalid()
    assert model.model.model_config.__class__.__name__ == "SD15"
    assert clip.encode_from_tokens(clip.tokenize("a lighthouse")).isfinite().all()


def test_same_seed_gives_the_same_file(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    assert tiny_models.wan(first).read_bytes() == tiny_models.wan(second).read_bytes()
    assert tiny_models.wan(second, seed=1).read_bytes() != first.read_bytes()


def test_nodes_and_tests_share_one_copy_of_the_pack(comfy) -> None:
    import halfsafe.precision.errors as imported

    assert comfy.pack.__name__ == "halfsafe"
    used = {module.__name__.split(".")[0] for module in (imported, *map(_module_of, comfy.nodes.values()))}
    assert used == {"halfsafe"}
    assert all(node_id.startswith("Halfsafe") for node_id in comfy.nodes)


def _module_of(node: type):
    import sys

    return sys.modules[node.__module__]
