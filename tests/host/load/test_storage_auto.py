"""Storage auto and Device Info in ComfyUI: int8 where the weights do not fit and a kernel of comfy-kitchen gains from it."""

import json
from dataclasses import replace

import pytest
from halfsafe.nodes.host.load import devices, models
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from support import families
from support.int8_models import layers_of

GIB = 1024**3
SMALL, LARGE = 2 * GIB, 64 * GIB
KERNELS = {
    "eager": {"available": True, "disabled": False, "unavailable_reason": None, "capabilities": ["int8_linear"]},
    "cuda": {"available": True, "disabled": False, "unavailable_reason": None, "capabilities": ["int8_linear"]},
    "hip": {"available": False, "disabled": False, "unavailable_reason": "no extension", "capabilities": []},
}


@pytest.fixture
def card(monkeypatch):
    """Load as on a card of a profile with ``free`` bytes; products stay those of the real device."""

    def pretend(profile, free):
        monkeypatch.setattr(models, "current_device", lambda: replace(detect(profile=profile), simulated=False))
        monkeypatch.setattr(models, "free_device_memory", lambda: free)

    return pretend


def loaded(comfy, wan, compute="auto"):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="auto", compute=compute)[0]


def held_in(model) -> set[str]:
    return {module.quant_format for module in layers_of(model).values()}


@pytest.mark.parametrize(
    ("profile", "compute", "held"),
    [
        ("sm_61", "auto", "float8_e4m3fn"), ("sm_75", "auto", "int8_tensorwise"), ("sm_86", "auto", "int8_tensorwise"),
        ("sm_86", "bf16", "float8_e4m3fn"), ("sm_89", "auto", "int8_tensorwise"), ("sm_89", "fp8", "float8_e4m3fn"),
        ("gfx1100", "auto", "float8_e4m3fn"), ("gfx1201", "auto", "int8_tensorwise"), ("xpu", "auto", "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_held_in_the_8_bits_that_gain(comfy, wan, card, profile, compute, held):
    card(profile, SMALL)
    model = loaded(comfy, wan, compute)
    assert held_in(model) == {held}
    said = families.report(comfy, model)["decisions"]["storage"]
    assert said.startswith("int8" if held == "int8_tensorwise" else "fp8_e4m3fn") and "(asked: auto)" in said
    assert ("Not int8:" in said) is (held != "int8_tensorwise")
    card(profile, LARGE)
    assert not layers_of(loaded(comfy, wan, compute))


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_device_info_of_every_profile_knows_int8(comfy, monkeypatch, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    for asked in ("this device", profile):
        text, data = comfy.run("HalfsafeDeviceInfo", profile=asked)
        found = json.loads(data)
        assert found["device"]["profile"] == profile and found["device"]["simulated"]
        gains = found["capabilities"]["int8_matmul_gains"]["value"]
        assert gains is detect(profile=profile).capabilities["int8_matmul_gains"] is not bool(found["int8"]["slow"])
        assert ("int8 models are not faster here" in text) is not gains


def test_a_report_says_why_int8_products_are_slow_here(comfy, wan, card, monkeypatch):
    card("sm_86", SMALL)
    model = loaded(comfy, wan)
    note = "Layers that multiply in int8 are not faster here: comfy-kitchen has no CPU kernels"
    assert any(note in line for line in families.report(comfy, model)["notes"])
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    assert not any("are not faster" in line for line in families.report(comfy, model)["notes"])
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "cpu")
    plain = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="as_file", compute="auto")[0]
    assert not any("are not faster" in line for line in families.report(comfy, plain)["notes"])


@pytest.mark.parametrize(
    ("profile", "backends", "gains"),
    [("sm_86", "cuda", True), ("sm_86", "", False), ("gfx1201", "hip", True), ("gfx1201", "", False), ("gfx1100", "hip", False)],
)
def test_a_card_without_the_kernel_gains_nothing_from_int8(comfy, monkeypatch, profile, backends, gains):
    import comfy.quant_ops

    states = {name: {**state, "available": name in ("eager", backends)} for name, state in KERNELS.items()}
    states["hip"]["capabilities"] = ["int8_linear"]
    monkeypatch.setattr(comfy.quant_ops.ck, "list_backends", lambda: states)
    monkeypatch.setattr(devices, "detect", lambda _: replace(detect(profile=profile), simulated=False))
    device = devices.current_device()
    assert device.capabilities["int8_matmul_gains"] is gains
    assert ("general operations" in device.reason("int8_matmul_gains")) is (not backends)
