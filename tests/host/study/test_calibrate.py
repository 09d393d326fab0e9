"""Calibrating in the real ComfyUI: what the layers met is what was summed, and the model is left alone."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from halfsafe.nodes.host.load.files import output_path
from halfsafe.nodes.host.study import calibrate as host
from halfsafe.nodes.host.study.sampling import Inputs, sample
from halfsafe.precision.base.errors import HalfsafeError, MemoryShortage
from halfsafe.precision.make.calibration import CalibrationData
from safetensors.torch import save_file
from support import families, next_core, tiny_models
from support.model_files import lora

NODE = "HalfsafeCalibrate"
LAYER = "blocks.0.ffn.2"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def path(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "calibrated.safetensors", dim=128, ffn=512)


@pytest.fixture(scope="module")
def model(comfy, path):
    return families.load(comfy, path, "as_file", "fp32")


def latent(model, size=8) -> dict:
    return {"samples": torch.zeros_like(families.noise(model, size=size))}


def calibrated(comfy, model, family="wan", size=8, **inputs):
    """The node's outputs: calibration and text."""
    inputs = {"latent_image": latent(model, size), "positive": families.conditioning(family), "seed": 1, **inputs}
    return comfy.run(NODE, model=model, **inputs)


def bytes_of(calibration) -> int:
    return sum(products.blocks.nbytes for products in calibration.layers.values())


def inputs_of(model, layer: str, **inputs) -> list[torch.Tensor]:
    """What a layer meets in the same sampling, by a hook of torch."""
    met = []
    module = model.model.get_submodule(f"diffusion_model.{layer}")

    def note(module, args, kwargs) -> None:
        met.append(next_core.operand_of(args, kwargs).flatten(0, -2).float())

    hook = module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        given = {
            "positive": families.conditioning("wan"),
            "negative": None,
            "latent": latent(model, 16),
            "seed": 1,
            **inputs,
        }
        sample(model, Inputs(**given), host.STEPS)
    finally:
        hook.remove()
    return met


def state_of(model) -> dict:
    """Everything of a model and its modules that a calibration could leave changed."""
    modules = model.model.named_modules()
    values = {name: (sorted(module.__dict__), dict(module._forward_hooks), module.training) for name, module in modules}
    return {
        "modules": values,
        "options": repr(sorted(model.model_options)),
        "wrappers": repr(model.wrappers),
        "patches": len(model.patches),
    }


def test_the_sums_are_those_of_the_inputs(comfy, model):
    found, text = calibrated(comfy, model, size=16)
    met = torch.cat(inputs_of(model, LAYER))
    products = found.layers[LAYER]
    assert products.tokens == len(met) == 8 * 64 and products.left_out == 0
    torch.testing.assert_close(products.blocks[0], met.T @ met, rtol=1e-4, atol=1e-3)
    assert found.calls == host.STEPS and f"{found.calls} model calls of 1 run" in text


@pytest.mark.parametrize("family", ["flux", "sd3"])
def test_every_linear_of_a_family_is_summed(comfy, models_dir, family):
    model = families.load(comfy, families.write_narrow(family, models_dir / "diffusion_models"))
    found, text = calibrated(comfy, model, family)
    layers = {name for name, module in model.model.diffusion_model.named_modules() if type(module).__name__ == "Linear"}
    assert set(found.layers) == layers
    assert sum(products.tokens > 0 for products in found.layers.values()) >= 0.8 * len(layers)
    assert all(torch.isfinite(products.blocks).all() for products in found.layers.values()) and "layers" in text


def test_a_quantized_model_is_calibrated_on_what_its_layers_meet(comfy, path):
    found, _ = calibrated(comfy, families.load(comfy, path, "int8", "auto"), size=16)
    exact, _ = calibrated(comfy, families.load(comfy, path, "as_file", "fp32"), size=16)
    assert found.layers[LAYER].tokens == exact.layers[LAYER].tokens > 0
    torch.testing.assert_close(
        found.layers[LAYER].blocks,
        exact.layers[LAYER].blocks,
        rtol=0.1,
        atol=0.1 * exact.layers[LAYER].blocks.abs().max(),
    )
    assert found.model == exact.model


def test_the_model_is_left_as_it_was(comfy, path):
    model = families.load(comfy, path, "as_file", "fp16_safe")
    weights = {name: tensor.clone() for name, tensor in model.model.state_dict().items()}
    exact, before = families.sample(model, "wan"), state_of(model)
    calibrated(comfy, model)
    assert state_of(model) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.model.state_dict().items())
    assert torch.equal(families.sample(model, "wan"), exact)


def test_previous_adds_up(comfy, model):
    first, _ = calibrated(comfy, model)
    both, text = calibrated(comfy, model, seed=2, previous=first)
    second, _ = calibrated(comfy, model, seed=2)
    assert both.runs == 2 and both.calls == 2 * host.STEPS and "2 runs" in text
    for name, products in both.layers.items():
        assert products.tokens == first.layers[name].tokens + second.layers[name].tokens
        torch.testing.assert_close(products.blocks, first.layers[name].blocks + second.layers[name].blocks)


def test_a_lora_is_in_what_the_layers_meet(comfy, models_dir, model):
    file = models_dir / "loras" / "calibrated.safetensors"
    save_file(lora({"blocks.0.ffn.0": (512, 128)}, size=1.0), file)
    patched = comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, file.name, 1.0)[0]
    plain, _ = calibrated(comfy, model, size=16)
    with_lora, _ = calibrated(comfy, patched, size=16)
    met = torch.cat(inputs_of(patched, LAYER))
    torch.testing.assert_close(with_lora.layers[LAYER].blocks[0], met.T @ met, rtol=1e-3, atol=1e-2)
    assert not torch.allclose(with_lora.layers[LAYER].blocks, plain.layers[LAYER].blocks, rtol=0.1)


def test_inputs_with_nan_are_left_out_and_told(comfy, model):
    module = model.model.get_submodule("diffusion_model.blocks.0.ffn.0")
    calls = []

    def spoil(module, args, result):
        calls.append(1)
        return result.index_fill(1, torch.tensor([0]), float("nan")) if len(calls) == host.STEPS else result

    hook = module.register_forward_hook(spoil)
    try:
        found, text = calibrated(comfy, model, size=16)
    finally:
        hook.remove()
    assert (
        found.layers[LAYER].left_out == 1
        and found.layers["blocks.0.ffn.0"].left_out == 0
        and torch.isfinite(found.layers[LAYER].blocks).all()
    )
    assert "NaN or Inf were skipped" in text and LAYER in text


def test_layers_that_are_called_once_a_step_count_and_those_never_called_are_named(comfy, path, model):
    found, text = calibrated(comfy, model)
    assert (
        found.layers["time_embedding.0"].tokens == host.STEPS
        and found.usable("time_embedding.0")
        and "not called" not in text
    )
    another = families.load(comfy, path, "as_file", "fp32")
    another.model.diffusion_model.idle = torch.nn.Linear(32, 32)
    found, text = calibrated(comfy, another)
    assert "not called: idle." in text and found.usable("idle") is None


def test_memory_is_asked_for_before_it_starts(comfy, model, monkeypatch):
    widths = []
    for free in (1 << 30, 1 << 24, 1 << 10):
        monkeypatch.setattr(host, "free_host_memory", lambda free=free: free)
        if free > 1 << 20:
            widths.append(calibrated(comfy, model)[0].width)
            continue
        monkeypatch.setattr(host, "sample", None)
        with pytest.raises(MemoryShortage, match="Calibrating WAN21 needs .* Free some"):
            calibrated(comfy, model)
    assert widths == [1024, 256]


def test_it_is_kept_in_a_file(comfy, model):
    found, text = calibrated(comfy, model, filename_prefix="calibrations/wan")
    file = text.rpartition("Saved to ")[2].rstrip(".").removesuffix(".safetensors") + ".safetensors"
    again = CalibrationData.read(output_path("x")[0].rpartition("/")[0] + "/" + file)
    assert again.model == found.model and again.calls == found.calls
    for name, products in found.layers.items():
        assert torch.equal(again.layers[name].blocks.triu(), products.blocks.triu())


def test_a_full_disk_is_told_before_it_starts(comfy, model, monkeypatch):
    monkeypatch.setattr(host, "sample", None)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 10))
    with pytest.raises(HalfsafeError, match="the disk has 1.00 KiB free"):
        calibrated(comfy, model, filename_prefix="calibrations/full")
