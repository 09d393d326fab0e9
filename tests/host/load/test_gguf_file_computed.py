"""What models of GGUF files compute: under dynamic VRAM, with a LoRA, and loaded a second time by ComfyUI."""

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.precision.files.gguf_file import open_gguf
from support import families, gguf_files, model_files
from support.dynamic_vram import WAYS, dynamic_vram
from support.families import load
from support.measures import relative_error

STORED = {"as_file": ("as_file", "fp32"), "as_file bf16": ("as_file", "bf16"), "int8": ("int8", "int8"), "fp8": ("fp8_e4m3fn", "fp16_safe")}
LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.1.ffn.2": (256, 1024), "blocks.1.self_attn.v": (256, 256)}
OWN_ERROR = {"as_file": 4e-3, "as_file bf16": 0.02, "int8": 0.03, "fp8": 0.06}
"""Against fp32 of the file's values: bf16 rounds them once, and 8 bits quantize them anew."""


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def files(wan, models_dir):
    """(GGUF file, safetensors file of its values in fp32)."""
    folder = models_dir / "diffusion_models"
    values = folder / "gguf_values.safetensors"
    return gguf_files.of_model(wan, folder / "computed.gguf", ("Q8_0", "Q4_K", "Q6_K"), values), values


def lora(model):
    return load_lora_for_models(model, None, model_files.lora(LAYERS, size=1.0), 1.0, 0.0)[0]


def twice(model, call):
    """Two calls: the first one measures."""
    return [families.replay(model, call) for _ in range(2)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stored", STORED)
def test_dynamic_vram_gives_the_same_and_the_files_values(comfy, files, call, stored, way):
    path, values = files
    expected, model = twice(load(comfy, path, *STORED[stored]), call), load(comfy, path, *STORED[stored])
    with dynamic_vram(model, way) as lender:
        results = twice(model, call)
        assert lender.lent > 40 and not lender.out
    assert all(relative_error(*pair) < 1e-6 for pair in zip(expected, results, strict=True))
    assert relative_error(families.replay(load(comfy, values, "as_file", "fp32"), call), results[1]) < OWN_ERROR[stored]


@pytest.mark.parametrize("way", [None, *WAYS])
@pytest.mark.parametrize("stored", STORED)
def test_a_lora_is_added_once(comfy, files, call, stored, way):
    path, values = files
    plain = load(comfy, values, "as_file", "fp32")
    reference, without = families.replay(lora(plain), call), families.replay(plain, call)
    assert relative_error(without, reference) > 0.2
    model = load(comfy, path, *STORED[stored])
    if way is None:
        results = twice(lora(model), call)
    else:
        with dynamic_vram(model, way, lora(model).patches):
            results = twice(model, call)
    assert all(relative_error(reference, result) < 2 * OWN_ERROR[stored] for result in results)


@pytest.mark.parametrize("stored", STORED)
def test_what_comfyui_loads_again_is_the_same_model(comfy, files, call, stored):
    """As for TorchCompileModel under dynamic VRAM, which takes a model without it: ``clone(disable_dynamic=True)``."""
    model = load(comfy, files[0], *STORED[stored])
    make, arguments = model.cached_patcher_init
    again = make(*arguments, disable_dynamic=True)
    assert again.model is not model.model
    assert torch.equal(families.replay(again, call), families.replay(model, call))
    assert len(open_gguf(files[0]).packed) > 10
