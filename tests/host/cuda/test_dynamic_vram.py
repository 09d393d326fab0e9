"""Every way of computing under dynamic VRAM, NVIDIA's default: the results are those of weights that are simply there."""

import itertools
import logging
from unittest.mock import Mock

import pytest
import torch
from comfy import ops as core_ops
from comfy.lora import calculate_weight
from comfy.model_patcher import LowVramPatch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui import weights
from halfsafe.nodes.host.comfyui.weights import core_weights
from halfsafe.precision.arithmetic.linear import lent
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files
from support.dynamic_vram import WAYS, dynamic_vram
from support.families import load
from support.guarding import guarded, plain_fp16
from support.mapped_loading import mapped_loading
from support.measures import relative_error
from support.rows import rotated
from support.summing import accumulation

LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.1.ffn.2": (256, 1024), "blocks.1.self_attn.v": (256, 256)}


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(logging.getLogger("comfy_kitchen.tensor.fp8"), "disabled", True)


MODELS = {
    "fp32": lambda comfy, wan: load(comfy, wan, "as_file", "fp32"),
    "bf16": lambda comfy, wan: load(comfy, wan, "as_file", "bf16"),
    "fp16": lambda comfy, wan: load(comfy, wan, "fp16", "fp16"),
    "fp16_safe": lambda comfy, wan: load(comfy, wan, "as_file", "fp16_safe"),
    "fp32 stored": lambda comfy, wan: load(comfy, wan, "fp32", "fp16_safe"),
    "fp8 stored": lambda comfy, wan: load(comfy, wan, "fp8_e4m3fn", "fp16_safe"),
    "fp8": lambda comfy, wan: load(comfy, wan, "fp8_e5m2", "fp8"),
    "int8": lambda comfy, wan: load(comfy, wan, "int8", "auto"),
    "int8 stored": lambda comfy, wan: load(comfy, wan, "int8", "fp16_safe"),
    "rules": lambda comfy, wan: load(
        comfy, wan, "as_file", "bf16", rules_from("*.ffn.* compute=fp16_safe stream=fp32")
    ),
    "sums": lambda comfy, wan: accumulation(
        comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto", attention="auto"
    ),
    "guard": lambda comfy, wan: guarded(comfy, load(comfy, wan, "as_file", "fp16")),
}


def twice(model, call):
    """Two calls: the first one measures."""
    return [families.replay(model, call) for _ in range(2)]


@pytest.mark.parametrize(("name", "way"), rotated(MODELS, WAYS, whole=["fp16_safe", "int8"]))
@torch.inference_mode()
def test_a_model_gives_the_same(comfy, wan, call, name, way):
    expected = twice(MODELS[name](comfy, wan), call)
    with mapped_loading():
        model = MODELS[name](comfy, wan)
    with dynamic_vram(model, way) as lender:
        results = twice(model, call)
        assert lender.lent > 40 and not lender.out
    for result, reference in zip(results, expected, strict=True):
        assert relative_error(reference, result) < 1e-6


@torch.inference_mode()
def test_a_guard_that_repeats_gives_its_weights_back(comfy, overflowing, fp32, call):
    reference = families.replay(fp32, call)
    for way in WAYS:
        model = guarded(comfy, plain_fp16(comfy, overflowing))
        with dynamic_vram(model, way) as lender:
            assert all(relative_error(reference, result) < 0.02 for result in twice(model, call)) and not lender.out


@pytest.mark.parametrize("name", ["fp16_safe", "fp8 stored", "guard"])
@torch.inference_mode()
def test_a_call_that_raises_pins_no_page_for_the_next_one(comfy, wan, call, monkeypatch, name):
    """ComfyUI takes the pins of prefetched weights back after a node; a call that is made again meets them before."""
    expected, model = families.replay(MODELS[name](comfy, wan), call), MODELS[name](comfy, wan)
    with dynamic_vram(model, "prefetched") as lender:
        third = model.model.diffusion_model.blocks[0].self_attn.v
        cast, asked = core_ops.cast_bias_weight, []

        def lacking(module, *given, **options):
            if module is third and not asked:
                asked.append(module)
                raise torch.OutOfMemoryError("Allocation on device")
            return cast(module, *given, **options)

        with monkeypatch.context() as patch:  # ended before the lender takes its own function back
            patch.setattr(core_ops, "cast_bias_weight", lacking)
            if name == "guard":  # which ends in it: the next run is the repeat
                with pytest.raises(torch.OutOfMemoryError):
                    families.replay(model, call)
            assert relative_error(expected, families.replay(model, call)) < 1e-6 and asked and not lender.out
        assert not any(hasattr(module, "_prefetch") for module in model.model.diffusion_model.modules())


@torch.inference_mode()
def test_pages_that_were_lent_to_another_model_are_filled_anew(comfy, wan, call):
    model = MODELS["fp16_safe"](comfy, wan)
    with dynamic_vram(model, "resident") as lender:
        expected = twice(model, call)[1]
        lender.evict()
        assert torch.equal(families.replay(model, call), expected) and not lender.out


@torch.inference_mode()
def test_a_weight_that_cannot_be_unpacked_is_given_back(comfy, wan, call, monkeypatch):
    model = MODELS["fp8 stored"](comfy, wan)
    module, x = model.model.diffusion_model.blocks[0].ffn[0], torch.zeros(1)
    with dynamic_vram(model, "resident") as lender:
        twice(model, call)
        monkeypatch.setattr(weights, "dequantized", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
        with pytest.raises(torch.OutOfMemoryError), core_weights(module, x, torch.float16):
            pass
        assert not lender.out


def lora(model):
    return load_lora_for_models(model, None, model_files.lora(LAYERS, size=1.0), 1.0, 0.0)[0]


BOUNDS = {
    "fp32": 5e-3,
    "fp16": 5e-3,
    "fp16_safe": 2e-3,
    "fp32 stored": 2e-3,
    "rules": 2e-2,
    "sums": 5e-3,
    "fp8 stored": 0.06,
    "fp8": 0.12,
}


@pytest.mark.parametrize(("way", "name"), zip(itertools.cycle(WAYS), BOUNDS, strict=False))
@torch.inference_mode()
def test_a_lora_is_added_once_in_every_call(comfy, wan, call, way, name):
    plain = load(comfy, wan, "fp32", "fp32")
    reference, without = families.replay(lora(plain), call), families.replay(plain, call)
    assert relative_error(without, reference) > 0.2
    model = MODELS[name](comfy, wan)
    with dynamic_vram(model, way, lora(model).patches):
        assert all(relative_error(reference, result) < BOUNDS[name] for result in twice(model, call))


@pytest.mark.parametrize(
    ("way", "size"), [("offloaded", 3e-4), ("offloaded", 3e4), *zip(WAYS, (3e-4, 3e4, 3e-4), strict=True)]
)
@torch.inference_mode()
def test_a_lora_is_added_in_fp32(comfy, wan, way, size):
    """Of two LoRAs that take each other back but for a little, fp16 sums leave nothing, or inf."""
    model, key = load(comfy, wan, "fp16", "fp16_safe"), "diffusion_model.blocks.0.ffn.0.weight"
    module, x = model.model.diffusion_model.blocks[0].ffn[0], torch.zeros(1)
    change = torch.full((1024, 256), size * 1.5)
    patches = {
        key: [(strength, ("diff", (change * part,)), 1.0, None, None) for strength, part in ((1, 2), (-1, 1.9999))]
    }
    expected = calculate_weight(patches[key], module.weight.float(), key).half()
    assert torch.isfinite(expected).all()
    if way == "offloaded":
        module.weight_function = [LowVramPatch(key, patches)]
        with lent(core_weights(module, x, torch.float16)) as (weight, _):
            assert torch.equal(weight, expected)
        return
    with dynamic_vram(model, way, patches), lent(core_weights(module, x, torch.float16)) as (weight, _):
        assert weight.dtype == torch.float16 and torch.equal(weight, expected)


@pytest.mark.parametrize(
    ("storage", "compute", "way"), [("int8", "int8", "transferred"), ("fp8_e4m3fn", "fp16_safe", "resident")]
)
@torch.inference_mode()
def test_a_lora_on_a_weight_of_zeros_is_all_there_is(comfy, wan, models_dir, call, storage, compute, way):
    """ComfyUI quantizes the sum of weight and LoRA anew, with a scale of its own: that of the zeros would lose it."""
    name = "blocks.0.ffn.0.weight"
    path = model_files.changed(
        wan, models_dir / "diffusion_models" / "zeros_dynamic.safetensors", lambda tensors: tensors[name].zero_()
    )
    expected = families.replay(lora(load(comfy, path, "as_file", "fp32")), call)
    without, model = families.replay(load(comfy, path, "as_file", "fp32"), call), load(comfy, path, storage, compute)
    with dynamic_vram(model, way, lora(model).patches):
        results = twice(model, call)
    assert all(relative_error(expected, result) < relative_error(expected, without) / 4 for result in results)
