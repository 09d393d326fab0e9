"""Models fitted into a device's memory by fewer bits than int8 has: they fit, at the least predicted error."""

from itertools import product
from math import prod, sqrt

import pytest
from halfsafe.precision.devices import detect as devices
from halfsafe.precision.dtypes import QUANTIZED_NAMES
from halfsafe.precision.formats.comfy_format import specs_of
from halfsafe.precision.formats.stored_weight import StoredWeight
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.fit import FITTED, PREDICTED_ERROR, bytes_in, fit_layers
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.plan.storage import plan_load, plan_storage
from hypothesis import given, settings
from hypothesis import strategies as st
from support.storing import normal_weight

GIB = 1 << 30
SIZES = st.sampled_from([16, 48, 64, 320, 1024, 4096])


@st.composite
def models(draw):
    shapes = draw(st.lists(st.tuples(SIZES, SIZES), min_size=1, max_size=6))
    layers = [LayerSpec(f"blocks.{i}", "Linear", shape) for i, shape in enumerate(shapes)]
    steps = draw(st.lists(st.tuples(*[st.floats(0.001, 0.1)] * 3), min_size=len(layers), max_size=len(layers)))
    errors = {(layer.name, storage): sum(step[: i + 1]) for layer, step in zip(layers, steps, strict=True) for i, storage in enumerate(FITTED)}
    return layers, lambda layer, storage: errors[layer, storage]


def total(layers, storages, error):
    size = sum(bytes_in(storages[layer.name], *layer.shape) for layer in layers)
    weights = sum(prod(layer.shape) for layer in layers)
    return size, sqrt(sum(prod(layer.shape) * error(layer.name, storages[layer.name]) ** 2 for layer in layers) / weights)


def possible(layer):
    return [s for s in FITTED if s != "w6a8" or layer.shape[1] % 32 == 0]


def every_choice(layers):
    return (dict(zip((layer.name for layer in layers), found, strict=True)) for found in product(*map(possible, layers)))


@given(models(), st.floats(0, 1.2))
@settings(max_examples=80, deadline=None)
def test_a_fit_fits_and_is_no_worse_than_one_storage_for_all(model, share):
    layers, error = model
    room = int(share * sum(bytes_in("int8", *layer.shape) for layer in layers))
    found = fit_layers(layers, room, QUANTIZED_NAMES, error)
    fitting = [choice for choice in every_choice(layers) if total(layers, choice, error)[0] <= room]
    assert (found is None) == (not fitting)
    if found is None:
        return
    assert (found.bytes, found.error) == pytest.approx(total(layers, found.storages, error)) and found.bytes <= room
    uniform = [choice for choice in fitting if len(set(choice.values())) == 1]
    assert all(found.error <= total(layers, choice, error)[1] * (1 + 1e-9) for choice in uniform)


@given(models(), st.floats(0.4, 1.1), st.floats(0.4, 1.1))
@settings(max_examples=80, deadline=None)
def test_more_memory_is_never_a_larger_error(model, one, other):
    layers, error = model
    size = sum(bytes_in("int8", *layer.shape) for layer in layers)
    less, more = (fit_layers(layers, int(share * size), QUANTIZED_NAMES, error) for share in sorted((one, other)))
    assert less is None or (more is not None and more.error <= less.error * (1 + 1e-9))


@given(models())
@settings(max_examples=40, deadline=None)
def test_the_least_error_is_taken_where_everything_fits(model):
    layers, error = model
    found = fit_layers(layers, 1 << 40, QUANTIZED_NAMES, error)
    assert set(found.storages.values()) == {"int8"}


def test_a_layer_that_loses_little_goes_first():
    layers = [LayerSpec(name, "Linear", (1024, 1024)) for name in ("delicate", "robust")]
    errors = {"delicate": 3.0, "robust": 1.0}
    found = fit_layers(layers, (2 << 20) - 50_000, QUANTIZED_NAMES, lambda layer, s: errors[layer] * PREDICTED_ERROR[s])
    assert found.storages == {"delicate": "int8", "robust": "w6a8"}


def test_a_storage_that_comfyui_lacks_is_not_chosen():
    layers = [LayerSpec("blocks.0", "Linear", (1024, 1024))]
    room = bytes_in("w6a8", 1024, 1024)
    assert fit_layers(layers, room, QUANTIZED_NAMES).storages == {"blocks.0": "w6a8"}
    assert fit_layers(layers, room, ("int8", "w4a8")).storages == {"blocks.0": "w4a8"}
    assert fit_layers(layers, room, ("int8",)) is None


def test_a_layer_that_none_of_them_can_hold_is_no_fit():
    layers = [LayerSpec("blocks.0", "Linear", (1024, 1024)), LayerSpec("blocks.1", "Linear", (1024, 63))]
    assert fit_layers(layers, GIB, QUANTIZED_NAMES) is None


def test_the_weight_that_comfyui_tells_the_model_by_is_not_packed():
    told, other = (LayerSpec(f"blocks.1.transformer_blocks.0.attn2.to_{kind}", "Linear", (640, 2048)) for kind in "kv")
    room = bytes_in("int8", 640, 2048) + bytes_in("w4a8", 640, 2048)
    assert fit_layers([told, other], room, QUANTIZED_NAMES).storages == {told.name: "int8", other.name: "w4a8"}
    assert fit_layers([told], bytes_in("w4a8", 640, 2048), QUANTIZED_NAMES) is None
    for storage in ("w6a8", "w4a8"):
        decisions = plan_storage([told, other], storage, rules_from())
        assert decisions[told.name].storage == "int8" and "ComfyUI tells the model" in decisions[told.name].reason
        assert decisions[other.name].storage == storage
    assert plan_storage([told], "fp8_e4m3fn", rules_from())[told.name].storage == "fp8_e4m3fn"


@pytest.mark.parametrize("storage", FITTED)
def test_bytes_are_those_of_the_tensors_without_the_text_of_their_settings(storage):
    specs = specs_of(StoredWeight("layer.weight", normal_weight((48, 320))), storage)
    assert bytes_in(storage, 48, 320) == sum(spec.bytes for spec in specs if not spec.name.endswith("comfy_quant"))


def planned(profile, gib, formats=QUANTIZED_NAMES, rules="", **errors):
    layers = [LayerSpec(f"blocks.{i}.ffn", "Linear", (4096, 4096)) for i in range(512)]
    facts = ModelFacts(layers, 512 << 24, "bf16", ("bf16", "fp32"))
    return plan_load(facts, devices.detect(profile=profile), "auto", "auto", rules_from(rules, "none"), int(gib * GIB), formats, **errors)


def test_auto_fits_what_is_too_large_in_int8_and_says_what_it_costs():
    plan = planned("sm_86", 9)
    held = [decision.storage for decision in plan.decisions.values()]
    assert set(held) == {"int8", "w6a8"} and "in and out at each step" in plan.storage.reason
    assert f"{held.count('w6a8')} layers in w6a8 take" in plan.storage.reason
    assert all(bool(decision.reason) == (decision.storage != "int8") for decision in plan.decisions.values())
    assert {d.storage for d in planned("sm_86", 7.5).decisions.values()} == {"w6a8", "w4a8"}
    assert {d.storage for d in planned("sm_86", 10.1).decisions.values()} == {"int8"}
    assert {d.mode for d in plan.compute.decisions.values()} == {"int8"}


def test_what_does_not_fit_in_4_bits_stays_in_int8_with_a_word():
    plan = planned("sm_86", 4)
    assert {d.storage for d in plan.decisions.values()} == {"int8"}
    assert "Fewer bits do not make it fit either" in plan.storage.reason and "in and out" in plan.storage.reason


def test_without_a_kernel_for_them_few_bits_are_named_and_not_taken():
    plan = planned("sm_75", 9)
    assert {d.storage for d in plan.decisions.values()} == {"int8"}
    assert "needs sm_80" in plan.storage.reason and "storage=w4a8 makes it fit" in plan.storage.reason


def test_a_layer_that_a_rule_stores_in_int8_stays_so():
    plan = planned("sm_86", 9, rules="blocks.1?.ffn storage=int8")
    assert {plan.decisions[f"blocks.1{i}.ffn"].storage for i in range(10)} == {"int8"}
    assert "w6a8" in {decision.storage for decision in plan.decisions.values()}


def test_errors_that_were_measured_decide_instead_of_the_predicted_ones():
    plan = planned("sm_86", 9, errors=lambda layer, storage: (1 if int(layer.split(".")[1]) < 200 else 9) * PREDICTED_ERROR[storage])
    smaller = {int(name.split(".")[1]) for name, decision in plan.decisions.items() if decision.storage != "int8"}
    assert smaller and max(smaller) < 512 and smaller >= set(range(200))
