"""What compute plans decide: per device by hand-written expectation, per layer by rule."""

import pytest
import torch
from halfsafe.precision.base.options import GOALS
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from halfsafe.precision.plan.auto import smallest_storage
from halfsafe.precision.plan.compute import plan_compute, weight_dtype
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.goal import plan_for_goal
from halfsafe.precision.plan.rules import rules_from
from support.shipped import ROOT

LAYERS = [
    LayerSpec("blocks.0.ffn", "Linear", (64, 32)),
    LayerSpec("blocks.0.odd", "Linear", (60, 32)),
    LayerSpec("blocks.0.norm", "RMSNorm", (32,)),
    LayerSpec("patch", "Conv2d", (32, 4, 2, 2)),
    LayerSpec("causal", "CausalConv3d", (32, 4, 2, 2, 2)),
    LayerSpec("table", "Embedding", (10, 32)),
]
WAN = SDXL = ("fp16", "bf16", "fp32")
QWEN_IMAGE = ("bf16", "fp32")
FLUX = ("bf16", "fp16", "fp32")

# profile: (Wan and SDXL, Qwen-Image and Z-Image, Flux), bf16 files
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
AUTO = {
    "sm_61": ("fp32", "fp32", "fp32"),
    **dict.fromkeys(("sm_70", "sm_75"), ("fp16", "fp16_safe", "fp16_safe")),
    **dict.fromkeys(NVIDIA, ("fp16", "bf16", "bf16")),
    **dict.fromkeys(("gfx90a", "gfx942", "gfx1100", "gfx1201", "mps_m3", "xpu"), ("bf16", "bf16", "bf16")),
    "mps_m1": ("fp16_safe", "fp16_safe", "fp16_safe"),
    "cpu": ("fp32", "fp32", "fp32"),
}


def plan(profile="sm_86", compute="auto", supported=WAN, text="", file_dtype="bf16", storages=()):
    facts = ModelFacts(LAYERS, 10**9, file_dtype, supported)
    return plan_compute(facts, detect(profile=profile), compute, rules_from(text), dict(storages))


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_auto_on_every_device(profile):
    for models, expected in zip((WAN, QWEN_IMAGE, FLUX), AUTO[profile], strict=True):
        choice = plan(profile, supported=models).choice
        assert choice.used == expected
        assert choice.reason.endswith(".") and len(choice.reason) > 20


@pytest.mark.parametrize(
    ("profile", "models", "words"),
    [
        ("sm_61", WAN, "1/64"),
        ("sm_75", QWEN_IMAGE, "cannot overflow"),
        ("sm_75", WAN, "lists fp16 for this model and it is fast on RTX 20xx, T4 (Turing). Each result is checked"),
        ("sm_90", WAN, "longer"),
        ("sm_75", FLUX, "fp16_safe cannot overflow; it is estimated to take 5 to 44 % longer"),
        ("gfx1100", WAN, "bf16 is native too and has the range of fp32"),
        ("mps_m1", WAN, "fp16_safe cannot overflow; its cost here is not known"),
        ("sm_86", FLUX, "it is native"),
        ("mps_m1", QWEN_IMAGE, "emulated"),
        ("cpu", FLUX, "That leaves fp32"),
    ],
)
def test_the_reason_names_the_cause(profile, models, words):
    assert words in plan(profile, supported=models).choice.reason


# profile: (quality, every other goal)
DTYPE_OF_GOALS = {
    "sm_75": ("fp16_safe", "fp16_safe"),
    "sm_86": ("fp16_safe", "bf16"),
    "sm_89": ("fp16_safe", "bf16"),
    "cpu": ("fp32", "fp32"),
}


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("profile", DTYPE_OF_GOALS)
def test_goals(profile, goal):
    facts = ModelFacts(LAYERS, 10**9, "bf16", QWEN_IMAGE)
    stored = {"blocks.0.ffn": "fp8_e4m3fn"}
    found, reason = plan_for_goal(facts, detect(profile=profile), goal, stored)
    assert found.choice.used == DTYPE_OF_GOALS[profile][goal != "quality"] and reason
    modes = {name: decision.mode for name, decision in found.decisions.items()}
    assert ("fp8" in modes.values()) == ((profile, goal) == ("sm_89", "speed"))


@pytest.mark.parametrize("goal", ["balanced", "speed", "memory"])
@pytest.mark.parametrize(
    ("profile", "held"), [("sm_75", "bf16"), ("sm_86", "fp16"), ("sm_86", "int8"), ("mps_m1", "fp16"), ("cpu", "fp16")]
)
def test_goals_leave_the_dtype_to_auto(goal, profile, held):
    facts = ModelFacts(LAYERS, 10**9, held, WAN)
    found = plan_for_goal(facts, detect(profile=profile), goal, {"blocks.0.ffn": held})[0]
    assert found.choice.used == AUTO[profile][0]
    modes = [plan.decisions["blocks.0.ffn"].mode for plan in (found, found.fallback) if plan and held == "int8"]
    assert modes == ["int8"] * (2 if held == "int8" else 0), "an fp16 that was asked for would dequantize it"


@pytest.mark.parametrize("profile", AUTO)
def test_plain_fp16_of_auto_has_the_whole_fp16_safe_plan_to_fall_back_to(profile):
    text = "blocks.0.odd compute=fp32"
    found = plan(profile, text=text)
    assert (found.fallback is not None) is (found.choice.used == "fp16")
    if found.fallback:
        safe = plan(profile, "fp16_safe", text=text)
        assert dict(found.fallback.decisions) == dict(safe.decisions) and found.fallback.is_safe
        assert found.fallback.choice.requested == "auto" and "NaN or Inf" in found.fallback.choice.reason
        assert found.unwatched.decisions == safe.decisions and "NaN or Inf" not in found.unwatched.choice.reason
    assert not plan(profile).exchanges or plan(profile).is_safe
    assert all(plan(profile, compute).fallback is None for compute in ("fp16", "fp16_safe", "bf16", "fp32"))


@pytest.mark.parametrize("profile", PROFILE_NAMES)
def test_fp16_that_is_asked_for_is_plain_fp16(profile):
    found = plan(profile, "fp16")
    assert (found.choice.used, found.activation_dtype, dict(found.decisions)) == ("fp16", "fp16", {})


# What speed advises to load a 16-bit model with.
ADVISED = {
    "sm_61": "", "sm_75": "", "sm_86": "int8", "sm_89": "int8", "sm_90": "", "sm_100": "fp8_e4m3fn", "sm_120": "int8",
    "gfx1100": "", "gfx1201": "", "xpu": "", "mps_m1": "",
}  # fmt: skip


@pytest.mark.parametrize("profile", ADVISED)
def test_a_goal_that_8_bits_would_serve_says_how_to_get_them(profile, monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    facts, device, storage = ModelFacts(LAYERS, 10**9, "bf16", QWEN_IMAGE), detect(profile=profile), ADVISED[profile]
    plans = {
        goal: plan_for_goal(facts, device, goal, {"blocks.0.ffn": "bf16"}) for goal in ("speed", "balanced", "memory")
    }
    reason = plans["speed"][1]
    assert (
        (f"Set storage to {storage}, here or in the loader, " in reason) is bool(storage) is ("Set storage" in reason)
    )
    assert "Set storage" not in plans["balanced"][1] and plans["memory"] == plans["balanced"]


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8", "nvfp4"])
def test_a_quantized_model_is_not_told_to_be_loaded_again(storage):
    facts = ModelFacts(LAYERS, 10**9, "bf16", QWEN_IMAGE)
    found = plan_for_goal(facts, detect(profile="sm_89"), "speed", {"blocks.0.ffn": storage, "patch": "bf16"})
    assert "Set storage" not in found[1]


def test_speed_without_the_kernels_of_int8_advises_fp8_where_that_gains():
    facts = ModelFacts(LAYERS, 10**9, "bf16", QWEN_IMAGE)
    for profile, advised in (("sm_89", True), ("sm_86", False)):
        device = detect(profile=profile).without("int8_kernels", "torch is built for CUDA 12.8.")
        reason = plan_for_goal(facts, device, "speed", {})[1]
        assert (
            "storage to fp8_e4m3fn, here or in the loader, to multiply in 8 bits. Not int8: torch is built for CUDA 12.8."
            in reason
        ) is advised


def test_speed_on_hopper_keeps_16_bits_and_says_what_was_measured():
    """8-bit weights were slower than 16-bit ones in every whole call that an H200 has run."""
    facts, device = ModelFacts(LAYERS, 10**9, "bf16", QWEN_IMAGE), detect(profile="sm_90")
    reason = plan_for_goal(facts, device, "speed", {"blocks.0.ffn": "bf16"})[1]
    assert "fp8 ran at 0.29 to 0.65 times" in reason and "int8 ran at 0.33 to 0.67 times" in reason
    found, reason = plan_for_goal(facts, device, "speed", {"blocks.0.ffn": "fp8_e4m3fn"})
    assert "blocks.0.ffn" not in found.decisions and "fp8 products" not in reason
    assert "int8 products" not in plan_for_goal(facts, device, "speed", {"blocks.0.ffn": "int8"})[1]


def test_speed_multiplies_in_int8_what_is_held_in_it():
    facts = ModelFacts(LAYERS, 10**9, "int8", QWEN_IMAGE)
    found, reason = plan_for_goal(facts, detect(profile="sm_86"), "speed", {"blocks.0.ffn": "int8"})
    assert (
        found.decisions["blocks.0.ffn"].mode == "int8" and "1.10 to 2.00 times the speed of 16 bit (A10G 1.84" in reason
    )


def test_fp16_safe_decides_every_matrix_layer_and_nothing_else():
    found = plan(compute="fp16_safe")
    assert {name: decision.mode for name, decision in found.decisions.items()} == {
        "blocks.0.ffn": "fp16_wide", "blocks.0.odd": "fp16_wide", "patch": "fp16_wide", "causal": "fp16_wide",
    }  # fmt: skip
    assert (found.activation_dtype, weight_dtype(found.choice.used)) == ("fp32", "fp16")


def test_a_wider_stream_makes_the_other_layers_keep_their_dtype():
    found = plan(compute="bf16", text="blocks.0.ffn stream=fp32")
    assert found.mixes_fp32_in
    assert {name: (d.mode, d.stream) for name, d in found.decisions.items()} == {
        "blocks.0.ffn": ("bf16", "fp32"), "blocks.0.odd": ("bf16", "same"), "patch": ("bf16", "same"), "causal": ("bf16", "same"),
    }  # fmt: skip


def test_a_rule_on_layers_that_multiply_nothing_has_no_effect():
    found = plan(text="class:RMSNorm compute=fp32\ntable stream=fp32\nblocks.* compute=fp32", compute="bf16")
    assert [entry.setting for entry in found.without_effect] == ["class:RMSNorm compute=fp32", "table stream=fp32"]
    assert set(found.decisions) == {"blocks.0.ffn", "blocks.0.odd"}


def test_fp8_products_need_fp8_weights_of_sizes_that_are_multiples_of_16():
    stored = {"blocks.0.ffn": "fp8_e4m3fn", "blocks.0.odd": "fp8_e4m3fn"}
    found = plan("sm_89", "fp8", supported=QWEN_IMAGE, storages=stored)
    assert {name: decision.mode for name, decision in found.decisions.items()} == {
        "blocks.0.ffn": "fp8",
        "blocks.0.odd": "bf16",
    }
    assert "60 x 32" in found.without_effect[0].reason


def test_a_rule_for_fp8_on_a_device_without_it_says_so():
    found = plan("sm_86", "bf16", text="blocks.0.ffn compute=fp8", storages={"blocks.0.ffn": "fp8_e4m3fn"})
    assert "no fp8 matmul" in found.without_effect[0].reason


@pytest.mark.parametrize("sums", ["fp16", "fp32"])
def test_a_rule_decides_a_layers_sums_where_they_can_be_switched(sums):
    text = f"blocks.0.* accumulation={sums}"
    found = plan("sm_86", compute="fp16", text=text)
    asked = {name for name, decision in found.decisions.items() if decision.sums == sums}
    assert asked and all(name.startswith("blocks.0.") for name in asked)
    assert all(found.decisions[name].mode == "fp16" for name in asked)
    assert not any(text in entry.setting for entry in found.without_effect)


@pytest.mark.parametrize(
    ("profile", "compute"), [("sm_86", "bf16"), ("sm_86", "fp16_safe"), ("gfx1100", "fp16"), ("cpu", "fp32")]
)
def test_a_rule_on_sums_that_cannot_act_is_reported(profile, compute):
    text = "blocks.0.* accumulation=fp16"
    found = plan(profile, compute=compute, text=text)
    assert not any(decision.sums for decision in found.decisions.values())
    assert [entry.reason for entry in found.without_effect if entry.setting == text]


# weights stored in int8

STORED = {"int8": "int8", "fp8": "fp8_e4m3fn", "nvfp4": "nvfp4", "plain": "bf16"}
NO_INT8 = ("sm_61", "sm_70", "mps_m1", "mps_m3", "xpu")  # torch before 2.15 has no int8 matmul on MPS


MAY_GAIN = ("sm_75", "sm_86", "sm_89", "sm_120", "cpu")
"""Of a Turing nothing was measured; the others gain in each measurement."""


def plan_stored(profile, compute, text="", storages=STORED):
    facts = ModelFacts([LayerSpec(name, "Linear", (64, 32)) for name in STORED], 10**9, "bf16", QWEN_IMAGE)
    return plan_compute(facts, detect(profile=profile), compute, rules_from(text), storages)


def modes(found):
    return {name: decision.mode for name, decision in found.decisions.items()}


@pytest.mark.parametrize("name", PROFILE_NAMES)
@pytest.mark.parametrize("compute", ["auto", "int8"])
def test_int8_weights_multiply_in_int8_where_the_device_can_and_for_auto_where_it_may_gain(monkeypatch, name, compute):
    monkeypatch.setattr("halfsafe.precision.devices.profiles.torch_version", lambda: (2, 11))
    found, plain = plan_stored(name, compute), plan_stored(name, "auto", storages={"plain": "bf16"})
    assert (modes(found)["int8"] == "int8") == (name in MAY_GAIN if compute == "auto" else name not in NO_INT8)
    assert found.choice.used == plain.choice.used and found.activation_dtype == plain.activation_dtype
    assert modes(found).get("plain") == modes(plain).get("plain") and "nvfp4" not in modes(found)
    told = [entry.setting for entry in found.without_effect]
    assert told == (["compute=int8"] if compute == "int8" and name in NO_INT8 else [])
    if compute == "int8" and name in NO_INT8:
        assert f"{name} has no int8 matmul" in found.decisions["int8"].reason
    elif modes(found)["int8"] != "int8":
        assert "unpacked in each call: " in found.decisions["int8"].reason


TABLE = ROOT / "docs" / "internals" / "eight-bits.md"
LAYERS_BY_WIDTH = {
    "wide": ("ffn", (12288, 3072)),
    "narrow": ("attn1.to_q", (640, 640)),
    "text": ("middle_block.1.attn2.to_k", (640, 2048)),
}
STORED_AS = {"fp8 of a file": "fp8_e4m3fn", "int8": "int8"}


def row_of(name: str) -> str:
    """A line of the table: how each storage computes under ``auto`` in a layer of each width, and why, on a device."""
    cells, reasons = [], {}
    layers = [LayerSpec(layer, "Linear", shape) for layer, shape in LAYERS_BY_WIDTH.values()]
    for storage in STORED_AS.values():
        facts = ModelFacts(layers, 10**9, storage, QWEN_IMAGE, native_fp8={layer.name for layer in layers})
        stored = {layer.name: storage for layer in layers}
        found = plan_compute(facts, detect(profile=name), "auto", rules_from(), stored)
        for layer in layers:
            decision = found.decisions.get(layer.name)
            eight = decision is not None and decision.mode in ("fp8", "int8")
            cells.append(decision.mode if eight else "unpacked")
            reasons |= {decision.reason: None} if decision and not eight and layer.shape[1] != 2048 else {}
    stored, _ = smallest_storage(detect(profile=name))
    return f"| {name} | {' | '.join([*cells, stored, ' '.join(each for each in reasons if each)])} |"


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_the_table_says_how_8_bits_compute_on_each_device(monkeypatch, name):
    monkeypatch.setattr("halfsafe.precision.devices.profiles.torch_version", lambda: (2, 11))
    assert row_of(name) in TABLE.read_text(encoding="utf-8").splitlines(), f"write: {row_of(name)}"


def test_products_that_are_requested_are_made_in_text_and_narrow_layers_too():
    layers = [LayerSpec(layer, "Linear", shape) for layer, shape in LAYERS_BY_WIDTH.values()]
    for storage, compute in (("fp8_e4m3fn", "fp8"), ("int8", "int8")):
        stored = {layer.name: storage for layer in layers}
        facts = ModelFacts(layers, 10**9, storage, QWEN_IMAGE)
        found = plan_compute(facts, detect(profile="sm_90"), compute, rules_from(), stored)
        assert {*modes(found).values()} == {compute}
    found = plan_compute(facts, detect(profile="sm_90"), "auto", rules_from("ffn compute=int8"), stored)
    assert modes(found) == {"ffn": "int8", "attn1.to_q": "bf16", "middle_block.1.attn2.to_k": "bf16"}


@pytest.mark.parametrize(("profile", "stream"), [("sm_75", "fp32"), ("sm_86", "bf16"), ("cpu", "fp32")])
def test_the_stream_is_fp32_without_bf16(profile, stream):
    found = plan_stored(profile, "int8")
    assert found.activation_dtype == stream and modes(found)["int8"] == "int8"


@pytest.mark.parametrize("compute", ["fp16", "fp16_safe", "bf16", "fp32"])
def test_a_dtype_that_is_asked_for_dequantizes(compute):
    found = plan_stored("sm_89", compute)
    assert "int8" not in modes(found).values()
    assert f"because {compute} was requested" in found.decisions["int8"].reason


def test_a_rule_that_cannot_act_leaves_the_layer_as_it_is_without_it():
    found = plan_stored("sm_89", "auto", "int8 compute=fp8\nfp8 compute=int8\nnvfp4 compute=int8")
    assert found.decisions["int8"].mode == "int8" and "nvfp4" not in found.decisions
    assert [entry.setting for entry in found.without_effect] == [
        "int8 compute=fp8",
        "fp8 compute=int8",
        "nvfp4 compute=int8",
    ]


def test_a_model_without_such_weights_is_told_what_to_load():
    for compute, storage in (("int8", "int8"), ("fp8", "fp8_e4m3fn")):
        (entry,) = plan_stored("sm_89", compute, storages={"plain": "bf16"}).without_effect
        assert entry.setting == f"compute={compute}" and entry.reason.endswith(f"storage {storage}")


def test_sums_of_int8_are_not_what_a_rule_can_set():
    (entry,) = plan_stored("sm_89", "int8", "int8 accumulation=fp16").without_effect
    assert entry.setting == "int8 accumulation=fp16" and "multiply in int8" in entry.reason


# models in memory

SMALL = (LayerSpec("a", "Linear", (32, 32)), LayerSpec("b", "Linear", (32, 32)), LayerSpec("norm", "LayerNorm", (32,)))
FACTS = ModelFacts(SMALL, 2048, "bf16", ("bf16", "fp32"))


def loaded(compute="fp16_safe", text="", foreign=(), held="bf16"):
    rules = rules_from(text, "none")
    plan = plan_compute(FACTS, detect(profile="sm_86"), compute, rules, {})
    return plan.on_loaded(FACTS, rules, dict.fromkeys(foreign, "other.pack"), {"a": held, "b": "bf16", "norm": "bf16"})


def test_layers_of_another_loader_run_in_fp32_and_are_named_once():
    found = loaded(foreign=("a", "norm"))
    assert {name: (d.mode, d.stream) for name, d in found.decisions.items()} == {
        "a": ("fp32", "same"),
        "b": ("fp16_wide", "same"),
    }
    assert found.decisions["a"].reason == "other.pack has its own matmul: runs in fp32"
    assert [entry.setting for entry in found.without_effect] == ["compute=fp16_safe"]


def test_foreign_layers_keep_any_other_arithmetic():
    assert loaded("bf16", foreign=("a", "b")).decisions == {}


def test_rules_that_cannot_act_on_a_loaded_model_are_listed():
    found = loaded("bf16", "nowhere compute=fp32\na storage=fp8_e4m3fn")
    assert [entry.setting for entry in found.without_effect] == ["nowhere compute=fp32", "a storage=fp8_e4m3fn"]
    assert "Save Model" in found.without_effect[1].reason


@pytest.mark.parametrize(("text", "held", "late"), [
    ("a storage=int8", "int8", []),
    ("* storage=bf16\na storage=int8", "int8", []),
    ("a storage=as_file", "bf16", []),
    ("a storage=as_file", "int8", []),
    ("a storage=bf16", "fp16", ["a storage=bf16"]),
    ("* storage=int8", "int8", ["* storage=int8"]),
])  # fmt: skip
def test_a_rule_on_storage_that_the_loaded_model_meets_is_not_late(text, held, late):
    assert [entry.setting for entry in loaded("bf16", text, held=held).without_effect] == late
