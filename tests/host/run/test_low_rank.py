"""LoRAs on 8-bit weights: kept beside them, so that a picture with a LoRA is as near to the exact one as without."""

import pytest
from comfy.sd import load_lora_for_models
from support import families, model_files
from support.families import load
from support.measures import relative_error

LAYERS = {
    **{f"blocks.{block}.ffn.0": (1024, 256) for block in (0, 1)},
    **{f"blocks.{block}.ffn.2": (256, 1024) for block in (0, 1)},
    **{f"blocks.{block}.{kind}_attn.{part}": (256, 256) for block in (0, 1) for kind in ("self", "cross") for part in "qkvo"},
}
EFFECTS = (6e-4, 5e-3, 5e-2)


def with_lora(model, tensors, strength=1.0):
    return load_lora_for_models(model, None, dict(tensors), strength, 0.0)[0]


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def lora():
    return model_files.lora(LAYERS, rank=8, size=1.0)


@pytest.fixture(scope="module")
def exact(comfy, wan):
    return load(comfy, wan, "fp32", "fp32")


@pytest.fixture(scope="module")
def strengths(exact, lora, call):
    """Effect on the output -> the strength that has it."""
    plain, found = families.replay(exact, call), {}
    for effect in EFFECTS:
        strength = effect
        for _ in range(4):
            strength *= effect / relative_error(plain, families.replay(with_lora(exact, lora, strength), call))
        found[effect] = strength
    return found


WAYS = {
    "fp8, fp32": ("fp8_e4m3fn", "fp32"),
    "fp8, bf16": ("fp8_e4m3fn", "bf16"),
    "fp8, fp16": ("fp8_e4m3fn", "fp16"),
    "fp8, fp16_safe": ("fp8_e4m3fn", "fp16_safe"),
    "fp8 products": ("fp8_e4m3fn", "fp8"),
    "fp8_e5m2": ("fp8_e5m2", "fp16_safe"),
    "int8 products": ("int8", "auto"),
    "int8, fp16_safe": ("int8", "fp16_safe"),
    "int8, fp32": ("int8", "fp32"),
}


@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("way", WAYS)
def test_the_error_with_a_lora_is_the_error_without(comfy, wan, call, exact, lora, strengths, way, effect):
    model, strength = load(comfy, wan, *WAYS[way]), strengths[effect]
    reference = families.replay(with_lora(exact, lora, strength), call)
    without = relative_error(families.replay(exact, call), families.replay(model, call))
    error = relative_error(reference, families.replay(with_lora(model, lora, strength), call))
    print(f"TABLE {way} {effect} without {without:.5f} with {error:.5f} ratio {error/without:.3f}")
    assert error <= 1.1 * without
