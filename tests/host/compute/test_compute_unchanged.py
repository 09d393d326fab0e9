"""The cached model is never mutated: what ran with a plan computes bit for bit as before without one."""

import pytest
import torch
from halfsafe.nodes.host.compute.bound import Fp8Linear
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.families import load, with_compute
from support.guarding import core
from support.measures import relative_error


@pytest.fixture(scope="module")
def reference(fp32, call):
    return families.replay(fp32, call)


def stock(path):
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path))


def instance_state(model):
    """What patches could leave on a module: attributes by name and identity. ComfyUI's own bookkeeping is left out."""
    own = {"comfy_patched_weights", "prev_comfy_cast_weights", "comfy_cast_weights", "comfy_force_cast_weights"}
    return {
        name: {key: value if value == [] else id(value) for key, value in module.__dict__.items() if key not in own}
        for name, module in model.model.diffusion_model.named_modules()
    }


def flags():
    matmul = torch.backends.cuda.matmul
    names = ("allow_tf32", "allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction")
    return [getattr(matmul, name) for name in names], torch.backends.cudnn.allow_tf32, torch.get_default_dtype()


PLANS = {
    "safe": ("fp16_safe", ""),
    "bf16": ("bf16", ""),
    "fp32": ("fp32", ""),
    "rules": ("bf16", "blocks.0.* compute=fp32 stream=fp32\nblocks.1.* compute=fp16_safe"),
    "auto": ("auto", ""),
}


@pytest.mark.parametrize("plan", PLANS)
def test_the_input_model_computes_as_before(comfy, overflowing, call, plan):
    compute, text = PLANS[plan]
    model = stock(overflowing)
    before, attributes, switched = families.replay(model, call), instance_state(model), flags()
    planned = with_compute(comfy, model, compute, rules_from(text))
    for _ in range(2):
        families.replay(planned, call)
    assert torch.equal(families.replay(model, call), before)
    assert instance_state(model) == attributes
    assert flags() == switched
    assert planned is not model and model.attachments.keys() == stock(overflowing).attachments.keys()


class Fault(Exception):
    pass


@pytest.mark.parametrize("error", [Fault, "interrupt", "oom"])
def test_an_error_inside_a_call_leaves_nothing_behind(comfy, overflowing, call, reference, error):
    import comfy.model_management as management

    raised = {"interrupt": management.InterruptProcessingException, "oom": torch.OutOfMemoryError}.get(error, Fault)
    model = stock(overflowing)
    planned = with_compute(comfy, model, "fp16_safe")
    before, attributes = families.replay(model, call), instance_state(model)
    for measured in (False, True):
        if measured:
            families.replay(planned, call)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SafeOperation, "_multiplied", lambda *args: (_ for _ in ()).throw(raised("on purpose")))
            with pytest.raises(raised):
                families.replay(planned, call)
        families.replay(model, call)
        assert instance_state(model) == attributes
    assert torch.equal(families.replay(model, call), before)
    assert relative_error(reference, families.replay(planned, call)) < 2e-3


def test_two_plans_of_one_model_alternate(comfy, overflowing, call, reference):
    model = stock(overflowing)
    safe, fp32 = with_compute(comfy, model, "fp16_safe"), with_compute(comfy, model, "fp32")
    again = with_compute(comfy, with_compute(comfy, safe, "bf16").clone(), "fp16_safe")
    stock_result = families.replay(model, call)
    for _ in range(3):
        assert relative_error(reference, families.replay(safe, call)) < 2e-3
        assert torch.equal(families.replay(fp32, call), reference)
        assert relative_error(reference, families.replay(again, call)) < 2e-3
        assert torch.equal(families.replay(model, call), stock_result)


def test_the_last_compute_node_decides(comfy, overflowing, call, reference):
    twice = with_compute(comfy, with_compute(comfy, stock(overflowing), "fp16_safe"), "bf16")
    assert torch.equal(
        families.replay(twice, call), families.replay(with_compute(comfy, stock(overflowing), "bf16"), call)
    )
    back = with_compute(comfy, twice, "fp16_safe")
    assert relative_error(reference, families.replay(back, call)) < 2e-3


def test_core_s_own_dtype_node_before_and_after(comfy, overflowing, call, reference):
    node = core("comfy_extras.nodes_model_advanced").ModelComputeDtype()
    before = with_compute(comfy, node.patch(stock(overflowing), "fp16")[0], "fp16_safe")
    assert relative_error(reference, families.replay(before, call)) < 2e-3
    after = node.patch(with_compute(comfy, stock(overflowing), "fp16_safe"), "bf16")[0]
    assert relative_error(reference, families.replay(after, call)) < 0.02


def test_unloaded_and_loaded_again(comfy, overflowing, call, reference):
    planned = with_compute(comfy, stock(overflowing), "fp16_safe")
    for _ in range(2):
        assert relative_error(reference, families.replay(planned, call)) < 2e-3
        families.unload_models()
    planned.partially_unload(torch.device("cpu"), 1 << 20)
    assert relative_error(reference, families.replay(planned, call)) < 2e-3


def test_weights_that_are_cast_at_every_call(comfy, overflowing, call, reference):
    planned = with_compute(comfy, stock(overflowing), "fp16_safe")
    planned.patch_model(lowvram_model_memory=1, load_weights=True)
    try:
        assert relative_error(reference, families.replay(planned, call)) < 2e-3
    finally:
        planned.unpatch_model()


def test_fp8_products_leave_the_stored_model_as_it_was(comfy, overflowing, call, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    stored = load(comfy, overflowing, "fp8_e4m3fn", "bf16")
    before, attributes = families.replay(stored, call), instance_state(stored)
    monkeypatch.setattr(Fp8Linear, "__call__", lambda *args: (_ for _ in ()).throw(Fault))
    with pytest.raises(Fault):
        families.replay(with_compute(comfy, stored, "fp8"), call)
    assert torch.equal(families.replay(stored, call), before)
    assert instance_state(stored) == attributes
