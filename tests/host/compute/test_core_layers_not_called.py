"""Layers that ComfyUI multiplies without calling them: from 0.38 a Wan's second FFN layer, in fp16 while sums are fp16."""

import pytest
import torch
import torch.nn.functional as F
from comfy.ops import mixed_precision_ops
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.precision.base import flags
from halfsafe.precision.base.dtypes import name_of
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.families import load, report, with_compute
from support.measures import relative_error
from support.summing import FP16_ACCUMULATION, accumulation

LAYERS = ("blocks.0.ffn.2", "blocks.1.ffn.2")


class PastForward(torch.nn.Sequential):
    """A Sequential that multiplies its last layer by itself under the condition that ComfyUI 0.38 has; on any device."""

    def forward(self, x):
        *before, last = self
        for module in before:
            x = module(x)
        if (
            flags.is_on(FP16_ACCUMULATION)
            and x.dtype == torch.float16
            and not getattr(last, "_full_precision_mm", False)
        ):
            self.past.append(last)
            return F.linear(x, last.weight, last.bias)
        return last(x)


@pytest.fixture
def went_past(comfy, wan):
    """(model, the layers that were multiplied past their forward), fp16."""
    model, past = load(comfy, wan, "fp16", "fp16"), []
    for block in model.model.diffusion_model.blocks:
        block.ffn.__class__, block.ffn.past = PastForward, past
    return model, past


def test_the_stand_in_goes_past_a_layer_nothing_is_asked_of(went_past, call):
    model, past = went_past
    with flags.flags_set({FP16_ACCUMULATION: True}):
        families.replay(model, call)
    assert len(past) == len(LAYERS)


def test_layers_with_a_rule_are_called(comfy, went_past, call):
    model, past = went_past
    reference = families.replay(with_compute(comfy, model, "fp32"), call)
    ruled = with_compute(comfy, model, "fp16", rules=rules_from(text="*ffn.2 compute=fp32"))
    with flags.flags_set({FP16_ACCUMULATION: True}):
        result = families.replay(ruled, call)
    assert not past and relative_error(reference, result) < 0.01


def test_layers_whose_sums_are_measured_are_called(comfy, went_past, call, ampere, flags_as_before):
    model, past = went_past
    ours = accumulation(comfy, model, fp16_accumulation="auto")
    families.replay(ours, call)
    assert not past, "the first call measures the sums of each layer"


def test_with_fp16_sums_for_all_layers_are_multiplied_as_comfyui_does_it(
    comfy, went_past, call, ampere, flags_as_before
):
    model, past = went_past
    families.replay(accumulation(comfy, model, fp16_accumulation="on"), call)
    assert len(past) == len(LAYERS)


@pytest.mark.parametrize("compute", ["bf16", "fp16_safe", "fp32"])
def test_of_a_bank_of_experts_no_plan_is_claimed(comfy, wan, monkeypatch, compute):
    """`MoEExperts` multiplies without its forward: it runs in the dtype that it is given, and the report says that dtype."""
    loaded, given = load(comfy, wan, "fp16", "fp16"), []
    bank = mixed_precision_ops({}, torch.float16).MoEExperts(4, 64, 64, bias=False)
    bank.weight = torch.nn.Parameter(torch.randn(4, 64, 64).half(), requires_grad=False)
    block = loaded.model.diffusion_model.blocks[0]
    block.experts, forward = bank, type(block).forward

    def with_experts(self, *args, **kwargs):
        out = forward(self, *args, **kwargs)
        if self is block:
            rows = out[..., :64].reshape(-1, 64)
            given.append(self.experts.expert_linear(rows, 0).dtype)
        return out

    monkeypatch.setattr(type(block), "forward", with_experts)
    model = with_compute(comfy, loaded, compute)
    families.sample(model, "wan", steps=2)
    assert not {name for name in compute_of(model).plan.decisions if "experts" in name}
    (row,) = (layer for layer in report(comfy, model)["layers"] if layer["name"] == "blocks.0.experts")
    assert {name_of(dtype) for dtype in given} == {row["mode"]} and row["reason"] == ""
