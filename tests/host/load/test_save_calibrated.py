"""Models saved with a calibration: closer to the original than rounded to nearest, and read by stock ComfyUI the same."""

import re

import pytest
import torch
from comfy import model_management
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.nodes.host.load import save as host
from halfsafe.nodes.host.load.devices import QUANTIZING
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.card import card_in
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.make import calibrated as rounding
from safetensors import safe_open
from safetensors.torch import load_file
from support import families, tiny_models
from support.families import denoise
from support.measures import relative_error
from support.saved_models import load, save, stock, with_lora
from support.summing import started_with

MATMUL = torch.backends.cuda.matmul


@pytest.fixture(scope="module")
def calibrated(comfy, wan):
    """The model in fp32, and a calibration of it."""
    model = load(comfy, wan.name, "as_file")
    latent = {"samples": torch.zeros_like(families.noise(model, size=16))}
    return model, comfy.run(
        "HalfsafeCalibrate", model=model, positive=families.conditioning("wan"), latent_image=latent, seed=1
    )[0]


def save_calibrated(comfy, model, calibration, storage, folder):
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    (name,) = node.execute(model, "diffusion_models/calibrated", storage, None, calibration).args
    return folder.parent / name


def error_of_results(path, exact, calibration) -> float:
    """The error of all quantized layers' results on what they were calibrated with."""
    stored, original = (read_checkpoint(open_checkpoint(file), {}, file).weights for file in (path, exact))
    total = 0.0
    for layer in filter(calibration.usable, calibration.layers):
        parts = stored[f"{layer}.weight"].dequantize(torch.float32) - original[f"{layer}.weight"].dequantize(
            torch.float32
        )
        parts = parts.unflatten(1, (-1, calibration.layers[layer].width)).transpose(0, 1)
        total += float((parts @ calibration.layers[layer].blocks * parts).sum())
    return total**0.5


@pytest.mark.parametrize(("storage", "products"), [("int8", 5e-3), ("fp8_e4m3fn", 1e-6)])
def test_a_calibrated_file_is_closer_and_stock_computes_the_same(
    comfy, calibrated, wan, saved_folder, storage, products
):
    """``products``: ComfyUI multiplies int8 weights by int8 inputs whatever the compute dtype, this pack in fp32 where asked."""
    model, calibration = calibrated
    near = save(comfy, model, saved_folder, storage)
    found = save_calibrated(comfy, model, calibration, storage, saved_folder)
    tensors, others = load_file(found), load_file(near)
    assert {name: (one.dtype, one.shape) for name, one in tensors.items()} == {
        name: (one.dtype, one.shape) for name, one in others.items()
    }
    assert {name for name in tensors if not torch.equal(tensors[name].float(), others[name].float())} <= {
        f"{layer}.weight" for layer in calibration.layers if calibration.usable(layer)
    }
    exact = denoise(model)
    assert relative_error(exact, denoise(stock(comfy, found))) < relative_error(exact, denoise(stock(comfy, near)))
    assert error_of_results(found, wan, calibration) < 0.8 * error_of_results(near, wan, calibration)
    ours = load(comfy, found.name, "as_file", "fp32")
    assert relative_error(denoise(ours), denoise(stock(comfy, found))) < products
    with safe_open(found, "pt") as file:
        card = card_in(file.metadata())
    assert card["calibration"]["method"] == "GPTQ" and card["calibration"]["layers"] == sum(
        tensors[f"{layer}.weight"].dtype in (torch.int8, torch.float8_e4m3fn)
        for layer in calibration.layers
        if calibration.usable(layer)
    )


def test_on_a_device_the_cpu_rounds_what_finds_no_memory(comfy, calibrated, saved_folder, monkeypatch):
    model, calibration = calibrated
    expected = load_file(save_calibrated(comfy, model, calibration, "int8", saved_folder))
    asked, own, freed = [], rounding.rounded, []

    def lacking(*given):
        asked.append(MATMUL.allow_tf32)
        if len(asked) == 3:
            raise torch.OutOfMemoryError("Allocation on device")
        return own(*given)

    monkeypatch.setattr(rounding, "rounded", lacking)
    with monkeypatch.context() as as_on_a_device, started_with(["tf32_matmul"], True):
        as_on_a_device.setattr(model_management, "is_device_cpu", lambda device: False)
        as_on_a_device.setattr(model_management, "free_memory", lambda size, device, **options: freed.append(size))
        found = load_file(save_calibrated(comfy, model, calibration, "int8", saved_folder))
        assert MATMUL.allow_tf32
    assert len(asked) > 3 and not any(asked) and freed == [QUANTIZING]
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("storage", ["w6a8", "w4a8"])
def test_low_bits_are_calibrated(comfy, calibrated, wan, saved_folder, storage):
    model, calibration = calibrated
    if storage not in held_storages():
        pytest.skip(f"this ComfyUI does not run {storage}")
    near, found = (
        save(comfy, model, saved_folder, storage),
        save_calibrated(comfy, model, calibration, storage, saved_folder),
    )
    exact = denoise(model)
    assert relative_error(exact, denoise(stock(comfy, found))) < relative_error(exact, denoise(stock(comfy, near)))
    assert error_of_results(found, wan, calibration) < 0.8 * error_of_results(near, wan, calibration)


def test_the_node_says_what_it_rounds(comfy, calibrated, saved_folder, monkeypatch):
    said = []
    monkeypatch.setattr(host, "show_progress", said.append)
    save_calibrated(comfy, *calibrated, "int8", saved_folder)
    assert len(said) == 1 and re.fullmatch(r"rounding \d+ layers with the calibration", said[0])


def test_a_merged_lora_is_what_a_calibration_rounds(comfy, calibrated, saved_folder, lora_file):
    model, calibration = calibrated
    patched = with_lora(comfy, model, lora_file)
    near = save(comfy, patched, saved_folder, "int8")
    found = save_calibrated(comfy, patched, calibration, "int8", saved_folder)
    exact = denoise(patched)
    assert (
        relative_error(exact, denoise(stock(comfy, found)))
        < relative_error(exact, denoise(stock(comfy, near)))
        < relative_error(exact, denoise(model))
    )


def test_a_calibration_of_another_model_is_refused_before_anything_is_written(
    comfy, calibrated, saved_folder, models_dir
):
    other = tiny_models.wan(models_dir / "diffusion_models" / "other_model.safetensors", seed=4)
    before = set(saved_folder.iterdir())
    with pytest.raises(HalfsafeError, match=r"not other_model\.safetensors"):
        save_calibrated(comfy, load(comfy, other.name, "as_file"), calibrated[1], "int8", saved_folder)
    assert set(saved_folder.iterdir()) == before


def test_what_is_no_calibration_is_refused_in_words(comfy, calibrated, saved_folder):
    with pytest.raises(HalfsafeError, match="takes the output of Calibrate"):
        save_calibrated(comfy, calibrated[0], "a file", "int8", saved_folder)
