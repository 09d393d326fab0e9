"""ComfyUI's MultiGPU CFG Split: threads run clones of the model side by side, one for each device.

Two names of the CPU, "cpu" and "cpu:1", stand for two devices. Threads, clones and the hand-over of conditionings are ComfyUI's own.
Its threads are not in inference mode, as no thread is that it does not put there.
"""

from contextlib import nullcontext

import pytest
import torch
from comfy.sd import load_lora_for_models
from support import families, model_files
from support.guarding import guarded, report_of
from support.matmul_spy import MatmulSpy, differences

DEVICES = [torch.device("cpu"), torch.device("cpu", 1)]
SETTINGS = [
    ("fp16", "fp16_safe"),
    ("fp8_e4m3fn", "fp8"),
    ("fp8_e4m3fn", "fp16_safe"),
    ("int8", "int8"),
    ("int8", "fp16"),
]


@pytest.fixture
def split(monkeypatch):
    """A model's clone that runs on two devices."""
    import comfy.model_management
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    monkeypatch.setattr(comfy.model_management, "get_all_torch_devices", lambda exclude_current=False: DEVICES)
    # An entry whose patcher is gone is None to its search for a clone (comfy/multigpu.py, 0.30), until something is loaded.
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [])
    return lambda model: MultiGPUCFGSplitNode.execute(model, 2).args[0]


@pytest.fixture
def spied(monkeypatch):
    """``spied(patcher)``: the products of its model and of its clones on other devices, each seen in the thread that makes them."""
    import comfy.model_base

    spies, apply_model = {}, comfy.model_base.BaseModel.apply_model

    def call(self, *args, **kwargs):
        with spies.get(self) or nullcontext():
            return apply_model(self, *args, **kwargs)

    def watch(patcher):
        everyone = [patcher, *patcher.get_additional_models_with_key("multigpu")]
        spies.update({each.model: MatmulSpy(each.model.diffusion_model) for each in everyone})
        return list(spies.values())

    monkeypatch.setattr(comfy.model_base.BaseModel, "apply_model", call)
    return watch


def sample(model, steps=2):
    """A latent from ComfyUI's sampler, with both halves of the guidance."""
    import comfy.sample

    cond, uncond = families.conditioning("wan"), families.conditioning("wan")
    uncond[0][0] = uncond[0][0] * 0.5
    start = families.noise(model)
    return comfy.sample.sample(
        model, start, steps, 3.0, "euler", "simple", cond, uncond, torch.zeros_like(start), seed=1
    )


def error(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("storage", "compute"), SETTINGS)
def test_each_device_runs_what_the_report_says(comfy, wan, split, spied, storage, compute):
    model = families.load(comfy, wan, storage, compute)
    alone = sample(model)
    both = split(guarded(comfy, model))
    spies = spied(both)
    assert error(sample(both), alone) < 2e-2
    layers = families.report(comfy, both)["layers"]
    for spy in spies:
        assert spy.seen and not differences(layers, spy)
    assert {p.layer for p in spies[0].seen if p.layer} == {p.layer for p in spies[1].seen if p.layer}


def test_an_overflow_on_both_devices_is_cured_and_counted_once_each(comfy, overflowing, split):
    reference = sample(families.load(comfy, overflowing, "fp32", "fp32"))
    both = split(guarded(comfy, families.load(comfy, overflowing, "fp16", "fp16")))
    assert error(sample(both), reference) < 2e-2
    report = report_of(both)
    assert report.verdict == "recovered" and report.calls == 4 and "blocks.0.ffn.2" in report.escalations
    assert sorted(event.call for event in report.events) == [1, 2] and all(event.recovered for event in report.events)


def test_a_layer_that_is_widened_on_the_other_device_alone_is_in_the_report(comfy, wan, split, monkeypatch):
    """One half of the guidance overflows, and with it one device."""
    both = split(guarded(comfy, families.load(comfy, wan, "fp16", "fp16")))
    other = both.get_additional_models_with_key("multigpu")[0].model.diffusion_model.blocks[1].ffn[2]
    with torch.inference_mode():
        other.weight = torch.nn.Parameter(other.weight * 1e5, requires_grad=False)
    assert bool(torch.isfinite(sample(both)).all())
    report = families.report(comfy, both)
    assert report["guard"]["verdict"] == "recovered" and "blocks.1.ffn.2" in report["guard"]["escalations"]
    assert "blocks.1.ffn.2 compute=fp16_safe" in report_of(both).rules


def test_the_test_product_is_made_on_each_device(comfy, wan, split, monkeypatch):
    from halfsafe.precision.devices import probes

    canary = probes.canary
    monkeypatch.setattr(
        probes,
        "canary",
        lambda device, name: (device != DEVICES[1], "zeros") if name != "fp32" else canary(device, name),
    )
    both = split(guarded(comfy, families.load(comfy, wan, "fp16", "fp16")))
    sample(both)
    assert report_of(both).verdict == "device_fault"
    assert [event.op for event in report_of(both).events] == ["matmul"]


@pytest.mark.parametrize("storage", ["as loaded", "int8"])
def test_a_lora_acts_on_both_devices_before_and_behind_the_split(comfy, wan, split, storage):
    """``as loaded``: quantized by the loader; else by the node Halfsafe, whose result ComfyUI makes again for the other device."""
    lora = model_files.lora({"blocks.0.ffn.0": (1024, 256), "blocks.1.self_attn.q": (256, 256)}, size=0.5)

    def with_lora(model):
        return load_lora_for_models(model, None, dict(lora), 1.0, 0.0)[0]

    exact = families.stock(wan, torch.float32)
    plain, right = sample(exact), sample(with_lora(exact))
    loaded = exact if storage == "int8" else families.load(comfy, wan, "int8", "bf16")
    model = comfy.run("HalfsafeAutoPrecision", model=loaded, goal="quality", storage=storage, guard="off")[0]
    for both in (split(with_lora(model)), with_lora(split(model))):
        assert error(sample(both), right) < 0.1 * error(plain, right)
