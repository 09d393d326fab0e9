"""How each layer runs, as ``states_of`` says it of layers that ComfyUI runs itself, beside a spy on the products."""

import logging

import comfy.sd
import pytest
import torch
from comfy import model_management
from halfsafe.nodes.host.comfyui import layers
from halfsafe.nodes.host.compute.layer_modes import CALLED_IN_FP32, states_of
from halfsafe.nodes.host.replay import seen
from halfsafe.nodes.host.reporting.badge import with_live_report
from support import dialects, families, guarding, model_files
from support.families import with_compute
from support.int8_models import int8, layers_of
from support.matmul_spy import MatmulSpy

INT8 = "blocks.0.ffn.0"
CASTS = "patch_embedding"  # comfy/ldm/wan/model.py: self.patch_embedding(x.float())


@pytest.fixture(scope="module")
def file(wan, models_dir):
    return model_files.in_dialect(wan, models_dir / "diffusion_models" / "states_int8.safetensors", int8)


@pytest.fixture
def no_table(monkeypatch):
    """What calls show, not what is listed of model code."""
    monkeypatch.setattr(layers, "CASTS", {})


def reporting(model):
    return with_live_report(model, None)[0]


def stock(path, dtype: torch.dtype):
    """ComfyUI's own model of a file, with a report alone."""
    model = families.stock(path, torch.bfloat16)
    model.set_model_compute_dtype(dtype)
    return reporting(model)


def not_as_said(model, call) -> list[str]:
    families.replay(model, call)
    with MatmulSpy(model.model.diffusion_model) as spy:
        families.replay(model, call)
    states, made = states_of(model), spy.by_layer()
    assert len(made.keys() & states.keys()) > 20
    return [
        f"{name}: said {states[name].mode}, was {product}"
        for name in made.keys() & states.keys()
        for product in made[name]
        if states[name].mode not in product.modes
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("stored", ["plain", "int8"])
def test_a_model_of_comfyuis_own_multiplies_as_said(wan, file, call, no_table, stored, dtype):
    assert not_as_said(stock(wan if stored == "plain" else file, dtype), call) == []


@pytest.mark.parametrize("compute", ["auto", "bf16", "fp16_safe"])
def test_layers_that_a_plan_leaves_to_comfyui_multiply_as_said(comfy, file, call, no_table, compute):
    assert not_as_said(with_compute(comfy, families.stock(file), compute), call) == []


def test_model_code_that_casts_is_seen_in_a_call_and_planned_before(wan, call, no_table):
    model = stock(wan, torch.float16)
    assert (states_of(model)[CASTS].mode, states_of(model)[CASTS].why) == ("fp16", ())
    families.replay(model, call)
    assert (states_of(model)[CASTS].mode, states_of(model)[CASTS].why) == ("fp32", (CALLED_IN_FP32,))


@pytest.mark.parametrize(("attribute", "value"), [("weight_function", [lambda weight: weight]), ("_forward", None)])
def test_a_layer_that_comfyui_dequantizes_is_seen_until_it_multiplies_as_stored_again(
    file, call, monkeypatch, attribute, value
):
    model = stock(file, torch.float32)
    families.replay(model, call)
    module = layers_of(model)[INT8]
    own = module._forward
    with monkeypatch.context() as patch:
        patch.setattr(
            module, attribute, value or (lambda x, weight, bias: own(x, weight.dequantize().to(x.dtype), bias))
        )
        families.sample(model, "wan", steps=1)
        assert (states_of(model)[INT8].mode, states_of(model)[INT8].kernel) == ("fp32", "dequantized")
        assert not_as_said(model, call) == []
    families.sample(model, "wan", steps=1)
    assert (states_of(model)[INT8].mode, states_of(model)[INT8].kernel) == ("int8", "eager")


@pytest.mark.parametrize("attribute", ["weight_function", "bias_function"])
def test_an_fp8_product_that_unpacks_a_changed_weight_is_said_and_planned_so(comfy, wan, call, monkeypatch, attribute):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(logging.getLogger("comfy_kitchen.tensor.fp8"), "disabled", True)
    model = reporting(families.load(comfy, wan, "fp8_e4m3fn", "fp8"))
    assert not_as_said(model, call) == [] and states_of(model)[INT8].mode == "fp8"
    with monkeypatch.context() as patch:
        patch.setattr(layers_of(model)[INT8], attribute, [lambda tensor: tensor])
        planned = states_of(model)[INT8].planned
        assert not_as_said(model, call) == []
        state = states_of(model)[INT8]
        assert (state.mode, state.planned, state.kernel) == (planned, planned, "dequantized")
    assert not_as_said(model, call) == [] and states_of(model)[INT8].mode == "fp8"


def test_what_a_call_showed_is_not_said_of_another_dtype_of_the_same_model(wan, call, no_table):
    first = stock(wan, torch.float16)
    second = first.clone()
    second.set_model_compute_dtype(torch.bfloat16)
    families.replay(first, call)
    assert states_of(second)[CASTS].mode == "bf16", "it did not run"
    families.replay(second, call)
    assert (states_of(second)[INT8].mode, states_of(second)[CASTS].mode) == ("bf16", "fp32")
    assert states_of(first)[INT8].mode == "fp16"


def test_nothing_stays_on_a_model(file, call):
    model = stock(file, torch.bfloat16)
    families.replay(model, call)
    assert not any(module._forward_pre_hooks or "_forward" in vars(module) for module in layers_of(model).values())


@pytest.mark.parametrize("compute", ["fp8", "int8"])
def test_a_weight_that_changes_after_a_call_is_not_said_to_multiply_as_stored(
    comfy, wan, models_dir, call, monkeypatch, compute
):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    write = int8 if compute == "int8" else dialects.comfy_quant
    path = model_files.in_dialect(wan, models_dir / "diffusion_models" / f"changed_{compute}.safetensors", write)
    model = with_compute(comfy, families.stock(path), compute)
    assert not_as_said(model, call) == [] and states_of(model)[INT8].mode == compute
    module = model.get_model_object(f"diffusion_model.{INT8}")
    with monkeypatch.context() as lora:
        lora.setattr(
            module, "weight_function", [lambda weight: weight]
        )  # as of a LoRA whose weight is not on the device
        assert not_as_said(model, call) == [] and states_of(model)[INT8].kernel == "dequantized"
    assert not_as_said(model, call) == [] and states_of(model)[INT8].mode == compute


def test_a_quantized_layer_without_a_name_of_its_format_runs_as_in_comfyui(file, call):
    model = stock(file, torch.bfloat16)
    for module in layers_of(model).values():
        module.quant_format = None
    assert not_as_said(model, call) == []


@pytest.fixture
def fast(models_dir, monkeypatch):
    """Family -> its model as UNETLoader's fp8_e4m3fn_fast loads it on an RTX 40."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(model_management, "SUPPORT_FP8_OPS", True)

    def make(family: str):
        path = families.write_narrow(family, models_dir / "diffusion_models")
        options = {"dtype": torch.float8_e4m3fn, "fp8_optimizations": True}
        model = comfy.sd.load_diffusion_model(str(path), model_options=options)
        model.set_model_compute_dtype(torch.bfloat16)
        return model

    return make


@pytest.mark.parametrize("compute", [None, "auto", "fp8", "fp16_safe"])
def test_layers_that_comfyui_multiplies_in_fp8_without_a_scale_are_said_to(comfy, fast, compute):
    model = fast("wan")
    call = families.capture(model, "wan")
    model = with_compute(comfy, model, compute) if compute else reporting(model)
    before = states_of(model)[INT8].mode
    assert not_as_said(model, call) == []
    assert states_of(model)[INT8].mode == before == ("fp16_wide" if compute == "fp16_safe" else "fp8")


def test_a_check_compares_a_model_of_fp8_products_with_fp32(comfy, fast):
    """Layers without a bias: torch returns fp32 of fp8 products, so ComfyUI's own take the repeat in fp32 too."""
    model = fast("z_image")
    model = guarding.guarded(comfy, model, check="first step")
    with MatmulSpy(model.model.diffusion_model) as spy:
        families.sample(model, "z_image", steps=1)
    assert {each.result for each in spy.seen if each.operands == ("fp8", "fp8")} == {"bf16"}
    [check] = guarding.report_of(model).checks
    assert (check.arithmetic, check.repeats) == ("fp8", 1)


@pytest.mark.parametrize(("compute", "told"), [("auto", False), ("bf16", True), ("fp32", True), ("fp16_safe", False)])
def test_a_compute_that_leaves_comfyuis_fp8_products_says_so(comfy, fast, compute, told):
    model = with_compute(comfy, fast("z_image"), compute)
    for found in (families.report(comfy, model), families.capture(model, "z_image") and families.report(comfy, model)):
        left = [layer["name"] for layer in found["layers"] if layer["mode"] == "fp8"]
        said = [each["reason"] for each in found["without_effect"] if each["setting"] == f"compute={compute}"]
        assert bool(said) == told and (bool(left) or not told)
        assert all(f"ComfyUI multiplies {len(left)} layers in fp8 itself" in reason for reason in said)


@pytest.mark.parametrize("first", ["input", "residual"])
def test_the_input_of_a_layer_is_read_by_its_name(first):
    """A call by keywords, of which another tensor may be the first."""
    given = {"input": torch.ones(2, 4, dtype=torch.float16), "residual": torch.ones(2, 4)}
    seen._note_input(products := {}, "a", torch.nn.Linear(4, 4), (), {first: given[first], **given})
    assert products == {"a": ("fp16", False)}
