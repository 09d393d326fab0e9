"""Errors of weights as they are made, and what is told of weights that are quantized again."""

import pytest
import torch
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.comfy_format import made_here
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.formats.stored_weight import StoredWeight
from halfsafe.precision.make.weight_errors import measuring_errors, told_again
from halfsafe.precision.plan.layers import plan_weights
from support.measures import relative_error


@pytest.mark.parametrize("name", ["prenorm.scale", "a.weight_scale", "b.comfy_quant", "logit_scale", "v_pred"])
def test_a_merged_tensor_is_measured_as_what_it_is_whatever_it_is_called(name):
    """Krea 2 calls the weight of a norm ``scale``; a patch may be on any tensor."""
    weight = StoredWeight(name, torch.rand({"logit_scale": (), "v_pred": (0,)}.get(name, (64,))))
    stored = {name: weight.data.bfloat16()}
    errors: dict[str, float] = {}
    made = [*measuring_errors([(weight, stored)], {name: LayerPlan("bf16", changes=True)}, errors)]
    assert made == [(weight, stored)]
    exact = relative_error(weight.data, stored[name].float()) if weight.data.numel() else 0.0
    assert errors == {name: pytest.approx(exact, rel=1e-3)}


PAIRS = [("fp8_e4m3fn", "int8"), ("int8", "fp8_e4m3fn"), ("fp8_e4m3fn", "fp8_e5m2"), ("int8", "int8"), ("bf16", "int8")]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_weights_that_are_quantized_again_are_told_with_their_error(before, after):
    """By a plan of their tensors; numbers that stay, and 16-bit ones, are not told."""
    plain = StoredWeight("blocks.0.ffn.0.weight", torch.randn(64, 256).bfloat16())
    weights = {plain.name: plain}
    if before != "bf16":
        _, tensors = next(made_here(weights, plan_weights(weights, {plain.name: LayerPlan(before)}, ""), ""))
        weights = dict(read_checkpoint(tensors, None, "").weights)
    plans, errors = plan_weights(weights, {plain.name: LayerPlan(after)}, ""), {}
    ((_, tensors),) = measuring_errors(made_here(weights, plans, ""), plans, errors, all_changed=False)
    told = told_again(plans, errors)
    if before in (after, "bf16"):
        assert told == [] == [*errors]
        return
    made = read_checkpoint(tensors, None, "").weights[plain.name].dequantize(torch.float32)
    error = relative_error(weights[plain.name].dequantize(torch.float32), made)
    (sentence,) = told
    assert sentence.startswith(f"1 layers in {before} were quantized again, to {after}, with an error of {error:.1%} ")
    assert "blocks.0.ffn.0" in sentence
    (merged,) = told_again(plans, {}, merged={plain.name})
    assert "merged with their patches" in merged and "an unknown size" in merged
