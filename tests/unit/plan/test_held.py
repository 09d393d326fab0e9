"""What weights are held in once loaded, and the bytes that this takes."""

import pytest
import torch
from halfsafe.precision.devices import detect as devices
from halfsafe.precision.formats.checkpoint import Checkpoint, StoredWeight
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.held import held_dtype, planned_bytes, unpacked_dtype, weight_bytes
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.plan.storage import plan_load

LAYERS = [
    LayerSpec("blocks.0.ffn.0", "Linear", (64, 32)),
    LayerSpec("blocks.0.norm3", "LayerNorm", (32,)),
    LayerSpec("time_embedding.0", "Linear", (32, 32)),
    LayerSpec("patch_embedding", "Conv3d", (32, 16, 1, 2, 2)),
]
FFN, KEPT = 64 * 32, 32 + 32 * 32 + 32 * 16 * 4


def weights(dtype=torch.bfloat16, **others):
    tensors = {f"{layer.name}.weight": torch.zeros(layer.shape, dtype=dtype) for layer in LAYERS}
    return {name: StoredWeight(name, tensor) for name, tensor in {**tensors, **others}.items()}


def plan(storage, compute, file_dtype="bf16", rules=""):
    facts = ModelFacts(LAYERS, 10**6, file_dtype, ("bf16", "fp32"))
    return plan_load(facts, devices.detect(profile="sm_86"), storage, compute, rules_from(rules), None)


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
    made = {"blocks.0.ffn.0.weight": storage} if storage in ("fp8_e4m3fn", "int8") else {}
    assert held_dtype(stored, made, plan(storage, compute)) == dtype


@pytest.mark.parametrize(("storage", "rules", "dtype"), [
    ("auto", "* storage=fp16", "fp16"),
    ("fp32", "* storage=fp16", "fp16"),
    ("as_file", "* storage=fp16\nblocks.* storage=as_file", "bf16"),
    ("fp32", "blocks.* storage=fp16", "fp32"),
    ("as_file", "* storage=as_file", "bf16"),
])  # fmt: skip
def test_a_rule_for_all_layers_names_the_dtype_they_are_held_in(storage, rules, dtype):
    assert held_dtype(weights(), {}, plan(storage, "bf16", rules=rules)) == dtype


def test_beside_weights_that_are_quantized_in_the_file_others_are_as_they_are():
    stored = weights(**{"blocks.0.ffn.0.weight": torch.zeros(64, 32, dtype=torch.float8_e4m3fn)})
    assert held_dtype(stored, {}, plan("as_file", "fp32", "fp8_e4m3fn")) == "bf16"


def test_fp8_unpacked_for_fp32_is_16_bit():
    stored = weights(torch.float8_e4m3fn)
    assert held_dtype(stored, {}, plan("as_file", "fp32", "fp8_e4m3fn")) == unpacked_dtype(plan("as_file", "fp32")) == "bf16"


def test_bytes_count_quantized_weights_with_their_scales_and_the_rest_as_held():
    stored = weights(position=torch.zeros(5, dtype=torch.int64))
    scales = weight_bytes(stored, {"blocks.0.ffn.0.weight": "int8"}, "bf16") - (FFN + 2 * KEPT + 40)
    assert 64 * 4 <= scales < 64 * 4 + 100


@pytest.mark.parametrize(("compute", "size"), [("bf16", 2), ("fp32", 2)])
def test_planned_bytes_need_no_more_than_the_plan(compute, size):
    inside = {f"net.{name}": StoredWeight(f"net.{name}", weight.data) for name, weight in weights().items()}
    file = Checkpoint("file", "plain", {}, {**inside, **weights()}, [])
    found = planned_bytes(file, plan("fp8_e4m3fn", compute), "net.")
    assert FFN + size * KEPT < found < FFN + size * KEPT + 100
