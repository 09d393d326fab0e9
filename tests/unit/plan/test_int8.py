"""What plans decide for weights stored in int8: in which devices they multiply in int8, and what is told where they cannot."""

import pytest
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from halfsafe.precision.plan.compute import plan_compute
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.rules import rules_from

LAYERS = [LayerSpec(name, "Linear", (64, 32)) for name in ("int8", "plain", "fp8", "nvfp4")]
STORED = {"int8": "int8", "fp8": "fp8_e4m3fn", "nvfp4": "nvfp4", "plain": "bf16"}
NO_INT8 = ("sm_61", "sm_70", "mps_m1", "mps_m3", "xpu")  # torch before 2.15 has no int8 matmul on MPS
NOT_SAFE_IN_FP16 = ("bf16", "fp32")


def plan(profile, compute, text="", storages=STORED):
    facts = ModelFacts(LAYERS, 10**9, "bf16", NOT_SAFE_IN_FP16)
    return plan_compute(facts, detect(profile=profile), compute, rules_from(text), storages)


def modes(found):
    return {name: decision.mode for name, decision in found.decisions.items()}


@pytest.mark.parametrize("name", PROFILE_NAMES)
@pytest.mark.parametrize("compute", ["auto", "int8"])
def test_int8_weights_multiply_in_int8_where_the_device_can(monkeypatch, name, compute):
    monkeypatch.setattr("halfsafe.precision.devices.profiles.torch_version", lambda: (2, 11))
    found, plain = plan(name, compute), plan(name, "auto", storages={"plain": "bf16"})
    assert (modes(found)["int8"] == "int8") == (name not in NO_INT8)
    assert found.choice.used == plain.choice.used and found.activation_dtype == plain.activation_dtype
    assert modes(found).get("plain") == modes(plain).get("plain") and "nvfp4" not in modes(found)
    told = [setting for setting, _ in found.without_effect]
    assert told == (["compute=int8"] if compute == "int8" and name in NO_INT8 else [])
    if name in NO_INT8:
        assert f"{name} has no int8 matmul" in found.decisions["int8"].reason


@pytest.mark.parametrize(("profile", "stream"), [("sm_75", "fp32"), ("sm_86", "bf16"), ("cpu", "fp32")])
def test_the_stream_is_fp32_without_bf16(profile, stream):
    found = plan(profile, "int8")
    assert found.activation_dtype == stream and modes(found)["int8"] == "int8"


@pytest.mark.parametrize("compute", ["fp16", "fp16_safe", "bf16", "fp32"])
def test_a_dtype_that_is_asked_for_dequantizes(compute):
    found = plan("sm_89", compute)
    assert "int8" not in modes(found).values()
    assert f"as {compute} was asked for" in found.decisions["int8"].reason


def test_a_rule_that_cannot_act_leaves_the_layer_as_it_is_without_it():
    found = plan("sm_89", "auto", "int8 compute=fp8\nfp8 compute=int8\nnvfp4 compute=int8")
    assert found.decisions["int8"].mode == "int8" and "nvfp4" not in found.decisions
    assert [setting for setting, _ in found.without_effect] == ["int8 compute=fp8", "fp8 compute=int8", "nvfp4 compute=int8"]


def test_a_model_without_such_weights_is_told_what_to_load():
    for compute, storage in (("int8", "int8"), ("fp8", "fp8_e4m3fn")):
        ((setting, reason),) = plan("sm_89", compute, storages={"plain": "bf16"}).without_effect
        assert setting == f"compute={compute}" and reason.endswith(f"storage {storage}")
    assert plan("sm_89", "int8", storages=None).without_effect == ()


def test_sums_of_int8_are_not_what_a_rule_can_set():
    ((setting, reason),) = plan("sm_89", "int8", "int8 accumulation=fp16").without_effect
    assert setting == "int8 accumulation=fp16" and "multiply in int8" in reason
