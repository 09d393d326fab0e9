"""ComfyUI's Train LoRA, whose gradient_checkpointing runs layers again when the model's call is over: what it trains is what it trains without Halfsafe, in each storage, compute and mode."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.precision.guard.verdicts import NonFinite
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files, tiny_models
from support.families import load
from support.guarding import core, guarded, left_on
from support.measures import relative_error
from support.summing import accumulation, states

LAYERS = {"blocks.0.ffn.0": (256, 128), "blocks.1.self_attn.v": (128, 128)}
SAFE = "*.ffn.* compute=fp16_safe stream=fp32"


def trained(
    model, checkpointing: bool, bypass: bool = False, training_dtype: str = "bf16"
) -> tuple[torch.Tensor, float]:
    """What a LoRA has learned after two steps, from zeros, and the last loss."""
    inputs = {
        "batch_size": 1, "steps": 2, "grad_accumulation_steps": 1, "learning_rate": 1e-3, "rank": 2, "optimizer": "SGD", "loss_function": "MSE", "seed": 1,
        "training_dtype": training_dtype, "lora_dtype": "fp32", "quantized_backward": False, "algorithm": "LoRA", "gradient_checkpointing": checkpointing,
        "checkpoint_depth": 1, "offloading": False, "existing_lora": "[None]", "bucket_mode": False, "bypass_mode": bypass,
    }  # fmt: skip
    latents = {"samples": families.noise(model, seed=3)}
    torch.manual_seed(5)
    node = core("comfy_extras.nodes_train").TrainLoraNode
    lora, losses = node.execute(
        [model], [latents], [families.conditioning("wan")], **{name: [value] for name, value in inputs.items()}
    ).args[:2]
    return torch.cat([lora[name].flatten() for name in sorted(lora) if "lora_down" in name]), losses["loss"][-1]


@pytest.fixture(scope="module")
def file(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "trained.safetensors", dim=128, ffn=256)


@pytest.fixture(scope="module")
def overflowing_file(models_dir):
    return tiny_models.wan_overflowing(
        models_dir / "diffusion_models" / "trained_overflowing.safetensors", dim=128, ffn=256
    )


@pytest.fixture(scope="module")
def of_core(file):
    """(bypass, training_dtype) -> what ComfyUI trains with its own loader."""
    return functools.cache(lambda bypass, training_dtype: trained(families.stock(file), True, bypass, training_dtype))


def with_lora(model):
    return load_lora_for_models(model, None, model_files.lora(LAYERS, size=0.3), 1.0, 0.0)[0]


MODELS = {
    "fp16_safe": lambda comfy, file: load(comfy, file, "as_file", "fp16_safe"),
    "Compute Dtype": lambda comfy, file: families.with_compute(
        comfy, load(comfy, file, "as_file", "bf16"), "fp16_safe"
    ),
    "fp32 stored": lambda comfy, file: load(comfy, file, "fp32", "fp16_safe"),
    "fp16": lambda comfy, file: load(comfy, file, "fp16", "fp16"),
    "auto": lambda comfy, file: load(comfy, file, "auto", "auto"),
    "rules": lambda comfy, file: load(comfy, file, "as_file", "bf16", rules_from(f"{SAFE}\nblocks.0 attention=fp32")),
    "fp8": lambda comfy, file: load(comfy, file, "fp8_e4m3fn", "fp8"),
    "fp8 in fp16_safe": lambda comfy, file: load(comfy, file, "fp8_e4m3fn", "fp16_safe"),
    "int8": lambda comfy, file: load(comfy, file, "int8", "int8"),
    "int8 in fp16_safe": lambda comfy, file: load(comfy, file, "int8", "fp16_safe"),
    "accumulation": lambda comfy, file: accumulation(
        comfy, load(comfy, file, "fp16", "fp16"), fp16_accumulation="auto", attention="auto"
    ),
    "guard": lambda comfy, file: guarded(comfy, load(comfy, file, "as_file", "fp16_safe")),
}
ROUNDED = {"fp8": 0.12, "fp8 in fp16_safe": 0.12, "int8": 0.04, "int8 in fp16_safe": 0.04}
"""How far the weights of 8 bits take what is learned from ComfyUI's; others hold the file's numbers."""


WAYS = ((False, "bf16"), (True, "bf16"), (True, "fp32"))
"""Whether it is bypass_mode, and the training_dtype."""


def turns(name: str, profile: str) -> list[tuple[bool, str, bool]]:
    """A model trains in each way, with gradient_checkpointing and without it on each card; which ways are with which is its turn."""
    first, second, third = (WAYS[([*MODELS].index(name) + place) % len(WAYS)] for place in range(3))
    return [(*first, True), (*second, False)] if profile == "sm_75" else [(*third, True), (*third, False)]


@pytest.mark.parametrize("profile", ["sm_75", "sm_89"])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_learned_is_what_comfyui_learns(comfy, file, of_core, monkeypatch, name, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    model = MODELS[name](comfy, file)
    before, flags = left_on(model.model), states()
    for bypass, training_dtype, checkpointing in turns(name, profile):
        learned, loss = of_core(bypass, training_dtype)
        found, own = trained(model, checkpointing, bypass, training_dtype)
        assert relative_error(learned, found) < ROUNDED.get(name, 0.01), (bypass, training_dtype, checkpointing)
        assert abs(own - loss) < 0.01 * loss
    assert left_on(model.model) == before and states() == flags


@pytest.mark.parametrize("bypass", [False, True], ids=["in weights", "bypass"])
def test_a_lora_of_8_bit_weights_is_there_when_layers_run_again(comfy, file, bypass):
    lora = model_files.lora(LAYERS, size=0.3)
    expected, loss = trained(load_lora_for_models(families.stock(file), None, lora, 1.0, 0.0)[0], True, bypass)
    without, _ = trained(families.stock(file), True, bypass)
    model = with_lora(load(comfy, file, "int8", "bf16"))
    before = left_on(model.model)
    for checkpointing in (True, False):
        learned, own = trained(model, checkpointing, bypass)
        assert relative_error(expected, learned) < 0.05 < 0.1 < relative_error(expected, without)
        assert abs(own - loss) < 0.02 * loss
    assert left_on(model.model) == before


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop"])
def test_a_guard_puts_no_higher_precision_on_layers_that_run_again(comfy, overflowing_file, caplog, on_nan):
    """The backward pass would run them without it."""
    model = guarded(comfy, load(comfy, overflowing_file, "fp16", "fp16"), on_nan=on_nan)
    with caplog.at_level(logging.WARNING):
        if on_nan == "stop":
            with pytest.raises(NonFinite):
                trained(model, True, training_dtype="none")
        else:
            trained(model, True, training_dtype="none")
            assert "gradient_checkpointing" in caplog.text and "training_dtype" in caplog.text


def test_it_is_told_that_a_setting_does_not_act(comfy, file, caplog):
    with caplog.at_level(logging.INFO):
        trained(load(comfy, file, "as_file", "fp16_safe"), True)
    assert "compute=fp16_safe does not act while Train LoRA trains: its training_dtype decides" in caplog.text
