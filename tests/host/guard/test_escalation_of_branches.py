"""Two branches of one checkpoint behind one guard: each report speaks of its own."""

import pytest
import torch
from comfy.sd import load_bypass_lora_for_models
from comfy_execution.utils import CurrentNodeContext
from support import families, model_files
from support.guarding import core, guarded, is_finite, modes_of, plain_fp16, report_of
from support.measures import relative_error


def with_lora(model):
    """A clone with a LoRA under which the second block overflows in fp16."""
    clone = model.clone()
    delta = torch.randn(256, 1024, generator=torch.Generator().manual_seed(5)) * 6e3
    clone.add_patches({"diffusion_model.blocks.1.ffn.2.weight": ("diff", (delta,))}, 1.0)
    return clone


@pytest.mark.parametrize("clean_first", [True, False])
def test_the_branch_without_the_lora_is_clean_in_its_own_report(comfy, wan, clean_first):
    model = guarded(comfy, plain_fp16(comfy, wan))
    lora = with_lora(model)
    with CurrentNodeContext("prompt", "1"):
        for branch in [model, lora] if clean_first else [lora, model]:
            assert is_finite(families.sample(branch, "wan", steps=2))
        shown = [families.report(comfy, branch)["guard"] for branch in (model, lora)]
    assert [guard["verdict"] for guard in shown] == ["clean", "recovered"]
    assert [guard["calls"] for guard in shown] == [2, 2]
    assert not shown[0]["escalations"] and "blocks.1.ffn.2" in shown[1]["escalations"]
    assert families.report(comfy, model)["layers"] != families.report(comfy, lora)["layers"]


def test_a_branch_that_is_cached_keeps_its_report(comfy, wan):
    model = guarded(comfy, plain_fp16(comfy, wan))
    lora = with_lora(model)
    with CurrentNodeContext("first", "1"):
        families.sample(lora, "wan", steps=2)
        families.sample(model, "wan", steps=2)
    with CurrentNodeContext("second", "1"):
        families.sample(model, "wan", steps=3)
        assert report_of(lora).verdict == "recovered" and report_of(lora).calls == 2
        assert report_of(model).verdict == "clean" and report_of(model).calls == 3
    with CurrentNodeContext("third", "1"):
        families.sample(lora, "wan", steps=2)
        assert report_of(model).verdict == "clean" and report_of(model).calls == 3
        assert report_of(lora).extra_calls == 0


def test_a_report_behind_another_node_is_that_of_the_model_that_ran(comfy, wan):
    """ComfyUI clones the model in every node: the report may be given another clone than the sampler."""
    model = with_lora(guarded(comfy, plain_fp16(comfy, wan)))
    sampled = core("comfy_extras.nodes_model_advanced").ModelSamplingSD3().patch(model, 3.0)[0]
    families.sample(sampled, "wan", steps=2)
    assert report_of(model).verdict == report_of(sampled).verdict == report_of(model.clone()).verdict == "recovered"
    assert modes_of(model)["blocks.1.ffn.2"] == "fp16_wide"


def test_what_overflowed_under_a_bypassed_lora_runs_without_it_once_it_is_gone(comfy, overflowing):
    """Its forwards are on the layers while it is used, and the wider layers are made to call them."""
    lora = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=1.0)

    def with_and_without(model):
        return load_bypass_lora_for_models(model, None, lora, 1.0, 0.0)[0], model

    fp32, fp16 = (families.load(comfy, overflowing, "as_file", compute) for compute in ("fp32", "fp16"))
    references = [families.sample(model, "wan", steps=2) for model in with_and_without(fp32)]
    models = with_and_without(guarded(comfy, fp16))
    assert relative_error(*references) > 0.01
    for index in (0, 1, 0):
        assert relative_error(references[index], families.sample(models[index], "wan", steps=2)) < 2e-3
    assert report_of(models[1]).verdict == "clean"


def test_what_a_clone_on_another_device_saw_is_in_the_report(comfy, overflowing):
    """As of MultiGPU, whose clones have a model of their own and the same patches."""
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    other = model.clone(model_override=(plain_fp16(comfy, overflowing).model, ({}, {}, {}, set())))
    families.sample(other, "wan", steps=1)
    report = report_of(model)
    assert report.verdict == "recovered" and report.calls == 1 and "blocks.0.ffn.2" in report.escalations


@pytest.mark.parametrize("other", ["plan", "dtype"])
def test_what_a_model_needed_under_one_setting_is_not_taken_for_another(comfy, overflowing, other):
    stock = families.stock(overflowing, torch.float16)
    if other == "plan":
        rules = comfy.run("HalfsafeLayerRules", rules="blocks.* compute=fp32 stream=fp32", preset="none")[0]
        narrow, wide = (
            comfy.run("HalfsafeComputeDtype", model=stock, compute="fp16", rules=each)[0] for each in (None, rules)
        )
    else:
        set_to = core("comfy_extras.nodes_model_advanced").ModelComputeDtype().patch
        narrow, wide = (set_to(stock, dtype)[0] for dtype in ("fp16", "bf16"))
    first, unlike, again = (guarded(comfy, model) for model in (narrow, wide, narrow))
    for model in (first, unlike, again):
        families.sample(model, "wan", steps=1)
    assert [report_of(model).verdict for model in (first, unlike, again)] == ["recovered", "clean", "clean"]
    assert not report_of(unlike).escalations and report_of(again).escalations == report_of(first).escalations
