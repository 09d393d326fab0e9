"""A loaded model under ComfyUI's patchers: clones, LoRAs, other compute dtypes, reloads, other devices."""

import json

import pytest
import torch
from support import model_files, tiny_models
from support.families import denoise
from support.measures import relative_error

LAYER, KEPT = "blocks.0.ffn.0", "time_projection.1"
LAYERS = {LAYER: (1024, 256), "blocks.1.ffn.2": (256, 1024), "blocks.1.self_attn.v": (256, 256)}


@pytest.fixture(scope="module")
def checkpoint(models_dir):
    return tiny_models.sd15_checkpoint(models_dir / "checkpoints" / "sd15.safetensors")


def load(comfy, wan, storage="fp8_e4m3fn", compute="bf16"):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage=storage, compute=compute)[0]


def with_lora(model, tensors, strength=1.0):
    import comfy.sd

    return comfy.sd.load_lora_for_models(model, None, dict(tensors), strength, 0.0)[0]


def merged_file(wan, target, tensors):
    def change(weights):
        for name in weights:
            weights[name] = weights[name].float()
        for layer in {name.split(".lora_")[0].removeprefix("diffusion_model.") for name in tensors}:
            weights[f"{layer}.weight"] += model_files.lora_delta(tensors, layer)

    return model_files.changed(wan, target, change)


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), 0).item()


@pytest.mark.parametrize("layers", [LAYERS, {KEPT: (1536, 256)}], ids=["fp8 layers", "kept layer"])
def test_lora_moves_fp8_as_it_moves_fp32(comfy, wan, models_dir, layers):
    tensors = model_files.lora(layers, size=0.1)
    target = merged_file(wan, models_dir / "diffusion_models" / "merged.safetensors", tensors)
    exact, exact_before = (denoise(load(comfy, path, "fp32", "fp32")) for path in (target, wan))
    model = load(comfy, wan, compute="fp32")
    before = denoise(model)
    after = denoise(with_lora(model, tensors))
    assert relative_error(exact, after) < 0.06
    assert cosine(after - before, exact - exact_before) > 0.9
    assert torch.equal(denoise(model), before), "the LoRA stayed"


def test_lora_takes_effect_at_its_strength(comfy, wan):
    model, tensors = load(comfy, wan, compute="fp32"), model_files.lora(LAYERS, size=0.1)
    before = denoise(model)
    small, large = (relative_error(before, denoise(with_lora(model, tensors, strength))) for strength in (0.5, 2.0))
    assert large > 2 * small


def test_two_models_in_one_prompt_do_not_mix(comfy, wan):
    first, second = load(comfy, wan, "fp8_e4m3fn", "bf16"), load(comfy, wan, "bf16", "fp32")
    one, two = denoise(first), denoise(second)
    assert not torch.equal(one, two)
    assert torch.equal(denoise(first), one)
    assert torch.equal(denoise(second), two)


def test_other_nodes_never_change_a_cached_model(comfy, wan):
    model = load(comfy, wan)
    before = denoise(model)
    denoise(with_lora(compute_dtype(model, "fp32"), model_files.lora(LAYERS)))
    comfy.run("HalfsafeReport", model=model)
    comfy.run("HalfsafeComputeDtype", model=model, compute="fp16_safe")
    assert torch.equal(denoise(model), before)


def compute_dtype(model, dtype):
    from comfy_extras.nodes_model_advanced import ModelComputeDtype

    return ModelComputeDtype().patch(model, dtype)[0]


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "bf16"])
def test_core_s_compute_dtype_node(comfy, wan, storage):
    model, exact = load(comfy, wan, storage), load(comfy, wan, storage, "fp32")
    before = denoise(model)
    assert relative_error(denoise(exact), before) > 1e-4
    assert relative_error(denoise(exact), denoise(compute_dtype(model, "fp32"))) < 1e-5
    assert torch.equal(denoise(model), before)


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


def test_clip_and_vae_can_be_loaded_again(comfy, models_dir):
    names = {"text_encoders": "clip_l.safetensors", "vae": "sd_vae.safetensors"}
    tiny_models.clip_l(models_dir / "text_encoders" / names["text_encoders"])
    tiny_models.sd_vae(models_dir / "vae" / names["vae"])
    clip = comfy.run(
        "HalfsafeLoadCLIP", clip_name1="clip_l.safetensors", type="stable_diffusion", storage="auto", compute="auto"
    )[0]
    vae = comfy.run("HalfsafeLoadVAE", vae_name="sd_vae.safetensors", dtype="bf16")[0]
    for patcher in (clip.patcher, vae.patcher):
        again, first = (from_the_file(loaded.model.state_dict()) for loaded in (reload(patcher), patcher))
        assert same_state(again, first)


def from_the_file(state):
    """Without what these files do not hold and ComfyUI leaves as it finds it."""
    return {name: tensor for name, tensor in state.items() if not name.endswith("text_projection.weight")}


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


def test_torch_compile_node(comfy, wan):
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    model = load(comfy, wan)
    compiled = TorchCompileModel.execute(model, "eager").args[0]
    assert relative_error(denoise(model), denoise(compiled)) < 0.01


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


@pytest.mark.parametrize("profile", ["sm_61", "sm_75", "sm_86", "sm_89", "cpu"])
def test_simulated_device(comfy, wan, monkeypatch, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    (model,) = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="auto", compute="auto")
    report = json.loads(comfy.run("HalfsafeReport", model=model)[1])
    assert report["device"]["profile"] == profile
    assert report["device"]["simulated"]
    assert denoise(model).isfinite().all()
    record = model.attachments["halfsafe"]
    assert record.storage.requested == "auto"
    assert record.storage.used == STORAGE[profile] and record.storage.reason
    modes = {layer["mode"] for layer in report["layers"] if layer["class"] == "Linear"}
    assert modes == EXPECTED_MODES[profile], modes


STORAGE = {"sm_61": "as_file", "sm_75": "fp16", "sm_86": "fp16", "sm_89": "fp16", "cpu": "as_file"}
EXPECTED_MODES = {
    "sm_61": {"fp32"},
    "sm_75": {"fp16_wide"},
    "sm_86": {"fp16_wide"},
    "sm_89": {"fp16_wide"},
    "cpu": {"fp32"},
}


def test_cached_rerun_gives_the_same_picture(server):
    graph = picture_graph()
    first, cached = (server.view(server.prompt(graph)["8"]["images"][0]) for _ in range(2))
    server.free()
    graph["8"]["inputs"]["filename_prefix"] = "again"
    assert first == cached
    assert pixels(server.view(server.prompt(graph)["8"]["images"][0])) == pixels(first)


def pixels(png: bytes) -> bytes:
    import io

    from PIL import Image

    return Image.open(io.BytesIO(png)).tobytes()


def picture_graph():
    loader = {"model_name": "wan.safetensors", "storage": "fp8_e4m3fn", "compute": "auto"}
    second = {"model_name": "wan.safetensors", "storage": "fp8_e5m2", "compute": "auto"}
    sampler = {
        **{"positive": ["4", 0], "negative": ["4", 0], "seed": 1, "steps": 1, "cfg": 1.0},
        **{"sampler_name": "euler", "scheduler": "simple", "denoise": 1.0},
    }
    size = {"width": 64, "height": 64, "length": 1, "batch_size": 1}
    clip = {"clip_name1": "clip_l.safetensors", "type": "sd3", "storage": "auto", "compute": "auto"}
    return {
        "1": {"class_type": "HalfsafeLoadDiffusionModel", "inputs": loader},
        "9": {"class_type": "HalfsafeLoadDiffusionModel", "inputs": second},
        "2": {"class_type": "HalfsafeLoadCLIP", "inputs": clip},
        "3": {"class_type": "HalfsafeLoadVAE", "inputs": {"vae_name": "wan_vae.safetensors", "dtype": "auto"}},
        "4": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["2", 0], "text": "a lighthouse"}},
        "5": {"class_type": "EmptyHunyuanLatentVideo", "inputs": size},
        "6": {"class_type": "KSampler", "inputs": {"model": ["1", 0], "latent_image": ["5", 0], **sampler}},
        "10": {"class_type": "KSampler", "inputs": {"model": ["9", 0], "latent_image": ["6", 0], **sampler}},
        "7": {"class_type": "VAEDecode", "inputs": {"samples": ["10", 0], "vae": ["3", 0]}},
        "8": {"class_type": "SaveImage", "inputs": {"images": ["7", 0], "filename_prefix": "rerun"}},
    }


def test_files_are_left_as_they_were(comfy, wan):
    before = wan.read_bytes()
    denoise(with_lora(load(comfy, wan, "as_file", "bf16"), model_files.lora(LAYERS)))
    assert wan.read_bytes() == before
