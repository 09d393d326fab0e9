"""Guarded VAEs and text encoders on a real device."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.guarding import is_finite
from support.measures import relative_error

KINDS = {"image": (1, 4, 8, 8), "video": (1, 16, 2, 8, 8)}


@pytest.fixture(scope="module")
def files(models_dir):
    """A picture VAE and a video VAE whose decoders overflow in fp16."""
    made = {
        "image": tiny_models.sd_vae(models_dir / "vae" / "gpu_image.safetensors", dtype=torch.float32),
        "video": tiny_models.wan_vae(models_dir / "vae" / "gpu_video.safetensors"),
    }
    for kind, name in (("image", "decoder.mid.block_1.conv2.weight"), ("video", "decoder.middle.0.residual.6.weight")):
        tensors = load_file(str(made[kind]))
        tensors[name] = tensors[name].float() * 2e5
        save_file({key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}, str(made[kind]))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_a_decode_that_overflows_is_made_again(comfy, files, kind):
    def load(dtype):
        return comfy.run("HalfsafeLoadVAE", vae_name=files[kind].name, dtype=dtype)[0]

    latent = torch.randn(KINDS[kind], generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        reference, raw = load("fp32").decode(latent), load("fp16")
        assert not is_finite(raw.decode(latent))
        guarded = comfy.run("HalfsafeGuardVAE", vae=raw, on_nan="retry_higher")[0]
        assert relative_error(reference.cpu(), guarded.decode(latent).cpu()) < 0.02


def test_a_text_encoder_that_overflows_is_made_again(comfy, models_dir):
    """As another pack runs it: with fp16 activations that overflow, unless it was told to compute in fp32."""
    path = tiny_models.clip_l(models_dir / "text_encoders" / "gpu_clip_l.safetensors")
    options = {"clip_name1": path.name, "type": "stable_diffusion", "storage": "as_file", "compute": "auto"}
    clip = comfy.run("HalfsafeLoadCLIP", **options)[0]
    model = clip.cond_stage_model

    def in_half(module, args, result):
        return result if getattr(model, "manual_cast_dtype", None) == torch.float32 else (result * 1e7).half().float() / 1e7

    def encoded(clip):
        with torch.inference_mode():
            return clip.encode_from_tokens_scheduled(clip.tokenize("a black image"))[0][0].cpu()

    reference, half = encoded(clip), clip.clone()
    half.patcher.set_model_compute_dtype(torch.float16)
    hook = model.get_submodule("clip_l.transformer.text_model.encoder.layers.5.mlp.fc2").register_forward_hook(in_half)
    try:
        assert not is_finite(encoded(half))
        cured = encoded(comfy.run("HalfsafeGuardCLIP", clip=half, on_nan="retry_higher")[0])
    finally:
        hook.remove()
    assert relative_error(reference, cured) < 1e-3
