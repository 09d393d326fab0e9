"""The order in which the forwards of our stages run one layer in a call, and what stands around a call."""

import contextlib
import logging
import os
import sys
import traceback

import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui.layer_forward import STANDING, LayerForward
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.nodes.host.replay import interceptor
from halfsafe.nodes.host.replay.core_state import CoreState
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files
from support.families import load
from support.guarding import guarded
from support.summing import accumulation

PACKAGE = interceptor.__name__.partition(".nodes.")[0]
LAYER, OUTPUTS, INPUTS = "blocks.0.ffn.0", 1024, 256


def in_the_second_call(model, call, seen_of):
    """What ``seen_of`` returns as the layer is called in the second call of a model, after the one that measures."""
    module, seen = model.model.diffusion_model.get_submodule(LAYER), []
    hook = module.register_forward_pre_hook(lambda module, args: seen.append(seen_of(module)))
    try:
        for _ in range(2):
            seen.clear()
            families.replay(model, call)
    finally:
        hook.remove()
    return seen[0]


def steps_in_a_call(model, call):
    """What the layer runs, in order."""
    return in_the_second_call(model, call, lambda module: repr(LayerForward.on(module)))


def with_everything(comfy, wan):
    rules = rules_from(f"{LAYER} compute=fp16 stream=fp32", "none")
    model = families.with_compute(comfy, load(comfy, wan, "fp8_e4m3fn", "fp16"), "fp16", rules)
    model = accumulation(comfy, model, fp16_accumulation="auto")
    return load_lora_for_models(model, None, model_files.lora({LAYER: (OUTPUTS, INPUTS)}, rank=4), 1.0, 0.0)[0]


def test_the_rung_of_a_call_acts_without_a_guard_too(comfy, wan, call):
    model, acted = load(comfy, wan), []

    class Rung(interceptor.Acting):
        def attempt(self, call):
            return contextlib.nullcontext(acted.append(call))

    class Sets(interceptor.Stage):
        def in_call(self, call):
            call.rung = Rung()

    interceptor.put_stage(model, interceptor.ACCUMULATION, Sets())
    families.replay(model, call)
    assert len(acted) == 1


def test_one_forward_stands_on_a_layer_whatever_acts_on_it(comfy, wan, call, ampere):
    model = with_everything(comfy, wan)
    assert steps_in_a_call(model, call) == "operand fp16, Fp16Sums, Linear, result fp32, LowRankLayer"
    standing = in_the_second_call(model, call, LayerForward.on)
    assert type(standing.module) is standing.product.__self__.__class__, (
        "what was found on the layer, not another of ours"
    )
    assert standing.adds is None, "what a stage set is taken back"
    assert not {"forward", STANDING} & vars(standing.module).keys()


def test_an_escalated_layer_runs_neither_compute_nor_accumulation(comfy, wan, call, ampere, monkeypatch):
    model = guarded(comfy, with_everything(comfy, wan), on_nan="retry_higher", max_retries=3)
    module = model.model.diffusion_model.get_submodule(LAYER)
    own = type(module).forward

    def overflowing(self, x, *args, **kwargs):
        return own(self, x, *args, **kwargs) * (torch.inf if self is module and x.dtype == torch.float16 else 1)

    monkeypatch.setattr(type(module), "forward", overflowing)
    steps = steps_in_a_call(model, call)
    assert Guard.on(model) is not None
    assert steps == "operand fp32, Linear, result fp32, LowRankLayer"


@pytest.mark.parametrize(("storage", "compute", "expected"), [
    ("fp16", "fp16_safe", "SafeOperation"),
    ("fp8_e4m3fn", "fp8", "Fp8Linear"),
    ("fp8_e4m3fn", "fp16", "Bound"),
    ("int8", "int8", "Int8Linear"),
])  # fmt: skip
def test_a_product_that_nothing_stands_around_is_the_layers_forward_itself(
    comfy, wan, call, monkeypatch, storage, compute, expected
):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    model = load(comfy, wan, storage, compute)
    assert steps_in_a_call(model, call) == expected
    if not os.environ.get("HALFSAFE_NEXT_CORE"):
        assert type(in_the_second_call(model, call, lambda module: module.forward.__self__)).__name__ == expected


def functions_of_ours(module):
    """The functions of Halfsafe on the stack, from the outside in."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1))]
    return [frame.f_code.co_name for frame in reversed(frames) if PACKAGE in frame.f_globals.get("__name__", "")]


def test_at_most_ten_functions_lead_from_the_interceptor_to_a_layer(comfy, wan, call, ampere):
    model = guarded(comfy, with_everything(comfy, wan))
    functions = in_the_second_call(model, call, functions_of_ours)
    assert functions[0] == "__call__" and "around_call" in functions and len(functions) <= 10, functions


def test_the_log_at_debug_tells_each_layers_arithmetic_after_the_call_that_measures(comfy, wan, call, caplog):
    caplog.set_level(logging.DEBUG, "halfsafe.compute")
    families.replay(load(comfy, wan, "fp16", "fp16_safe"), call)
    (message,) = [record.getMessage() for record in caplog.records if record.name == "halfsafe.compute"]
    assert f"{LAYER}: fp16" in message and "operand times 2^-" in message, message


def test_the_interceptor_prints_its_stages_in_their_order(comfy, wan):
    model = guarded(comfy, with_everything(comfy, wan))
    expected = "Interceptor(calls: {0}.guard > {0}.accumulation > {0}.compute > {0}.rung > {0}.low_rank; sampling: {0}.low_rank > {0}.guard > {0}.compute)"
    assert repr(interceptor.Interceptor.on(model)) == expected.format("halfsafe")


def test_a_call_under_every_stage_takes_one_snapshot_of_what_comfyui_keeps(comfy, wan, call, ampere, monkeypatch):
    made = []
    own = CoreState.__init__
    monkeypatch.setattr(CoreState, "__init__", lambda self, options: (made.append(1), own(self, options))[1])
    families.replay(guarded(comfy, with_everything(comfy, wan)), call)
    assert len(made) == 1
