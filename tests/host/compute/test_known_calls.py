"""A ComfyUI that calls our code with an argument that it does not know: the feature is off, and one sentence says so."""

from __future__ import annotations

import inspect
import logging

import comfy.ops
import pytest
import torch
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.comfyui import gate, known_calls, self_test
from halfsafe.nodes.host.comfyui.known_calls import KNOWN, Feature, KnownCall
from halfsafe.nodes.host.compute.control import PlannedControl
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.nodes.host.lora.patcher import AddsLowRank
from halfsafe.nodes.host.reporting.badge import OFF
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.plan.choice import Choice
from halfsafe.precision.plan.compute import ComputePlan
from support import families, model_files, next_core
from support.families import load
from support.guarding import guarded, inside, left_on
from support.matmul_spy import Products
from support.measures import relative_error
from support.summing import accumulation

INSTALLED = [call for call in KNOWN if known_calls._installed(call.path) is not None]


@pytest.fixture(autouse=True)
def asked_anew():
    known_calls.reasons_off.cache_clear()
    yield
    known_calls.reasons_off.cache_clear()


def with_parameter(monkeypatch, call: KnownCall, name: str) -> None:
    """Give the installed callable another parameter, last and with a default, as a newer ComfyUI would."""
    if "mixed_precision_ops" in call.path:
        make = comfy.ops.mixed_precision_ops

        def made(*args, **kwargs):
            operations = make(*args, **kwargs)
            operations.Linear.forward = _taking(operations.Linear.forward, name)
            return operations

        monkeypatch.setattr(comfy.ops, "mixed_precision_ops", made)
        return
    owner, _, attribute = call.path.rpartition(".")
    holder = known_calls._installed(owner)
    if holder is None:
        holder = __import__(owner, fromlist=["_"])
    installed = getattr(holder, attribute)
    if isinstance(installed, type):
        holder, attribute, installed = installed, "forward", installed.forward
    monkeypatch.setattr(holder, attribute, _taking(installed, name))


def _taking(function, name: str):
    def run(*args, **kwargs):
        kwargs.pop(name, None)
        return function(*args, **kwargs)

    parameters = [each for each in inspect.signature(function).parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    more = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
    run.__signature__ = inspect.Signature([*parameters, more])
    run.__module__ = function.__module__
    return run


def exchanged_in_a_call(model, call) -> list[str]:
    """The layers that have a forward of their own inside of a call, and the call's result."""
    found: list[str] = []

    def look(executor, args, kwargs):
        found.extend(name for name, has in left_on(executor.class_obj.diffusion_model).items() if "forward" in has)
        return executor(*args, **kwargs)

    families.replay(inside(model, look), call)
    return found


@pytest.mark.parametrize("known", INSTALLED, ids=lambda call: call.path)
def test_a_call_with_a_parameter_that_is_not_known_is_refused_by_name(monkeypatch, known):
    assert known_calls.reasons_off() == {}
    known_calls.reasons_off.cache_clear()
    with_parameter(monkeypatch, known, "unheard_of")
    reason = known_calls.why_off(known.feature)
    assert "`unheard_of`" in reason and str(known.feature) in reason and "Update Halfsafe" in reason


@pytest.fixture
def newer(monkeypatch):
    """A ComfyUI whose layers take an argument that is not known."""
    with_parameter(monkeypatch, KNOWN[0], "unheard_of")
    return "This ComfyUI calls its layers with `unheard_of`, which Halfsafe"


def test_a_model_runs_as_comfyui_has_it_and_report_badge_and_log_say_why(comfy, wan, call, newer, caplog):
    reference = families.replay(load(comfy, wan, "fp32", "fp32"), call)
    with caplog.at_level(logging.WARNING, "halfsafe"):
        model = load(comfy, wan, "fp16", "fp16_safe")
    assert newer in caplog.text
    assert exchanged_in_a_call(model, call) == []
    assert relative_error(reference, families.replay(model, call)) < 1e-3
    found = families.report(comfy, model)
    assert any(newer in note for note in found["notes"])
    assert any(newer in entry["reason"] for entry in found["without_effect"] if entry["setting"] == "compute=fp16_safe")
    assert {layer["mode"] for layer in found["layers"]} == {"fp32"}
    shown = comfy.nodes["HalfsafeComputeDtype"].execute(model, "fp16_safe").ui
    assert OFF in shown["halfsafe_badge"][0]


def test_no_guard_and_no_sums_are_put_on(comfy, wan, call, newer):
    model = load(comfy, wan, "fp16", "fp16")
    assert exchanged_in_a_call(accumulation(comfy, model, fp16_accumulation="on"), call) == []
    assert families.report(comfy, guarded(comfy, model))["guard"]["verdict"] == "off"


def test_a_lora_is_merged_by_comfyui(comfy, wan, call, newer):
    tensors = model_files.lora({"blocks.0.ffn.2": (256, 1024)}, rank=8)
    exact = load_lora_for_models(load(comfy, wan, "fp32", "fp32"), None, dict(tensors), 4.0, 0.0)[0]
    reference = families.replay(exact, call)
    model = load(comfy, wan, "fp8_e4m3fn", "bf16")
    assert not isinstance(model, AddsLowRank)
    with_lora = load_lora_for_models(model, None, dict(tensors), 4.0, 0.0)[0]
    assert relative_error(reference, families.replay(with_lora, call)) < 0.1


ANALYSIS = {"candidate": "fp8_e4m3fn", "target_snr_db": 25.0}


@pytest.mark.parametrize(("node", "more"), [("HalfsafeCalibrate", {}), ("HalfsafeAnalyzeLayers", ANALYSIS)])
def test_a_study_says_that_it_cannot_measure(comfy, wan, newer, node, more):
    model = load(comfy, wan, "fp32", "fp32")
    latent = {"samples": torch.zeros_like(families.noise(model, size=8))}
    with pytest.raises(HalfsafeError, match="unheard_of"):
        comfy.run(node, model=model, positive=families.conditioning("wan"), latent_image=latent, seed=1, **more)


@pytest.mark.parametrize("broken", ["activated", "with_residual"])
def test_a_gate_that_drops_what_is_folded_is_found_by_the_self_test(monkeypatch, broken):
    with next_core.installed():
        assert self_test.unequal_layer() == ""
        monkeypatch.setattr(gate, broken, lambda x, folded: x[..., : self_test.SIZE])
        assert self_test.unequal_layer()
        reason = known_calls.why_off(Feature.LAYERS)
    assert "returns another result through Halfsafe" in reason and str(Feature.LAYERS) in reason


def test_the_self_test_multiplies_quantized_layers_as_comfyui_does():
    """A core whose quantized path folds a residual in otherwise is seen: the layers run in their format."""
    spy = Products({})
    with next_core.installed(), spy:
        assert self_test.unequal_layer() == ""
    assert any(product.operands == ("int8", "int8") for product in spy.seen)


def test_a_self_test_that_raises_turns_the_feature_off(monkeypatch):
    with next_core.installed():
        monkeypatch.setitem(comfy.ops.INPUT_ACT_EAGER, "unheard_of", lambda x: x @ torch.zeros(3, 3))
        assert "unheard_of: RuntimeError" in known_calls.why_off(Feature.LAYERS)


def test_a_refused_plan_runs_on_no_controlnet(comfy, newer):
    """Neither the ModelPatcher that reports are made of nor the forward that stands in for a ControlNet's has the plan."""
    plan = ComputePlan(Choice("fp16_safe", "fp16_safe"), {})
    planned = PlannedControl(torch.nn.Linear(2, 2), plan, torch.float16, torch.device("cpu"))
    assert not planned.compute.plan.exchanges and compute_of(planned.current_patcher) is planned.compute


def test_lumina_s_fused_int8_is_not_asked_past_a_forward_of_ours(comfy, monkeypatch):
    """The predicate by which ComfyUI after 0.33 multiplies `attention.qkv` past its layer."""
    from comfy.ldm.lumina import model as lumina
    from halfsafe.nodes.host.comfyui.weights import calling_layers

    layer = next(layer for name, layer in self_test._layers() if name == "int8_tensorwise")
    monkeypatch.setattr(lumina, "_int8_convrot_linear", lambda linear: True, raising=False)
    with calling_layers([layer]):
        assert lumina._int8_convrot_linear(layer)
        layer.forward = lambda x: x
        assert not lumina._int8_convrot_linear(layer)
    assert lumina._int8_convrot_linear(layer)
