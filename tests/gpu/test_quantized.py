"""Weights in 8 bits on a real device: products, LoRAs beside them, and a model of which a part stays in host memory."""

import importlib

import pytest
from comfy.sd import load_lora_for_models
from halfsafe.precision.devices.detect import detect
from support import families, model_files, tiny_models
from support.families import load
from support.measures import relative_error

LAYERS = {f"blocks.{block}.ffn.0": (1024, 256) for block in (0, 1)} | {"blocks.0.self_attn.q": (256, 256)}
WAYS = {"int8": ("int8", "auto"), "int8, fp16_safe": ("int8", "fp16_safe"), "fp8, bf16": ("fp8_e4m3fn", "bf16"), "fp8 products": ("fp8_e4m3fn", "fp8")}
BOUND = {"int8": 0.05, "int8, fp16_safe": 0.05, "fp8, bf16": 0.1, "fp8 products": 0.15}


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "gpu_quantized.safetensors")


@pytest.fixture(scope="module")
def exact(comfy, wan):
    return load(comfy, wan, "fp32", "fp32")


@pytest.fixture(scope="module")
def call(exact):
    return families.capture(exact, "wan")


@pytest.fixture(scope="module")
def lora():
    return model_files.lora(LAYERS, rank=8)


@pytest.fixture(params=WAYS)
def way(request, device):
    if request.param == "fp8 products" and not detect(device).capabilities["fp8_matmul"]:
        pytest.skip("no fp8 products here")
    return request.param


def with_lora(model, lora):
    return load_lora_for_models(model, None, dict(lora), 0.3, 0.0)[0]


def error(comfy, wan, exact, call, way, change=lambda model: model):
    model = change(load(comfy, wan, *WAYS[way]))
    reference = families.replay(change(exact), call)
    return max(relative_error(reference, families.replay(model, call)) for _ in range(2))


def test_a_quantized_model_is_right(comfy, wan, exact, call, way):
    assert error(comfy, wan, exact, call, way) < BOUND[way]


def test_a_lora_beside_the_weights_costs_no_accuracy(comfy, wan, exact, call, way, lora):
    without = error(comfy, wan, exact, call, way)
    assert error(comfy, wan, exact, call, way, lambda model: with_lora(model, lora)) <= 1.2 * without


def test_a_model_of_which_a_part_stays_in_host_memory_is_right(comfy, wan, exact, call, way, lora, monkeypatch):
    unload = importlib.import_module("comfy.model_management").unload_all_models
    model = with_lora(load(comfy, wan, *WAYS[way]), lora)
    reference = families.replay(with_lora(exact, lora), call)
    partially_load = type(model).partially_load
    monkeypatch.setattr(type(model), "partially_load", lambda self, device, *_, **__: partially_load(self, device, 1))
    unload()
    for _ in range(2):
        assert relative_error(reference, families.replay(model, call)) < 1.5 * BOUND[way]
    assert model.model.model_lowvram
