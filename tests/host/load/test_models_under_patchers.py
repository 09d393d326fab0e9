"""A loaded model under ComfyUI's patchers: clones, LoRAs, other compute dtypes, reloads, other devices."""

import pytest
import torch
from support import model_files, tiny_models
from support.families import denoise

LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.1.ffn.2": (256, 1024), "blocks.1.self_attn.v": (256, 256)}


@pytest.fixture(scope="module")
def checkpoint(models_dir):
    return tiny_models.narrow_sd15_checkpoint(models_dir / "checkpoints" / "sd15.safetensors")


def load(comfy, wan, storage="fp8_e4m3fn", compute="bf16"):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage=storage, compute=compute)[0]


def with_lora(model, tensors, strength=1.0):
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, dict(tensors), strength, 0.0)[0]


def reload(patcher):
    """What ComfyUI calls to load a model again, not dynamically."""
    factory, arguments, *index = patcher.cached_patcher_init
    loaded = factory(*arguments, disable_dynamic=True)
    return loaded[index[0]] if index else loaded


def test_model_can_be_loaded_again(comfy, wan):
    model = load(comfy, wan)
    again = reload(model)
    assert again.model is not model.model
    assert torch.equal(denoise(again), denoise(model))


def test_checkpoint_parts_can_be_loaded_again(comfy, checkpoint):
    settings = {"storage": "fp8_e4m3fn", "compute": "fp32", "clip_storage": "fp8_e4m3fn", "vae_dtype": "fp32"}
    model, clip, vae = comfy.run("HalfsafeLoadCheckpoint", ckpt_name=checkpoint.name, **settings)
    for patcher in (model, clip.patcher, vae.patcher):
        again = reload(patcher)
        assert again.model is not patcher.model
        assert same_state(again.model.state_dict(), patcher.model.state_dict())


def same_state(first, second):
    return first.keys() == second.keys() and all(torch.equal(bits(first[name]), bits(second[name])) for name in first)


def bits(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8)


def test_static_clone_of_a_dynamic_model(comfy, wan, monkeypatch):
    """What TorchCompileModel does first where dynamic VRAM is on."""
    model = load(comfy, wan)
    lora = with_lora(model, model_files.lora(LAYERS, size=0.1))
    before, with_it = denoise(model), denoise(lora)
    monkeypatch.setattr(lora, "is_dynamic", lambda: True)
    static = lora.clone(disable_dynamic=True)
    assert static.model is not model.model
    assert not static.is_dynamic()
    assert torch.equal(denoise(static), with_it)
    monkeypatch.undo()
    assert torch.equal(denoise(model), before)


def test_deep_clone_for_another_device(comfy, wan):
    model = load(comfy, wan)
    before = denoise(model)
    other = model.deepclone_multigpu(new_load_device=torch.device("cpu"))
    assert other.model is not model.model
    assert torch.equal(denoise(other), before)
    assert torch.equal(denoise(model), before)


@pytest.mark.parametrize(("storage", "compute"), [("fp8_e4m3fn", "bf16"), ("bf16", "fp32"), ("as_file", "fp32")])
def test_weights_assigned_as_dynamic_loading_does(comfy, wan, monkeypatch, storage, compute):
    """Layers that cast, as all do under dynamic VRAM, run on weights that are views of the file."""
    from comfy.model_patcher import ModelPatcher

    static = denoise(load(comfy, wan, storage, compute))
    monkeypatch.setattr(ModelPatcher, "is_dynamic", lambda self: True)
    model = load(comfy, wan, storage, compute)
    monkeypatch.undo()
    assert not model.model.diffusion_model.blocks[0].norm3.weight.untyped_storage().resizable(), "no view of the file"
    assert torch.equal(denoise(model), static)


def test_files_are_left_as_they_were(comfy, wan):
    before = wan.read_bytes()
    denoise(with_lora(load(comfy, wan, "as_file", "bf16"), model_files.lora(LAYERS)))
    assert wan.read_bytes() == before
