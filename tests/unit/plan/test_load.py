"""What the weights of a model are stored in once loaded, and the bytes that this takes."""

from dataclasses import replace

import pytest
import torch
from halfsafe.precision.devices import detect as devices
from halfsafe.precision.formats.checkpoint import Checkpoint, StoredWeight, read_checkpoint
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.formats.plain import ONE_SCALE
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE, weight_in_format
from halfsafe.precision.plan.facts import facts_of
from halfsafe.precision.plan.layers import LoadTarget, plan_weights
from halfsafe.precision.plan.load import plan_encoder, plan_load
from halfsafe.precision.plan.rules import rules_from
from support import dialects
from support.storing import LAYERS

FFN_LAYER = "blocks.0.ffn.0"
FFN, KEPT = 64 * 32, 32 + 32 * 32 + 32 * 16 * 4


def weights(dtype=torch.bfloat16, prefix="", **others):
    tensors = {f"{layer.name}.weight": torch.zeros(layer.shape, dtype=dtype) for layer in LAYERS}
    named = {prefix + name: tensor for name, tensor in {**tensors, **others}.items()}
    return {name: StoredWeight(name, tensor) for name, tensor in named.items()}


def in_memory(
    stored, storage="as_file", compute="bf16", rules="", prefix="", formats=FORMAT_OF_STORAGE, device="sm_86"
):
    """The plan of a load of these weights: a model of ``LAYERS`` below a prefix of the names, and other parts of the file."""
    names = {f"{prefix}{layer.name}.weight": layer.name for layer in LAYERS}
    facts = facts_of(Checkpoint("file", (), {}, stored, []), prefix, LAYERS, ("bf16", "fp32"), names)
    device = devices.detect(profile=device) if isinstance(device, str) else device
    return plan_load(facts, storage, compute, rules_from(rules), LoadTarget(device, formats=formats))


def encoder_of(weight, device, formats=FORMAT_OF_STORAGE, default="bf16"):
    return plan_encoder(
        Checkpoint("file", (), {}, {weight.name: weight}, []), "as_file", default, LoadTarget(device, formats=formats)
    )


@pytest.mark.parametrize(
    ("file", "storage", "compute", "dtype"),
    [
        (torch.bfloat16, "fp8_e4m3fn", "fp32", "bf16"),
        (torch.bfloat16, "fp8_e4m3fn", "fp16", "fp16"),
        (torch.float16, "int8", "fp32", "fp16"),
        (torch.float32, "int8", "fp32", "fp32"),
        (torch.float32, "int8", "bf16", "bf16"),
        (torch.bfloat16, "as_file", "fp32", "bf16"),
        (torch.bfloat16, "fp32", "bf16", "fp32"),
    ],
)
def test_what_is_not_quantized_is_no_wider_than_in_the_file_unless_asked(file, storage, compute, dtype):
    stored = weights(file)
    assert in_memory(stored, storage, compute).dtype == dtype


@pytest.mark.parametrize(("storage", "rules", "dtype"), [
    ("auto", "* storage=fp16", "fp16"),
    ("fp32", "* storage=fp16", "fp16"),
    ("as_file", "* storage=fp16\nblocks.* storage=as_file", "bf16"),
    ("fp32", "blocks.* storage=fp16", "fp32"),
    ("as_file", "* storage=as_file", "bf16"),
])  # fmt: skip
def test_a_rule_for_all_layers_names_the_dtype_they_are_held_in(storage, rules, dtype):
    assert in_memory(weights(), storage, "bf16", rules).dtype == dtype


def test_beside_weights_that_are_quantized_in_the_file_others_are_as_they_are():
    stored = weights(**{"blocks.0.ffn.0.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn)})
    assert in_memory(stored, "as_file", "fp32").dtype == "bf16"


def test_fp8_unpacked_for_fp32_is_16_bit():
    stored = weights(torch.float8_e4m3fn)
    assert in_memory(stored, "as_file", "fp32").dtype == "bf16"


def test_bytes_count_quantized_weights_with_scales_and_the_rest_as_held():
    stored = weights(position=torch.zeros(5, dtype=torch.int64))
    scales = in_memory(stored, "int8", "fp16").allocated - (FFN + 2 * KEPT + 40)
    assert 64 * 4 <= scales < 64 * 4 + 100


def test_the_bytes_of_a_model_leave_out_the_rest_of_its_file():
    found = in_memory(weights(prefix="net.") | weights(), "fp8_e4m3fn", "fp16", prefix="net.")
    assert FFN + 2 * KEPT < found.allocated < FFN + 2 * KEPT + 100
    mapped = in_memory(weights(prefix="net.") | weights(), "fp8_e4m3fn", "bf16", prefix="net.")
    assert mapped.allocated == found.allocated - 2 * 32 * 32, "a Linear that stays in its dtype is not copied"


def test_a_model_is_in_bf16_where_a_weight_exceeds_fp16():
    stored = weights()
    assert (
        in_memory(stored, "as_file", "fp16").dtype == "bf16" and in_memory(stored, "fp8_e4m3fn", "fp16").dtype == "fp16"
    )
    stored["time_embedding.0.weight"].data[0, 0] = 1e5
    assert in_memory(stored, "fp8_e4m3fn", "fp16").dtype == "bf16"


def test_fp8_of_a_layer_that_holds_no_scale_is_unpacked_alone():
    stored = weights(torch.float8_e4m3fn, "net.") | weights(torch.float8_e4m3fn)
    plans = in_memory(stored, "as_file", "fp16", prefix="net.").weights
    assert {name: plans[name].storage for name in plans if "ffn" in name or "patch" in name} == {
        "net.blocks.0.ffn.0.weight": "fp8_e4m3fn", "net.patch_embedding.weight": "fp16",
        "blocks.0.ffn.0.weight": "fp8_e4m3fn", "patch_embedding.weight": "bf16",
    }  # fmt: skip


def encoded(name):
    tensors = dialects.NATIVE[name](torch.randn(64, 32).repeat(1, 8))
    row = next(row for row in FORMAT_OF_STORAGE.values() if row.storage == name)
    settings = {"format": row.name, "group_size": 64 if name == "awq4" else 16, "convrot_groupsize": 256}
    leaves = {leaf: tensors[leaf] for leaf in row.leaves if leaf in tensors}
    return weight_in_format("blocks.0.ffn.0.weight", tensors["weight"], leaves, settings), row


@pytest.mark.parametrize("name", ["awq4", "nvfp4"])
def test_a_format_that_comfyui_lacks_is_unpacked_with_a_note_for_models_and_encoders(name):
    weight, row = encoded(name)
    stored, lacking, device = (
        {weight.name: weight},
        FORMAT_OF_STORAGE.keys() - {row.storage},
        devices.detect(profile="sm_120"),
    )
    for formats, storage in ((FORMAT_OF_STORAGE, "as_file"), (lacking, "bf16")):
        model, encoder = in_memory(stored, formats=formats, device=device), encoder_of(weight, device, formats)
        assert model.weights[weight.name].storage == encoder.weights[weight.name].storage == storage
        assert model.notes == encoder.notes and len(model.notes) == (storage == "bf16")
    assert f"1 layers in {row.title}, which needs ComfyUI {row.since}, were unpacked to bf16." in model.notes


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("profile", ["sm_75", "sm_89", "sm_90", "sm_100", "sm_120", "gfx1201", "mps_m1", "cpu"])
def test_what_unpacking_blocks_costs_is_told_where_no_product_takes_them(name, profile):
    weight, _ = encoded(name)
    device = devices.detect(profile=profile)
    found = in_memory({weight.name: weight}, device=device)
    if found.weights[weight.name].stored != name:
        return  # the device cannot hold it
    why = f"1 layers in {name} are dequantized in each call, which takes longer than 16-bit weights: {device.label} does not multiply {name}."
    assert (why in found.costs) == (profile not in ("sm_100", "sm_120"))


def without_fp8(profile="sm_86"):
    return devices.detect(profile=profile).without("fp8_storage", "No fp8 here.")


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_what_the_device_cannot_hold_is_unpacked_in_the_part_there(name, monkeypatch):
    encoder_weights = {
        f"clip.{key}": replace(weight, name=f"clip.{key}") for key, weight in weights(torch.float8_e4m3fn).items()
    }
    weight, row = encoded(name)
    inside = replace(weight, name=f"model.{weight.name}")
    monkeypatch.setattr(devices, "fp8_dtypes", lambda storage: ("fp8",) if storage == row.storage else ())
    stored, device = {inside.name: inside, **encoder_weights}, without_fp8()
    planned = in_memory(stored, compute="fp16_safe", prefix="model.", device=device)
    held = in_memory(stored, compute="fp16_safe", prefix="model.", device=devices.detect(profile="sm_120"))
    assert planned.weights[inside.name].stored == planned.dtype == "fp16"
    assert held.weights[inside.name].stored == row.storage and held.notes == ()
    assert all(planned.weights[key] == held.weights[key] for key in encoder_weights), "these go elsewhere"
    assert planned.notes == (f"1 weights in {row.storage} were loaded in fp16: {device.refuses(row.storage)}",)
    encoder = encoder_of(weight, device, default="fp16")
    assert (encoder.weights[weight.name].stored, encoder.notes) == ("fp16", planned.notes)


def test_what_is_requested_in_the_place_of_fp8_gets_no_note():
    assert in_memory(weights(torch.float8_e4m3fn), "fp16", "fp16", device=without_fp8()).notes == ()


def modes_of(plan):
    return {name: own.mode for name, own in plan.layers.items() if own.mode}


def test_the_arithmetic_follows_what_each_tensor_is_stored_in():
    """Not what most of the file is stored in, nor what was requested: these are known before the tensors are."""
    fp8 = weights(**{f"{FFN_LAYER}.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn)})
    assert modes_of(in_memory(fp8, compute="fp8", device="sm_89")) == {FFN_LAYER: "fp8"}, (
        "a layer of fp8 in a file of bf16"
    )
    mostly = weights(torch.float8_e4m3fn, **{f"{FFN_LAYER}.weight": torch.zeros(64, 32, dtype=torch.bfloat16)})
    assert modes_of(in_memory(mostly, compute="fp8", device="sm_89")) == {"time_embedding.0": "fp8"}, (
        "a layer of bf16 in a file of fp8"
    )
    weight, _ = encoded("nvfp4")
    converted = in_memory({weight.name: weight}, "int8", "auto")
    assert (
        modes_of(converted)
        == {FFN_LAYER: "int8"}
        == {name: own.stored for name, own in converted.layers.items() if own.mode}
    )
    scaled = weights(**{f"{FFN_LAYER}.weight_scale_of_something": torch.ones(3, 5)})
    unconverted = in_memory(scaled, "int8", "bf16")
    assert FFN_LAYER not in unconverted.compute.decisions and unconverted.layers[FFN_LAYER].stored == "bf16"


def test_the_plan_of_a_layer_holds_its_storage_and_its_arithmetic_with_their_reasons():
    rules = "blocks.0.ffn.0 storage=int8 compute=fp16 accumulation=fp16  # measured"
    own = in_memory(weights(), compute="bf16", rules=rules).layers[FFN_LAYER]
    assert (own.asked, own.stored, own.declared, own.why_stored) == ("int8", "int8", True, "measured")
    assert (own.mode, own.sums, own.reason) == ("fp16", "fp16", "measured")


@pytest.mark.parametrize("rotated", [True, False])
def test_experts_in_rotated_int8_are_unpacked(rotated):
    """ComfyUI multiplies by the weight of an expert as if it were not rotated."""
    made = [dialects.NATIVE["int8"](torch.randn(64, 64)) for _ in range(2)]
    settings = {"format": "int8_tensorwise", "num_experts": 2} | (
        {"convrot": True, "convrot_groupsize": 64} if rotated else {}
    )
    tensors = {f"a.{leaf}": torch.stack([each[leaf] for each in made]) for leaf in made[0] if leaf != "comfy_quant"}
    checkpoint = read_checkpoint(tensors | {"a.comfy_quant": dialects.comfy_quant_bytes(settings)}, {}, "m")
    (found,) = plan_weights(
        checkpoint.weights, {}, "m", LoadTarget(devices.detect(profile="cpu"), formats=FORMAT_OF_STORAGE)
    ).values()
    assert found.storage == ("bf16" if rotated else "as_file")


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_16_bit_weight_with_a_scale_that_cannot_be_quantized_keeps_its_scale(storage):
    name, shape = ("a.weight", (4, 4, 3)) if storage == "fp8_e4m3fn" else ("a.weight", (4, 7))
    weight = StoredWeight(name, torch.ones(shape, dtype=torch.bfloat16), ONE_SCALE, {"weight_scale": torch.tensor(0.5)})
    (found,) = plan_weights({name: weight}, {name: LayerPlan(storage)}, "file").values()
    assert (found.storage, bool(found.note)) == ("bf16", True)
