import dataclasses

import pytest
import torch
from halfsafe.precision.base.dtypes import QUANTIZED_NAMES
from halfsafe.precision.devices import detect as devices
from halfsafe.precision.formats.checkpoint import Checkpoint, StoredWeight
from halfsafe.precision.formats.comfy_format import specs_of
from halfsafe.precision.formats.plain import ONE_SCALE
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.plan.choice import Choice
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts, file_dtype, layer_specs
from halfsafe.precision.plan.layers import LoadTarget, plan_storage
from halfsafe.precision.plan.load import plan_encoder, plan_load
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.plan.storage import choose_encoder_storage, choose_storage
from support.storing import LAYERS as FEW_LAYERS
from support.storing import normal_weight

LAYERS = [*FEW_LAYERS, LayerSpec("img_emb.table", "Embedding", (10, 32))]


def facts(parameters=10**9, file_dtype="bf16", supported=("bf16", "fp32"), native_fp8=()):
    return ModelFacts(LAYERS, parameters, file_dtype, supported, native_fp8)


def planned(profile, storage="auto", compute="auto", text="", free=None, host=None, **model):
    device, rules = devices.detect(profile=profile), rules_from(text)
    return plan_load(facts(**model), storage, compute, rules, LoadTarget(device, free, streamed_from=host))


def test_fp8_goes_to_linear_layers_that_no_rule_keeps():
    decisions = plan_storage(LAYERS, "fp8_e4m3fn", rules_from())
    assert {name: d.storage for name, d in decisions.items()} == {
        "blocks.0.ffn.0": "fp8_e4m3fn",
        "blocks.0.norm3": "as_file",
        "time_embedding.0": "as_file",
        "patch_embedding": "as_file",
        "img_emb.table": "as_file",
    }
    assert {name for name, d in decisions.items() if d.kept} == {"time_embedding.0", "patch_embedding", "img_emb.table"}
    assert all(decisions[name].why_stored for name in decisions if decisions[name].kept)


def test_own_rules_move_layers_both_ways():
    rules = rules_from("time_embedding.* storage=fp8_e5m2\nblocks.0.* storage=fp16  # outliers")
    decisions = plan_storage(LAYERS, "fp8_e4m3fn", rules)
    assert decisions["time_embedding.0"].storage == "fp8_e5m2"
    assert (decisions["blocks.0.ffn.0"].storage, decisions["blocks.0.ffn.0"].why_stored) == ("fp16", "outliers")


def test_a_rule_cannot_put_a_convolution_into_fp8():
    decision = plan_storage(LAYERS, "bf16", rules_from("patch_embedding storage=fp8_e4m3fn", "none"))["patch_embedding"]
    assert decision.storage == "as_file" and "only Linear" in decision.why_stored


def test_the_risk_of_a_compute_that_was_asked_for_is_told():
    assert any("overflow" in note for note in planned("sm_86", compute="fp16").compute.notes)


def test_fp8_compute_with_units():
    result = planned("sm_89", storage="fp8_e4m3fn", compute="fp8")
    assert (result.compute.choice.used, result.compute.fp8_matmul, result.without_effect) == ("bf16", True, ())
    assert {name: d.mode for name, d in result.compute.decisions.items()} == {"blocks.0.ffn.0": "fp8"}


FFN = "blocks.0.ffn.0"


@pytest.mark.parametrize("profile", ["sm_89", "sm_120", "gfx1201"])
def test_auto_multiplies_in_fp8_where_the_device_gains_and_says_the_cost(profile):
    result = planned(profile, native_fp8={FFN}, file_dtype="fp8_e4m3fn").compute
    assert result.fp8_matmul and {name: d.mode for name, d in result.decisions.items()} == {FFN: "fp8"}
    assert (
        "multiply in fp8" in result.choice.reason
        and "1.4 times the error" in result.choice.reason
        and result.without_effect == ()
    )


@pytest.mark.parametrize(
    ("profile", "options", "told"),
    [
        ("sm_86", {}, False), ("sm_75", {}, False), ("xpu", {}, False), ("sm_89", {"storage": "bf16"}, False),
        ("sm_89", {"compute": "bf16"}, False), ("sm_89", {"compute": "fp16_safe"}, False), ("sm_89", {"native_fp8": ()}, True),
    ],
)  # fmt: skip
def test_auto_unpacks_fp8_weights_elsewhere_and_where_the_file_asks_for_full_precision(profile, options, told):
    result = planned(profile, **{"native_fp8": {FFN}, "file_dtype": "fp8_e4m3fn"} | options).compute
    assert not result.fp8_matmul and "fp8" not in {decision.mode for decision in result.decisions.values()}
    assert ("compute=fp8 multiplies them as stored" in result.choice.reason) is told


@pytest.mark.parametrize(
    ("profile", "compute", "storage", "mode"),
    [
        ("sm_61", "auto", "fp8_e4m3fn", None), ("sm_75", "auto", "int8", "int8"), ("sm_86", "auto", "int8", "int8"),
        ("sm_86", "bf16", "int8", "bf16"), ("sm_89", "auto", "int8", "int8"), ("sm_89", "fp8", "fp8_e4m3fn", "fp8"),
        ("sm_89", "fp16_safe", "int8", "fp16_wide"), ("gfx1100", "auto", "int8", "bf16"), ("gfx1201", "auto", "int8", "bf16"),
        ("sm_90", "auto", "int8", "bf16"), ("sm_90", "int8", "int8", "int8"), ("sm_90", "fp8", "fp8_e4m3fn", "fp8"),
        ("mps_m3", "auto", "int8", "bf16"), ("cpu", "auto", "int8", "int8"), ("sm_100", "auto", "fp8_e4m3fn", None), ("xpu", "auto", "fp8_e4m3fn", None),
    ],
)  # fmt: skip
def test_storage_auto_keeps_the_file_where_it_fits_and_halves_it_where_not(profile, compute, storage, mode):
    assert planned(profile, compute=compute, free=24 * 2**30, file_dtype="fp16").storage.used == "as_file"
    tight = planned(profile, compute=compute, free=24 * 2**30, parameters=14 * 10**9)
    assert tight.storage.used == storage and "26.08 GiB" in tight.storage.reason
    decision = tight.compute.decisions.get("blocks.0.ffn.0")
    assert (decision and decision.mode) == mode


@pytest.mark.parametrize(
    ("file_dtype", "compute", "used"),
    [
        ("bf16", "auto", "as_file"),
        ("bf16", "fp16_safe", "as_file"),
        ("fp16", "fp16", "as_file"),
        ("fp32", "bf16", "bf16"),
    ],
)
def test_storage_auto_leaves_what_is_streamed_from_memory_and_says_so(file_dtype, compute, used):
    large = {"compute": compute, "free": 24 * 2**30, "parameters": 14 * 10**9, "file_dtype": file_dtype}
    streamed = planned("sm_86", host=64 * 2**30, **large).storage
    rest = 30.15 if file_dtype == "fp32" else 4.08
    assert streamed.used == used and f"streams the remaining {rest:.2f} GiB" in streamed.reason
    assert "storage=" in streamed.reason and "13.04 GiB" in streamed.reason
    short = planned("sm_86", host=3 * 2**30, **large).storage
    assert short.used in ("int8", "fp8_e4m3fn") and "read from disk at each step: only 3.00 GiB" in short.reason
    fitting = large | {"parameters": 10**9}
    assert planned("sm_86", host=0, **fitting).storage == planned("sm_86", **fitting).storage


def test_a_layer_that_no_rotation_divides_stays_in_sixteen_bit_with_its_reason():
    layers = [LayerSpec("blocks.0.in", "Linear", (64, 36)), LayerSpec("blocks.0.ffn.0", "Linear", (64, 32))]
    model = ModelFacts(layers, 14 * 10**9, "bf16", ("bf16", "fp32"))
    result = plan_load(model, "auto", "auto", rules_from(), LoadTarget(devices.detect(profile="sm_86"), 24 * 2**30))
    assert {name: decision.storage for name, decision in result.layers.items()} == {
        "blocks.0.in": "as_file",
        "blocks.0.ffn.0": "int8",
    }
    assert result.layers["blocks.0.in"].kept and "its 36 inputs are not" in result.layers["blocks.0.in"].why_stored
    assert {name: decision.mode for name, decision in result.compute.decisions.items()} == {"blocks.0.ffn.0": "int8"}


def test_storage_auto_does_not_keep_fp32_weights_for_16_bit_maths():
    assert planned("sm_86", file_dtype="fp32").storage.used == "bf16"
    assert planned("sm_61", file_dtype="fp32").storage.used == "as_file"


def test_rules_that_cannot_act_are_reported():
    settings = {entry.setting: entry.reason for entry in planned("sm_86", text="nowhere.* storage=fp16").without_effect}
    assert "matches no layer" in settings["nowhere.* storage=fp16"]


def checkpoint(**tensors):
    weights = {name: StoredWeight(name, tensor) for name, tensor in tensors.items()}
    return Checkpoint("file", (), {}, weights, [])


def test_classes_are_inferred_without_a_model():
    tensors = {
        "net.a.weight": torch.zeros(4, 4),
        "net.a.bias": torch.zeros(4),
        "net.conv.weight": torch.zeros(4, 4, 1, 3, 3),
        "net.norm.weight": torch.zeros(4),
        "net.token_embedding.weight": torch.zeros(9, 4),
        "other.b.weight": torch.zeros(4, 4),
    }
    layers = layer_specs(checkpoint(**tensors), "net.")
    assert [(layer.name, layer.cls) for layer in layers] == [
        ("a", "Linear"), ("conv", "Conv3d"), ("norm", "Norm"), ("token_embedding", "Embedding"),
    ]  # fmt: skip


def test_file_dtype_is_that_of_most_weights():
    tensors = {"a.weight": torch.zeros(4, 4, dtype=torch.bfloat16), "b": torch.zeros(3)}
    assert file_dtype(checkpoint(**tensors)) == "bf16"


def test_text_encoder_storage():
    apple = devices.detect(profile="mps_m1")
    held, unheld = devices.detect(profile="cpu"), apple.without("fp8_storage", "No fp8 here.")
    model = facts(parameters=5 * 10**9)
    for storage, file_storage, free, device, expected in (
        ("auto", "fp16", 20e9, held, "fp16"), ("auto", "fp8_e4m3fn", 20e9, held, "as_file"), ("auto", "bf16", 5e9, held, "int8"),
        ("auto", "bf16", None, held, "fp16"), ("bf16", "fp16", 5e9, held, "bf16"), ("auto", "fp8_e5m2", 20e9, unheld, "fp16"),
        ("as_file", "fp8_e4m3fnuz", 20e9, unheld, "fp16"), ("as_file", "bf16", 20e9, unheld, "as_file"), ("auto", "bf16", 5e9, unheld, "int8"),
    ):  # fmt: skip
        target = LoadTarget(device, free and int(free))
        choice = choose_encoder_storage(dataclasses.replace(model, file_dtype=file_storage), storage, "fp16", target)
        assert choice.used == expected, (storage, file_storage)
        assert ("No fp8 here." in choice.reason) == (device is unheld and expected == "fp16")
    assert choose_encoder_storage(model, "auto", "fp16", LoadTarget(held, 1, streamed_from=1)).used == "fp16", (
        "streamed from its file"
    )
    assert choose_encoder_storage(model, "auto", "fp16", LoadTarget(held, 1, ("fp8_e4m3fn",))).used == "fp8_e4m3fn", (
        "a ComfyUI without int8"
    )


def test_text_encoder_keeps_embeddings():
    tensors = {"shared.weight": torch.zeros(16, 16), "encoder.block.0.wo.weight": torch.zeros(16, 16)}
    layers = plan_encoder(checkpoint(**tensors), "fp8_e4m3fn", "fp16", LoadTarget(devices.detect(profile="cpu"))).layers
    assert [(own.storage, own.kept) for own in layers.values()] == [("as_file", True), ("fp8_e4m3fn", False)]


# a model that does not fit in int8

GIB = 1 << 30


def fitted(profile, gib, formats=QUANTIZED_NAMES, rules="", compute="auto"):
    """What ``auto`` makes of 8 GiB of int8 on a card with so much memory."""
    layers = [LayerSpec(f"blocks.{i}.ffn", "Linear", (4096, 4096)) for i in range(512)]
    facts = ModelFacts(layers, 512 << 24, "bf16", ("bf16", "fp32"))
    return plan_load(
        facts,
        "auto",
        compute,
        rules_from(rules, "none"),
        LoadTarget(devices.detect(profile=profile), int(gib * GIB), formats),
    )


def held(plan):
    return {decision.storage for decision in plan.layers.values()}


@pytest.mark.parametrize(
    ("gib", "formats", "expected"),
    [
        (10.1, QUANTIZED_NAMES, "int8"), (9, QUANTIZED_NAMES, "w6a8"), (7, QUANTIZED_NAMES, "w4a8"), (4, QUANTIZED_NAMES, "int8"),
        (9, ("int8", "w4a8"), "w4a8"), (9, ("int8",), "int8"),
    ],
)  # fmt: skip
def test_auto_takes_the_most_bits_that_fit_and_says_the_cost(gib, formats, expected):
    plan = fitted("sm_86", gib, formats)
    assert held(plan) == {expected} == {plan.storage.used}
    assert {d.mode for d in plan.compute.decisions.values()} == {"int8"}
    if expected != "int8":
        assert f"{expected} takes" in plan.storage.reason and "in and out at each step" in plan.storage.reason
    elif gib < 10:
        assert "Fewer bits do not make it fit either" in plan.storage.reason and "in and out" in plan.storage.reason


@pytest.mark.parametrize(
    ("profile", "formats", "compute", "expected"),
    [
        ("sm_100", QUANTIZED_NAMES, "auto", "nvfp4"),  # int8 brings no speed there
        ("sm_120", ("int8", "nvfp4"), "auto", "nvfp4"),  # a ComfyUI before 0.31
        ("sm_120", QUANTIZED_NAMES, "auto", "w4a8"),  # of the same size, with less error
        ("sm_120", ("int8", "nvfp4"), "int8", "int8"), ("sm_100", QUANTIZED_NAMES, "fp16", "int8"),  # which would dequantize nvfp4
        ("sm_90", QUANTIZED_NAMES, "auto", "int8"), ("sm_86", ("int8", "nvfp4"), "auto", "int8"),
    ],
)  # fmt: skip
def test_auto_takes_nvfp4_only_where_multiplied_and_8_bits_do_not_fit(profile, formats, compute, expected):
    plan = fitted(profile, 7, formats, compute=compute)
    assert held(plan) == {expected} == {plan.storage.used}
    if expected == "nvfp4":
        assert (
            "nvfp4 takes 4.50 GiB. The error of nvfp4 products is 3.5 times that of fp8 products."
            in plan.storage.reason
        )
    assert held(fitted(profile, 11, formats, compute=compute)) != {"nvfp4"}, "8 bits fit"


def test_without_a_kernel_for_them_few_bits_are_named_and_not_taken():
    plan = fitted("sm_75", 9)
    assert (
        held(plan) == {"int8"}
        and "needs sm_80" in plan.storage.reason
        and "storage=w6a8 makes it fit" in plan.storage.reason
    )


def test_a_layer_that_a_rule_stores_in_int8_stays_so():
    plan = fitted("sm_86", 9, rules="blocks.1?.ffn storage=int8")
    assert {plan.layers[f"blocks.1{i}.ffn"].storage for i in range(10)} == {"int8"} and held(plan) == {"int8", "w6a8"}


def test_the_weight_that_comfyui_tells_the_model_by_is_not_packed():
    told, other = (LayerSpec(f"blocks.1.transformer_blocks.0.attn2.to_{kind}", "Linear", (640, 2048)) for kind in "kv")
    for storage in ("w6a8", "w4a8", "nvfp4"):
        decisions = plan_storage([told, other], storage, rules_from())
        assert (
            decisions[told.name].storage == "int8"
            and "ComfyUI detects the architecture" in decisions[told.name].why_stored
        )
        assert decisions[other.name].storage == storage
    assert {plan_storage([told], name, rules_from())[told.name].storage for name in ("fp8_e4m3fn", "mxfp8")} == {
        "fp8_e4m3fn",
        "mxfp8",
    }


@pytest.mark.parametrize("storage", ["int8", "w6a8", "w4a8"])
def test_bytes_are_those_of_the_tensors_without_the_text_of_their_settings(storage):
    specs = specs_of(StoredWeight("layer.weight", normal_weight((48, 320))), storage)
    assert FORMAT_OF_STORAGE[storage].stored_bytes(48, 320) == sum(
        spec.bytes for spec in specs if not spec.name.endswith("comfy_quant")
    )


GIB = 1 << 30


@pytest.mark.parametrize(("free", "used", "unpacked"), [(9 * GIB, "as_file", "as_file"), (6 * GIB, "int8", "int8")])
def test_auto_reckons_with_weights_that_were_unpacked_while_loading(free, used, unpacked):
    """4 GiB were unpacked to bf16 and 2 GiB are still in fp8: 6 GiB, where all in 16 bit would be 8."""
    shape = (1 << 16, 1 << 15)
    names = [f"blocks.{number}.attn.{layer}" for number in range(2) for layer in ("qkv", "out")][:2]
    data = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    held = StoredWeight(f"{names[1]}.weight", data, ONE_SCALE, {"weight_scale": torch.tensor(1.0)})
    plain = StoredWeight(f"{names[0]}.weight", torch.empty(shape, dtype=torch.bfloat16, device="meta"))
    weights = {weight.name: weight for weight in (plain, held)}
    checkpoint = Checkpoint("made", ("comfy_quant",), {}, weights, [], unpacked=(plain.name,))
    layers = [LayerSpec(name, "Linear", shape) for name in names]
    by_name = {f"{name}.weight": name for name in names}
    model = ModelFacts(layers, 1 << 32, "bf16", ("bf16", "fp32"), checkpoint=checkpoint, names=by_name)
    target = LoadTarget(devices.detect(profile="sm_86"), free)
    choice, plans = choose_storage(model, "auto", Choice("auto", "bf16"), rules_from("", "none"), target)
    assert choice.used == used and "1 of 2 quantized weights were unpacked to bf16" in choice.reason
    assert {name: plans[name].storage for name in names} == {names[0]: unpacked, names[1]: "as_file"}


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn", "nvfp4"])
def test_a_weight_that_comfyui_splits_while_loading_is_not_quantized(storage):
    layer = LayerSpec("pixel_blocks.3.adaLN_modulation.0", "Linear", (6 * 64, 64))
    plan = plan_storage([layer], storage, rules_from("", "none"))[layer.name]
    assert (plan.storage, plan.kept) == ("as_file", True) and "splits" in plan.why_stored
