"""fp8 products: those of ComfyUI's QuantizedTensor, and with fast accumulation for one model and nothing else."""

import contextlib
import logging
import threading

import pytest
import torch
from comfy import model_management as comfy_management
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_diffusion_model
from halfsafe.nodes.host.comfyui.layers import modules_of
from halfsafe.nodes.host.compute.bound import LAYOUT, Fp8Linear
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.formats import fp8
from halfsafe.precision.formats.fp8 import activation_scale, fast_accumulation
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.cuda_rules import rules_in_kernels
from support.dynamic_vram import dynamic_vram
from support.families import load, report
from support.measures import relative_error
from support.summing import accumulation, spied


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(logging.getLogger("comfy_kitchen.tensor.fp8"), "disabled", True)


@pytest.fixture(autouse=True)
def _products_of_a_gpu():
    """A CPU has no ``_scaled_mm_v2``, which ``torch.nn.functional.scaled_mm`` calls; on a GPU it is ``_scaled_mm``."""
    with rules_in_kernels():
        yield


def rows_of(dtype=torch.bfloat16):
    return (torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


@pytest.fixture
def layer(comfy, wan):
    return load(comfy, wan, "fp8_e4m3fn", "fp8").model.diffusion_model.blocks[0].ffn[0]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("storage", "dtype", "fast"), [("fp8_e4m3fn", torch.bfloat16, False), ("fp8_e5m2", torch.float16, True)]
)
def test_the_bits_are_those_of_comfyuis_dispatch(comfy, wan, storage, dtype, fast):
    rows, layer = rows_of(dtype), load(comfy, wan, storage, "fp8").model.diffusion_model.blocks[0].ffn[0]
    with fast_accumulation({}) if fast else contextlib.nullcontext():
        direct = Fp8Linear(layer)(rows)
    quantized = QuantizedTensor.from_float(rows, LAYOUT, scale=activation_scale(rows, torch.float8_e4m3fn))
    expected = torch.nn.functional.linear(quantized, layer.weight.to(dtype), layer.bias.to(dtype))
    assert direct.dtype == dtype and torch.equal(direct, expected)


@torch.inference_mode()
@pytest.mark.parametrize("way", ["transferred", "resident"])
def test_the_same_under_dynamic_vram(comfy, wan, way):
    model = load(comfy, wan, "fp8_e4m3fn", "fp8")
    rows, layer = rows_of(), model.model.diffusion_model.blocks[0].ffn[0]
    expected = Fp8Linear(layer)(rows)
    with dynamic_vram(model, way) as lender:
        assert torch.equal(Fp8Linear(layer)(rows), expected) and torch.equal(Fp8Linear(layer)(rows), expected)
        assert lender.lent and not lender.out, "lent, and given back"


@torch.inference_mode()
def test_what_torch_refuses_is_dequantized(layer, monkeypatch):
    rows = rows_of()

    def refuse(*args, **kwargs):
        raise RuntimeError("not here")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    expected = torch.nn.functional.linear(rows.float(), layer.weight.dequantize().float(), layer.bias.float())
    assert relative_error(expected, Fp8Linear(layer)(rows)) < 0.01


@torch.inference_mode()
def test_the_switch_reaches_the_products_of_its_thread_inside_of_its_scope(layer, monkeypatch):
    rows, given, real = rows_of(), [], torch._scaled_mm

    def scaled_mm(*args, use_fast_accum=False, **kwargs):
        given.append(use_fast_accum)
        return real(*args, **kwargs)

    def in_a_thread():
        with torch.inference_mode(), rules_in_kernels():
            Fp8Linear(layer)(rows)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    with fast_accumulation({}):
        Fp8Linear(layer)(rows)
        thread = threading.Thread(target=in_a_thread)
        thread.start()
        thread.join()
    Fp8Linear(layer)(rows)
    assert given == [True, False, False]


def test_layers_whose_fast_product_torch_refuses_are_reported_in_fp32(comfy, wan, call, monkeypatch):
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
def test_fp8_fast_accumulation_holds_for_one_model(comfy, wan, call, value, reaches):
    model = load(comfy, wan, "fp8_e4m3fn", "fp8")
    ours, inside = accumulation(comfy, model, fp8_fast_accumulation=value), []
    plain = families.replay(model, call)
    result = families.replay(spied(ours, lambda: inside.append(fp8._refused.get() is not None)), call)
    assert inside == [reaches] and fp8._refused.get() is None
    assert relative_error(plain, result) < 1e-2
    found = report(comfy, ours)
    assert found["flags"]["fp8_fast_accumulation"]["in_scope"] is reaches
    sums = {layer["accumulation"] for layer in found["layers"] if layer["mode"] == "fp8"}
    assert sums == {"fp8_fast" if reaches else "fp32"}
    assert not [e for e in found["without_effect"] if "fp8_fast" in e["setting"]]


def test_fp8_products_of_comfyuis_own_are_not_reached_and_it_says_so(comfy, wan, models_dir, monkeypatch):
    path = models_dir / "diffusion_models" / "accumulation_fp8.safetensors"
    convert_file(wan, path, "fp8_e4m3fn", rules_from())
    monkeypatch.setattr(comfy_management, "supports_fp8_compute", lambda device=None: True)
    found = report(comfy, accumulation(comfy, load_diffusion_model(str(path)), fp8_fast_accumulation="on"))
    assert found["flags"]["fp8_fast_accumulation"]["in_scope"] is False
    assert any("Compute Dtype" in e["reason"] for e in found["without_effect"]), found["without_effect"]


def test_fast_fp8_layers_are_reported_beside_layers_with_fp16_sums(comfy, wan, call):
    model = load(comfy, wan, "fp8_e4m3fn", "fp8", rules=rules_from("*.ffn.* compute=fp16"))
    ours = accumulation(comfy, model, fp16_accumulation="auto", fp8_fast_accumulation="on")
    families.replay(ours, call)
    sums = {layer["mode"]: layer["accumulation"] for layer in report(comfy, ours)["layers"]}
    assert sums["fp8"] == "fp8_fast" and sums["fp16_acc16"] == "fp16"
