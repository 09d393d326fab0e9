"""*Halve the memory*: what the server says of files and devices, what loaders say of the bytes they hold, and the error beside ComfyUI's own cast."""

import json

import pytest
import safetensors.torch
import torch
from halfsafe.nodes.host.load.halving import halving
from support import control_files, families, tiny_models
from support.measures import relative_error
from support.model_files import changed


@pytest.fixture(scope="module")
def files(models_dir):
    tiny_models.wan(models_dir / "diffusion_models" / "halved_wan.safetensors")
    tiny_models.clip_l(models_dir / "text_encoders" / "halved_clip.safetensors")
    (models_dir / "diffusion_models" / "halved.ckpt").write_bytes(b"\x80\x02")
    (models_dir / "diffusion_models" / "halved_html.safetensors").write_bytes(b"<!doctype html><title>Sign in</title>")
    return models_dir


def result_of(output):
    return json.loads(output.ui["halfsafe_result"][0])


def load(comfy, storage, name="halved_wan.safetensors"):
    return comfy.nodes["HalfsafeLoadDiffusionModel"].execute(model_name=name, storage=storage, compute="auto")


def bytes_in_memory(module):
    """Of each tensor that a module holds, quantized ones taken apart."""
    return sum(tensor.nbytes for name, tensor in module.state_dict().items() if not name.endswith(".comfy_quant"))


def said_of(size):
    return f"{size / 2**20:.2f} MiB"


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_a_loader_says_the_bytes_that_its_tensors_take(comfy, files, storage):
    output = load(comfy, storage)
    model, result = output.args[0].model.diffusion_model, result_of(output)
    in_16_bit = sum(2 * parameter.numel() for parameter in model.parameters())
    plain = sum(p.nbytes for p in model.parameters() if "Quantized" not in type(p.data).__name__ and "Quantized" not in type(p).__name__)
    told = result["values"]
    assert (told["before"], told["after"], told["kept"]) == tuple(map(said_of, (in_16_bit, bytes_in_memory(model), plain)))
    assert told["file"] == "halved_wan.safetensors" and "text and caption projection: 2.12 MiB" in told["reasons"]
    assert result["toast"] and result["tone"] == "good" and "halfsafe_badge" in output.ui


def test_a_text_encoder_says_what_it_keeps_and_why(comfy, files):
    output = comfy.nodes["HalfsafeLoadCLIP"].execute(clip_name1="halved_clip.safetensors", type="sd3", storage="fp8_e4m3fn", compute="auto")
    told = result_of(output)["values"]
    assert told["after"] == said_of(bytes_in_memory(output.args[0].cond_stage_model)) and told["reasons"].startswith("embedding: ")
    assert "halfsafe_result" not in load(comfy, "auto").ui, "nothing was asked to be smaller"


def test_the_memory_goal_is_balanced(comfy, files):
    def output(goal):
        return comfy.nodes["HalfsafeAutoPrecision"].execute(model=load(comfy, "auto").args[0], goal=goal, guard="off")

    memory, balanced = output("memory"), output("balanced")
    assert memory.args[3] == balanced.args[3] and memory.ui.keys() == balanced.ui.keys()


def test_a_control_net_says_it_and_one_that_is_loaded_as_it_is_too(comfy, files):
    control_files.flux(files / "controlnet" / "halved_flux.safetensors")
    shuffled = {"control_net_name": "halved_flux.safetensors", "storage": "int8", "compute": "auto"}
    output = comfy.nodes["HalfsafeLoadControlNet"].execute(**shuffled)
    assert result_of(output)["values"]["after"] == said_of(bytes_in_memory(output.args[0].control_model))
    lora = {"lora_controlnet": torch.zeros(()), "input_blocks.0.0.weight": torch.zeros(4, 4, 3, 3)}
    safetensors.torch.save_file(lora, files / "controlnet" / "halved_lora.safetensors")
    told = result_of(comfy.nodes["HalfsafeLoadControlNet"].execute(**shuffled | {"control_net_name": "halved_lora.safetensors"}))
    assert told["tone"] == "warn" and "ControlLora" in told["values"]["reasons"]


def test_files_that_would_not_be_halved_are_told_with_the_reason(files):
    changed(files / "diffusion_models" / "halved_wan.safetensors", files / "diffusion_models" / "halved_8.safetensors", in_fp8)
    names = ("halved_wan.safetensors", "absent.safetensors", "halved.ckpt", "halved_html.safetensors", "halved_8.safetensors")
    found = halving([("diffusion_models", name) for name in names])["files"]
    reasons = ["", "", "Halfsafe's loaders read .safetensors files only", "a web page (HTML), not a model.", "its weights are in 8 bits or fewer already"]
    assert all(file["reason"].startswith(reason) and bool(file["reason"]) == bool(reason) for file, reason in zip(found, reasons, strict=True)), found
    assert [file["read"] for file in found] == [True, True, False, False, True]


def in_fp8(tensors):
    for name, tensor in tensors.items():
        tensors[name] = tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor


@pytest.mark.parametrize("profile, storage, clip_storage", [("sm_86", "int8", "fp8_e4m3fn"), ("sm_61", "fp8_e4m3fn", "fp8_e4m3fn"), ("mps_m1", "as_file", "fp8_e4m3fn")])
def test_the_storage_is_what_the_device_is_fast_at(monkeypatch, profile, storage, clip_storage):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    answer = halving([])
    assert (answer["storage"], answer["clip_storage"]) == (storage, clip_storage) and answer["why"]


def test_the_error_is_smaller_than_that_of_comfyuis_own_cast(comfy, files):
    path = files / "diffusion_models" / "halved_wan.safetensors"
    reference = families.load(comfy, path, "fp32")
    call = families.capture(reference, "wan")
    expected = families.replay(reference, call)
    cast = comfy.core["UNETLoader"]().load_unet(path.name, "fp8_e4m3fn")[0]
    assert cast.model.manual_cast_dtype == torch.float32, "the arithmetic is fp32 in all"
    of_core = relative_error(expected, families.replay(cast, call))
    ours = {storage: relative_error(expected, families.replay(families.load(comfy, path, storage), call)) for storage in ("fp8_e4m3fn", "int8")}
    print(f"core {of_core:.4f}, ours {ours}")
    assert of_core > 1.8 * ours["fp8_e4m3fn"] and of_core > 5 * ours["int8"]
