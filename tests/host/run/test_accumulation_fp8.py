"""fp8 products with fast accumulation: for one model, through ComfyUI's own registry, and nothing else changed."""

import threading

import pytest
import torch
from halfsafe.nodes.host.facts.layers import modules_of
from halfsafe.nodes.host.run import fast_accumulation
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.families import load, report
from support.measures import relative_error
from support.summing import accumulation, spied


def quantized(*shape):
    from comfy.quant_ops import QuantizedTensor

    torch.manual_seed(shape[0])
    scale = torch.tensor(0.01)
    return QuantizedTensor.from_float(torch.randn(*shape).bfloat16(), "TensorCoreFP8E4M3Layout", scale=scale)


def test_fp8_products_are_handed_on_bit_for_bit_outside_of_the_scope():
    x, weight, bias = quantized(32, 64), quantized(48, 64), torch.randn(48).bfloat16()
    table = {op: dict(handlers) for op, handlers in fast_accumulation.TABLE.items()}

    def results():
        with torch.no_grad():
            return [
                torch.nn.functional.linear(x, weight, bias),
                torch.nn.functional.linear(x, weight),
                torch.mm(x, weight.t()),
                torch.addmm(bias, x, weight.t()),
            ]

    before, inside = results(), []
    with fast_accumulation.fast_accumulation({}):
        assert table != fast_accumulation.TABLE
        thread = threading.Thread(target=lambda: inside.extend(results()))
        thread.start()
        thread.join()
    assert table == fast_accumulation.TABLE
    assert len(inside) == 4 and all(torch.equal(one, two) for one, two in zip(before, inside, strict=True))


def test_the_switch_reaches_the_product_and_only_inside(monkeypatch):
    x, weight, bias = quantized(32, 64), quantized(48, 64), torch.randn(48).bfloat16()
    given, real = [], torch._scaled_mm

    def scaled_mm(*args, use_fast_accum=False, **kwargs):
        given.append(use_fast_accum)
        return real(*args, **kwargs)

    with torch.inference_mode():
        plain = torch.nn.functional.linear(x, weight, bias)
        monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
        with fast_accumulation.fast_accumulation({}), fast_accumulation.fast_accumulation({}):
            fast = torch.nn.functional.linear(x, weight, bias)
        assert given == [True]
        assert relative_error(plain, fast) < 1e-2
        torch.nn.functional.linear(x, weight, bias)
        assert True not in given[1:]


def test_what_the_fast_product_cannot_do_is_handed_on_and_noted(monkeypatch):
    refused = {}
    x, weight = quantized(32, 64), quantized(48, 64)

    def refuse(*args, **kwargs):
        raise RuntimeError("not here")

    with torch.inference_mode():
        plain = torch.nn.functional.linear(x, weight)
        monkeypatch.setattr(torch, "_scaled_mm", refuse)
        with fast_accumulation.fast_accumulation(refused):
            assert torch.equal(torch.nn.functional.linear(x, weight), plain)
    assert refused == {(48, 64): "not here"}


def test_layers_whose_fast_product_torch_refuses_are_reported_in_fp32(comfy, wan, call, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    model, ran, real = load(comfy, wan, "fp8_e4m3fn", "fp8"), set(), torch._scaled_mm
    ours = accumulation(comfy, model, fp8_fast_accumulation="on")

    def scaled_mm(left, right, *args, use_fast_accum=False, **kwargs):
        if use_fast_accum and right.shape[0] == right.shape[1]:
            raise RuntimeError("no square ones\nat line 1")
        ran.add((*right.t().shape, use_fast_accum))
        return real(left, right, *args, use_fast_accum=use_fast_accum, **kwargs)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    families.replay(ours, call)
    layers = [layer for layer in report(comfy, ours)["layers"] if layer["mode"] == "fp8"]
    modules = modules_of(ours.model)
    assert {layer["accumulation"] for layer in layers} == {"fp32", "fp8_fast"}
    for layer in layers:
        rows, columns = modules[layer["name"]].weight.shape
        assert (layer["accumulation"] == "fp8_fast") is ((rows, columns, True) in ran)
        assert ("no square ones" in layer["reason"]) is (rows == columns)


@pytest.mark.parametrize(("value", "reaches"), [("on", True), ("auto", False), ("off", False), ("unchanged", False)])
def test_fp8_fast_accumulation_holds_for_one_model(comfy, wan, call, monkeypatch, value, reaches):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    model = load(comfy, wan, "fp8_e4m3fn", "fp8")
    ours, inside = accumulation(comfy, model, fp8_fast_accumulation=value), []
    plain = families.replay(model, call)
    result = families.replay(spied(ours, lambda: inside.append(fast_accumulation.active.get() is not None)), call)
    assert inside == [reaches] and fast_accumulation.active.get() is None
    assert relative_error(plain, result) < 1e-2
    found = report(comfy, ours)
    assert found["flags"]["fp8_fast_accumulation"]["in_scope"] is reaches
    sums = {layer["accumulation"] for layer in found["layers"] if layer["mode"] == "fp8"}
    assert sums == {"fp8_fast" if reaches else "fp32"}
    assert not [e for e in found["without_effect"] if "fp8_fast" in e["setting"]]


def test_without_kitchens_registry_it_says_so(comfy, wan, call, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(fast_accumulation, "TABLE", None)
    ours = accumulation(comfy, load(comfy, wan, "fp8_e4m3fn", "fp8"), fp8_fast_accumulation="on")
    families.replay(ours, call)
    found = report(comfy, ours)
    assert found["flags"]["fp8_fast_accumulation"]["in_scope"] is False
    assert any("registry" in e["reason"] for e in found["without_effect"])


def test_fast_fp8_layers_are_reported_beside_fp16_layers_that_are_being_proven(comfy, wan, call, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    model = load(comfy, wan, "fp8_e4m3fn", "fp8", rules=rules_from("*.ffn.* compute=fp16"))
    ours = accumulation(comfy, model, fp16_accumulation="auto", fp8_fast_accumulation="on")
    families.replay(ours, call)
    sums = {layer["mode"]: layer["accumulation"] for layer in report(comfy, ours)["layers"]}
    assert sums["fp8"] == "fp8_fast" and sums["fp16_acc16"] == "fp16"
