"""Storage auto and Device Info in ComfyUI: int8 where the weights do not fit and a kernel of comfy-kitchen gains from it."""

import json
import sys
from dataclasses import replace

import pytest
import torch
from halfsafe.nodes.host.load import devices, models
from halfsafe.nodes.host.reporting import badge, report
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from support import control_files, families
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
        ("sm_86", "bf16", "int8_tensorwise"), ("sm_89", "auto", "int8_tensorwise"), ("sm_89", "fp8", "float8_e4m3fn"),
        ("gfx1100", "auto", "int8_tensorwise"), ("gfx1201", "auto", "int8_tensorwise"), ("sm_80", "auto", "int8_tensorwise"), ("sm_90", "auto", "int8_tensorwise"),
        ("sm_100", "auto", "float8_e4m3fn"), ("xpu", "auto", "float8_e4m3fn"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_held_in_int8_unless_fp8_gains_or_is_unpacked_faster(
    comfy, wan, card, profile, compute, held
):
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
        assert ("int8 models are not known to be faster here" in text) is not gains


def test_a_report_says_why_int8_products_are_slow_here(comfy, wan, card, monkeypatch):
    card("sm_86", SMALL)
    model = loaded(comfy, wan)
    note = "Layers that multiply in int8 are not known to be faster here: comfy-kitchen has no CPU kernels"
    assert any(note in line for line in families.report(comfy, model)["notes"])
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    assert not any("not known to be faster" in line for line in families.report(comfy, model)["notes"])
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "cpu")
    plain = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="as_file", compute="auto")[0]
    assert not any("not known to be faster" in line for line in families.report(comfy, plain)["notes"])


@pytest.mark.parametrize(
    ("profile", "backends", "gains"),
    [
        ("sm_86", "cuda", True),
        ("sm_86", "", False),
        ("gfx1201", "hip", False),
        ("gfx1201", "", False),
        ("gfx1100", "hip", False),
    ],
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


WHY = "torch is built for CUDA 12.8, comfy-kitchen's int8 kernels need 13.0."


@pytest.fixture
def without_kernels(monkeypatch):
    """Report as on a card of a profile whose int8 kernels are missing, in a process that has said nothing of it."""

    def pretend(profile, cuda):
        device = replace(detect(profile=profile), simulated=False).without("int8_kernels", WHY)
        for module in (badge, report):
            monkeypatch.setattr(module, "current_device", lambda: device)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(badge, "_told", set())

    return pretend


def notice(comfy, node, *inputs, **more) -> tuple[str, object]:
    """(what a node says of missing kernels, what it gives out)."""
    made = comfy.nodes[node].PREPARE_CLASS_CLONE(None).execute(*inputs, **more)
    return "".join(made.ui.get("halfsafe_kernels", ())), made.args[0]


@pytest.mark.parametrize(
    ("profile", "cuda", "packages"),
    [
        ("sm_86", "12.8", "torch torchvision torchaudio --index-url https://download.pytorch.org/whl/cu130"),
        ("sm_86", "13.0", "comfy-kitchen"), ("sm_75", "13.0", "comfy-kitchen"),
    ],
)  # fmt: skip
def test_the_first_model_in_int8_says_once_which_command_installs_its_kernels(
    comfy, wan, without_kernels, caplog, profile, cuda, packages
):
    without_kernels(profile, cuda)
    caplog.set_level("WARNING", logger="halfsafe")
    load = ("HalfsafeLoadDiffusionModel", wan.name)
    assert notice(comfy, *load, "bf16", "auto")[0] == "", "16 bits need none"
    said, model = notice(comfy, *load, "int8", "auto")
    assert f'run "{sys.executable}" -m pip install -U {packages} and restart ComfyUI. {WHY}' in said
    assert ("78 s after that, 123 s before (MiniMax H3 on an RTX Pro 6000" in said) is (cuda == "12.8")
    assert notice(comfy, *load, "int8", "bf16")[0] == "" and [said in line for line in caplog.messages].count(True) == 1
    assert said in families.report(comfy, model)["notes"], "a report is asked for at any time"


@pytest.mark.parametrize("way", ["at hand", "another loader", "ControlNet"])
def test_missing_kernels_are_told_whatever_holds_int8(comfy, wan, models_dir, without_kernels, monkeypatch, way):
    control_files.narrow(monkeypatch)
    stock = families.stock(wan, torch.bfloat16)
    held = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="int8", compute="auto")[0]
    without_kernels("sm_86", "12.8")
    if way == "at hand":
        assert WHY in notice(comfy, "HalfsafeAutoPrecision", stock, "balanced", storage="int8")[0]
    elif way == "another loader":
        assert WHY in notice(comfy, "HalfsafeComputeDtype", held, "auto")[0]
    else:
        path = control_files.KINDS["flux"](models_dir / "controlnet" / "kernels.safetensors")
        assert WHY in notice(comfy, "HalfsafeLoadControlNet", path.name, "int8", "bf16")[0]


@pytest.mark.parametrize("profile", ["sm_61", "sm_80", "sm_90", "sm_100", "gfx1100", "gfx1201", "xpu", "mps_m3", "cpu"])
def test_no_command_is_told_for_a_device_that_int8_is_not_faster_on(comfy, wan, without_kernels, profile):
    without_kernels(profile, "12.8")
    said, model = notice(comfy, "HalfsafeLoadDiffusionModel", wan.name, "int8", "auto")
    assert said == "" and not any("pip install" in note for note in families.report(comfy, model)["notes"])
