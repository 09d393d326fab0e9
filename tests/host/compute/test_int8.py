"""Files in ComfyUI's int8 format: what the report says of each layer is the product that it makes."""

import pytest
import torch
from comfy import ops as comfy_ops
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_diffusion_model
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.nodes.host.reporting.badge import with_live_report
from halfsafe.precision.plan.rules import rules_from
from support import dialects, families, model_files, tiny_models
from support.families import load, with_compute
from support.guarding import guarded
from support.int8_models import dequantized, int8, layers_of
from support.matmul_spy import Products
from support.measures import relative_error

ASKED = {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16", "fp16_safe": "fp16_wide"}
"""Compute -> mode."""


@pytest.fixture(scope="module")
def file(wan, models_dir):
    return model_files.in_dialect(wan, models_dir / "diffusion_models" / "int8.safetensors", int8)


@pytest.fixture(scope="module")
def exact(comfy, wan, models_dir, call):
    """What the int8 weights give in fp32."""
    path = model_files.in_dialect(wan, models_dir / "diffusion_models" / "int8_plain.safetensors", dequantized)
    return families.replay(load(comfy, path, "fp32", "fp32"), call)


def made(model, call):
    """Layer -> the mode of the products it makes in one call of a model that is not calibrating any more."""
    families.replay(model, call)
    with Products(layers_of(model)) as products:
        families.replay(model, call)
    return products.modes()


def reported(comfy, model):
    layers = {layer["name"]: layer["mode"] for layer in families.report(comfy, model)["layers"]}
    return {name: layers[name].replace("fp16_scaled", "fp16_wide") for name in layers_of(model)}


def test_the_fixture_is_what_kitchen_writes(tmp_path):
    weights, biases = dialects.reference(("a", "b", "c", "d"), (256, 384))
    tensors = model_files.load_file(dialects.native(tmp_path / "native.safetensors", weights, biases))
    layouts = {
        "c": ("TensorWiseINT8Layout", {"per_channel": True, "convrot": True}),
        "d": ("TensorCoreConvRotW4A4Layout", {}),
    }
    for layer, (layout, options) in layouts.items():
        held = QuantizedTensor.from_float(weights[layer], layout, convrot_groupsize=64, **options).state_dict(
            f"{layer}.weight"
        )
        assert {n: (t.shape, t.dtype) for n, t in held.items()} == {
            n: (tensors[n].shape, tensors[n].dtype) for n in held
        }


@pytest.mark.parametrize("compute", ASKED)
@pytest.mark.parametrize("node", ["loader", "compute"])
@torch.inference_mode()
def test_a_dtype_that_is_asked_for_is_what_int8_weights_multiply_in(comfy, file, call, exact, node, compute):
    model = load(comfy, file, "as_file", compute if node == "loader" else "auto")
    model = model if node == "loader" else with_compute(comfy, model, compute)
    assert len(layers_of(model)) == 20
    assert set(made(model, call).values()) == {ASKED[compute]}
    assert reported(comfy, model) == made(model, call)
    bounds = {"fp32": 1e-5, "fp16_safe": 2e-3, "fp16": 1e-2, "bf16": 3e-2}
    assert relative_error(exact, families.replay(model, call)) < bounds[compute]


@pytest.mark.parametrize("profile", ["cpu", "sm_75", "sm_86", "sm_89"])
@pytest.mark.parametrize("node", ["loader", "compute", "goal", "core's loader", "core's compute dtype"])
@torch.inference_mode()
def test_where_nothing_is_asked_for_the_product_stays_int8(comfy, file, call, monkeypatch, node, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    if node == "core's loader":
        model = load_diffusion_model(str(file))
    elif node == "core's compute dtype":
        model = families.stock(file, torch.bfloat16)
    elif node == "loader":
        model = load(comfy, file, "auto", "auto")
    elif node == "compute":
        model = with_compute(comfy, load(comfy, file, "as_file", "bf16"), "auto")
    else:
        model = comfy.run("HalfsafeAutoPrecision", model=load(comfy, file, "as_file", "bf16"), goal="balanced")[0]
    products = made(model, call)
    assert products == reported(comfy, model)
    assert set(products.values()) == {"int8"}


@torch.inference_mode()
def test_the_report_tells_where_comfyui_dequantizes_by_itself(comfy, file, call):
    """Its own compute dtype node casts weights to the new dtype, which dequantizes those that stood for another."""
    model = families.stock(file, torch.bfloat16)
    model.set_model_compute_dtype(torch.float16)
    products = made(model, call)
    assert set(products.values()) == {"fp16"} and products == reported(comfy, model)


def called_with_input_act(linear, x, input_act, *_):
    return linear(comfy_ops.INPUT_ACT_EAGER[input_act](x))


@pytest.mark.parametrize(("newest", "product"), [(False, "int8"), (True, "fp32")])
@torch.inference_mode()
def test_full_precision_products_of_int8_are_reported_as_each_comfyui_makes_them(
    comfy, file, call, monkeypatch, newest, product
):
    """ComfyUI 0.38 dequantizes an int8 weight that ``_full_precision_mm`` is set on; those before it do so with fp8 only."""
    model, _ = with_live_report(families.stock(file, torch.bfloat16), None)
    if newest:  # 0.33's multiplies past the layer, 0.38's calls it
        monkeypatch.setattr(comfy_ops, "linear_input_act", called_with_input_act, raising=False)
    for module in layers_of(model).values():
        monkeypatch.setattr(module, "_full_precision_mm", True)
        if newest:
            forward = module._forward
            monkeypatch.setattr(type(module), "can_use_quantized_matmul", lambda *_: False, raising=False)
            monkeypatch.setattr(
                module, "_forward", lambda x, weight, bias, forward=forward: forward(x, weight.dequantize(), bias)
            )
    products = made(model, call)
    assert set(products.values()) == {product} and products == reported(comfy, model)


RULES = {
    "mixed": (
        "*.ffn.0 compute=fp32\n*.ffn.2 compute=fp16_safe\n*self_attn.q compute=bf16\n*self_attn.k compute=fp16",
        {"ffn.0": "fp32", "ffn.2": "fp16_wide", "self_attn.q": "bf16", "self_attn.k": "fp16"},
    ),
    "stream alone": ("*.ffn.2 stream=fp32", {"ffn.2": "fp16_wide"}),
}


@pytest.mark.parametrize("base", ["auto", "bf16", "fp16_safe"])
@pytest.mark.parametrize("name", RULES)
@torch.inference_mode()
def test_rules_of_each_layer(comfy, file, call, exact, name, base):
    text, expected = RULES[name]
    model = load(comfy, file, "as_file", base, rules_from(text))
    products = made(model, call)
    otherwise = "int8" if base == "auto" else ASKED[base]
    for layer, mode in products.items():
        wanted = expected.get(layer.partition(".")[2].partition(".")[2], otherwise)
        if wanted == "fp16_wide" and name != "mixed":
            wanted = otherwise  # no rule asks for fp16 operands
        assert mode == wanted, layer
    assert reported(comfy, model) == products
    assert relative_error(exact, families.replay(model, call)) < 0.05


@torch.inference_mode()
def test_the_guard_repeats_without_int8_and_reports_it(comfy, models_dir, overflowing, call):
    path = model_files.in_dialect(overflowing, models_dir / "diffusion_models" / "int8_overflowing.safetensors", int8)
    model = guarded(comfy, load(comfy, path, "as_file", "auto"))
    model.set_model_compute_dtype(torch.float16)
    reference = families.replay(load(comfy, path, "as_file", "fp32"), call)
    result = families.replay(model, call)
    assert Guard.on(model).report(model).verdict == "recovered"
    assert relative_error(reference, result) < 0.02
    products = made(model, call)
    assert products == reported(comfy, model)
    widened = Guard.on(model).report(model).escalations.keys() & products.keys()
    assert widened and "int8" not in {products[name] for name in widened}
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.fp32())
    products = made(model, call)
    assert set(products.values()) == {"fp32"} and products == reported(comfy, model)


@torch.inference_mode()
def test_a_text_encoder_is_made_int8_as_it_loads(comfy, models_dir):
    source = tiny_models.narrow_clip_l(models_dir / "text_encoders" / "clip_l_made_int8.safetensors")
    inputs = {"clip_name1": source.name, "type": "stable_diffusion", "compute": "auto"}
    exact, clip = (comfy.run("HalfsafeLoadCLIP", **inputs, storage=storage)[0] for storage in ("fp32", "int8"))
    held = [m for m in clip.cond_stage_model.modules() if isinstance(getattr(m, "weight", None), QuantizedTensor)]
    assert len(held) == 36 and {m.quant_format for m in held} == {"int8_tensorwise"}
    expected, result = (one.encode_from_tokens(one.tokenize("a lighthouse")) for one in (exact, clip))
    assert 0 < relative_error(expected, result) < 0.05
