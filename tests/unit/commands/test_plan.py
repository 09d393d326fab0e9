import json

import pytest
import torch
from halfsafe.precision.commands.plan import plan_file
from halfsafe.precision.devices import detect as devices
from safetensors.torch import save_file


@pytest.fixture
def wan(tmp_path):
    tensors = {
        "blocks.0.ffn.0.weight": torch.randn(64, 32),
        "blocks.0.ffn.2.weight": torch.randn(30, 64),
        "head.modulation": torch.randn(1, 2, 32),
        "head.head.weight": torch.randn(16, 32),
    }
    prefixed = {f"model.diffusion_model.{name}": tensor.bfloat16() for name, tensor in tensors.items()}
    save_file(prefixed, tmp_path / "wan.safetensors")
    return tmp_path / "wan.safetensors"


def layers(report):
    return {layer.name: (layer.storage, layer.mode) for layer in report.layers}


@pytest.mark.parametrize("goal", ["speed", "memory", "balanced"])
def test_int8_is_planned_where_its_products_gain(wan, goal):
    report = plan_file(wan, devices.detect(profile="sm_86"), goal, device_memory=2 * 2**30)
    assert layers(report) == {
        "blocks.0.ffn.0": ("int8", "int8"),
        "blocks.0.ffn.2": ("int8", "int8"),
        "head.head": ("fp16", "fp16"),
    }
    assert [entry.name for entry in report.kept_high] == ["head.head"]
    assert '"int8"' in json.dumps(report.to_json()) and "1.84x" in " ".join(report.to_text().split())


@pytest.mark.parametrize("goal", ["balanced", "speed", "memory"])
def test_fewer_bits_than_8_are_planned_where_int8_does_not_fit_either(wan, goal):
    report = plan_file(wan, devices.detect(profile="sm_86"), goal, device_memory=2 * 2**30 + 4852)
    assert layers(report)["blocks.0.ffn.0"] == layers(report)["blocks.0.ffn.2"] == ("w6a8", "int8")
    text = " ".join(report.to_text().split())
    assert report.decisions["storage"].startswith("w6a8") and "storage: w6a8" in text
    assert "w6a8 takes" in text and "With storage=int8 ComfyUI moves" in text and "'w6a8': " not in text


@pytest.mark.parametrize("goal", ["balanced", "memory"])
def test_where_fp8_is_taken_fewer_bits_are_named_and_not_taken(wan, goal):
    device = devices.detect(profile="sm_89").without("int8_matmul_gains", "torch is built for CUDA 12.8.")
    report = plan_file(wan, device, goal, device_memory=2 * 2**30 + 4852)
    assert layers(report)["blocks.0.ffn.0"][0] == layers(report)["blocks.0.ffn.2"][0] == "fp8_e4m3fn"
    assert "The model does not fit in fp8 either" in report.decisions["storage"] and "makes it fit" in report.decisions["storage"]


@pytest.mark.parametrize("profile", ["sm_75", "sm_89", "cpu"])
def test_layers_are_listed_in_what_their_bytes_are_counted_in(tmp_path, profile):
    """ComfyUI holds no fp8 convolution and one dtype for all that is not quantized."""
    tensors = {
        "blocks.0.ffn.0.weight": torch.randn(64, 32).to(torch.float8_e4m3fn),
        "conv.weight": torch.randn(8, 4, 3, 3).to(torch.float8_e4m3fn),
        "norm.weight": torch.randn(32, dtype=torch.float32),
        "proj.weight": torch.randn(16, 32).bfloat16(),
    }
    save_file(tensors, tmp_path / "fp8.safetensors")
    report = plan_file(tmp_path / "fp8.safetensors", devices.detect(profile=profile))
    stored = {layer.name: layer.storage for layer in report.layers}
    sizes = {"fp8_e4m3fn": 1, "bf16": 2, "fp16": 2, "fp32": 4}
    counted = sum(sizes[stored[name.removesuffix(".weight")]] * tensor.numel() for name, tensor in tensors.items())
    assert stored["blocks.0.ffn.0"] == "fp8_e4m3fn" and stored["conv"] == stored["norm"] == stored["proj"] != "fp8_e4m3fn"
    assert 0 <= report.model.weight_bytes - counted < 100  # the scale of the layer in fp8, and what names its format


@pytest.mark.parametrize("goal", ["speed", "memory"])
def test_a_quantized_file_is_not_planned_to_be_quantized_again(tmp_path, goal):
    tensors = {"blocks.0.ffn.0.weight": torch.randn(64, 32).to(torch.float8_e4m3fn), "head.head.weight": torch.randn(4, 32)}
    save_file(tensors, tmp_path / "fp8.safetensors")
    report = plan_file(tmp_path / "fp8.safetensors", devices.detect(profile="sm_86"), goal)
    assert layers(report)["blocks.0.ffn.0"][0] == "fp8_e4m3fn"


def test_speed_on_a_device_that_gains_from_fp8_only(wan):
    device = devices.detect(profile="sm_89").without("int8_matmul_gains", "torch is built for CUDA 12.8.")
    report = plan_file(wan, device, "speed")
    assert report.model.cls == "Wan"
    assert layers(report) == {
        "blocks.0.ffn.0": ("fp8_e4m3fn", "fp8"),
        "blocks.0.ffn.2": ("fp8_e4m3fn", "fp16"),
        "head.head": ("fp16", "fp16"),
    }
    assert [entry.name for entry in report.kept_high] == ["head.head"]
    assert "blocks.0.ffn.2" in report.without_effect[0].reason and "30 x 64" in report.without_effect[0].reason


def test_speed_on_a_device_where_calls_in_8_bits_were_slower_keeps_16_bits_and_memory_does_not(wan):
    device = devices.detect(profile="sm_90")
    speed, memory = (plan_file(wan, device, goal) for goal in ("speed", "memory"))
    assert {storage for storage, _ in layers(speed).values()} == {"fp16"} and device.profile.measured in speed.decisions["storage"]
    assert layers(memory)["blocks.0.ffn.0"] == ("fp8_e4m3fn", "fp16") and "0.93 to 1.55" in memory.decisions["storage"]


def test_balanced_keeps_the_file_when_it_fits(wan):
    report = plan_file(wan, devices.detect(profile="sm_86"), device_memory=24 * 2**30)
    assert {*layers(report).values()} == {("fp16", "fp16")}
    assert "converted once" in report.decisions["storage"] and "Each result is checked" in report.decisions["compute"]
    assert report.model.weight_bytes == 2 * report.model.parameters


def test_quality_multiplies_in_fp16_with_an_fp32_stream(wan):
    report = plan_file(wan, devices.detect(profile="sm_75"), "quality")
    assert {mode for _, mode in layers(report).values()} == {"fp16_wide"}
    assert {layer.stream for layer in report.layers} == {"fp32"}
