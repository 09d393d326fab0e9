"""Weights that do not fit, on NVIDIA's branch of ComfyUI: kept on the host, copied by two streams at each call, given back; and two cards."""

import pytest
import torch
from comfy import model_management
from support import families, tiny_models
from support.families import load
from support.guarding import guarded, plain_fp16, report_of
from support.measures import relative_error

MIB = 1024**2
BOUNDS = {("fp16", "fp16_safe"): 2e-3, ("fp8_e4m3fn", "fp8"): 3e-2, ("int8", "int8"): 1e-2}


@pytest.fixture
def room_for_weights_alone(monkeypatch):
    """ComfyUI leaves a GiB and more for activations, which these models do not need."""
    monkeypatch.setattr(model_management, "minimum_inference_memory", lambda: 0)
    monkeypatch.setattr(model_management, "EXTRA_RESERVED_VRAM", 0)


def on_the_host(model) -> int:
    """Bytes of the weights that are in the host's memory."""
    return sum(weight.nbytes for weight in model.model.diffusion_model.parameters() if weight.device.type == "cpu")


@pytest.mark.parametrize(("storage", "compute"), BOUNDS)
def test_weights_in_part_on_the_host_are_copied_in_order(comfy, wan, clean, on, room_for_weights_alone, storage, compute):
    """Each layer's weights are copied by the stream whose turn it is into memory that an earlier layer used."""
    on("cuda", memory=5 * MIB)
    model = load(comfy, wan, storage, compute)
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < BOUNDS[storage, compute]
    assert on_the_host(model) > MIB and len(model_management.STREAM_CAST_BUFFERS) == 2
    torch.cuda.synchronize()  # raises for host memory that was written too early


def test_a_layer_that_does_not_wait_for_its_weights_shows(comfy, wan, on, room_for_weights_alone, monkeypatch):
    on("cuda", memory=5 * MIB)
    monkeypatch.setattr(model_management, "sync_stream", lambda device, stream: None)
    with pytest.raises(RuntimeError, match="on stream 0 that stream 1 has not finished"):
        families.sample(load(comfy, wan, "fp16", "fp16_safe"), "wan", steps=1)


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_the_guard_repeats_a_call_of_offloaded_weights(comfy, overflowing, cured, on, room_for_weights_alone, kind):
    on(kind, memory=4 * MIB)
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    assert relative_error(cured, families.sample(model, "wan", steps=2)) < 2e-3
    assert report_of(model).verdict == "recovered" and on_the_host(model) > MIB


def test_an_unloaded_model_leaves_nothing_on_the_device(comfy, wan, on):
    device = on("cuda")
    model = guarded(comfy, load(comfy, wan, "fp8_e4m3fn", "fp16_safe"), check="first step")
    left = []
    for _ in range(2):
        families.sample(model, "wan", steps=1)
        families.unload_models()
        left.append(device.used(device.device()))
    assert left[0] == left[1] < MIB // 4


def test_each_card_runs_its_half_of_the_guidance(comfy, overflowing, on):
    """ComfyUI's MultiGPU CFG Split: a thread and a clone for the second card, an overflow on each."""
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    cond = families.conditioning("wan")

    def sampled(model):
        import comfy.sample

        start = families.noise(model)
        return comfy.sample.sample(model, start, 2, 3.0, "euler", "simple", cond, uncond, torch.zeros_like(start), seed=1)

    uncond = families.conditioning("wan")
    uncond[0][0] = uncond[0][0] * 0.5
    exact = sampled(load(comfy, overflowing, "fp32", "fp32"))
    device = on("cuda", count=2)
    both = MultiGPUCFGSplitNode.execute(guarded(comfy, plain_fp16(comfy, overflowing)), 2).args[0]
    assert relative_error(exact, sampled(both)) < 5e-3
    assert report_of(both).verdict == "recovered" and report_of(both).calls == 4
    assert min(device.used(device.device(index)) for index in (0, 1)) > 7e6, "each card has the weights"


def test_a_model_on_one_card_and_its_vae_on_the_other(comfy, wan, models_dir, clean, on, monkeypatch):
    path = tiny_models.wan_vae(models_dir / "vae" / "second_card.safetensors")
    exact = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype="fp32")[0].decode(clean)
    device = on("cuda", count=2)
    monkeypatch.setattr(model_management, "vae_device", lambda: device.device(1))
    vae = comfy.run("HalfsafeGuardVAE", vae=comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype="fp16")[0], on_nan="retry_higher")[0]
    latent = families.sample(guarded(comfy, load(comfy, wan, "fp16", "fp16_safe")), "wan", steps=2)
    assert relative_error(exact, vae.decode(latent.to(device.device()))) < 0.05
    assert device.used(device.device(1)) > MIB and vae.patcher.load_device == device.device(1)
