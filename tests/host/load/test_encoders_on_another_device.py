"""A VAE in another dtype, cloned for another device: ComfyUI's clone has a module of its own, and runs that one."""

import copy

import torch
from halfsafe.nodes.host.load.encoders import vae_in
from support import tiny_models


@torch.inference_mode()
def test_a_vae_selected_for_another_device_runs_its_own_weights(comfy, models_dir):
    path = tiny_models.sd_vae(models_dir / "vae" / "another_device.safetensors", dtype=torch.float32)
    loaded = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype="bf16")[0]
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    vae = vae_in(loaded, torch.float32)
    expected = vae.decode(latent)
    other = copy.copy(vae)  # as Select VAE Device does
    other.patcher = vae.patcher.deepclone_multigpu(new_load_device=torch.device("cpu"))
    other.first_stage_model = other.patcher.model
    for parameter in vae.first_stage_model.parameters():
        parameter.fill_(torch.nan)
    assert torch.equal(other.decode(latent), expected)
    assert torch.equal(vae_in(other, torch.float32).decode(latent), expected)
