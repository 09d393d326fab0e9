"""The guard on int8 layers: one bad token spoils one row, and what goes wrong is dequantized, seen by a spy on the products."""

import json

import pytest
import torch
from halfsafe.nodes.host.comfyui.layers import modules_of
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.precision.plan.rules import rules_from
from support import dialects, families, model_files
from support.families import load
from support.guarding import guarded, inside, report_of
from support.int8_models import layers_of
from support.matmul_spy import Products, int8_products
from support.measures import relative_error

BAD_TOKEN = 5
CULPRIT = "blocks.0.ffn.2"
SPOILED = "blocks.0.ffn.0"  # called as a module: ComfyUI 0.33 calls `forward` of ffn.2 by itself, with its activation (linear_input_act)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "gfx1201")


def load_int8(comfy, path, rules=""):
    """A model in int8 with fp16 between its layers, which rules alone ask for: `auto` has bf16 or fp32 there."""
    return load(comfy, path, "int8", "fp16", rules_from(f"* compute=int8\n{rules}"))


def made(model, call):
    families.replay(model, call)
    with Products(layers_of(model)) as products, int8_products() as spy:
        result = families.replay(model, call)
    return products.modes(), len(spy), result


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_one_bad_token_spoils_one_row_of_the_product(comfy, wan, dtype, bad):
    module = modules_of(load_int8(comfy, wan).model)["blocks.0.ffn.0"]
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    clean = module(x)
    x[BAD_TOKEN, 7] = bad
    with int8_products() as spy:
        spoiled = module(x)
    assert len(spy) == 1
    others = torch.arange(64) != BAD_TOKEN
    assert not torch.isfinite(spoiled[BAD_TOKEN]).any()
    assert torch.equal(spoiled[others], clean[others])


def spoiled_token(model, image):
    """The model with one token of one image so large, at the input of a layer, that its product passes fp16's range."""
    layer = modules_of(model.model)[SPOILED]
    row = layer.weight.dequantize()[0].sign() * 3e4

    def change(executor, args, kwargs):
        def before(module, inputs):
            x = inputs[0].clone()
            x[image, BAD_TOKEN] = row
            return (x,)

        hook = layer.register_forward_pre_hook(before)
        try:
            return executor(*args, **kwargs)
        finally:
            hook.remove()

    return inside(model, change)


def test_an_overflow_is_dequantized_and_the_other_layers_stay_in_int8(comfy, overflowing, call):
    exact = families.replay(load(comfy, overflowing, "fp32", "fp32"), call)
    model = guarded(comfy, load_int8(comfy, overflowing))
    assert relative_error(exact, families.replay(model, call)) < 0.02
    (event,) = report_of(model).events
    found = (event.layer, event.op, event.kind, event.from_mode, event.to_mode, event.recovered)
    assert found == (CULPRIT, "matmul", "overflow", "int8", "fp16_wide", True)
    products, count, result = made(model, call)
    layers = {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}
    assert {name: layers[name]["mode"].replace("fp16_scaled", "fp16_wide") for name in products} == products
    assert products[CULPRIT] == "fp16_wide" and layers[CULPRIT]["kernel"] == "dequantized"
    assert count == 19 == sum(layer["kernel"] == "eager" for layer in layers.values())
    assert {layers[name]["stream"] for name in products} == {"fp32"}
    assert relative_error(exact, result) < 0.02
    exact_sums = {name for name, layer in layers.items() if "int32" in layer["reason"]}
    assert exact_sums == {name for name, mode in products.items() if mode == "int8"}


def test_the_event_names_the_image(comfy, wan):
    model = load_int8(comfy, wan)
    call = families.capture(model, "wan", batch=2, cond=families.conditioning("wan", batch=2))
    spoiled = spoiled_token(model, image=1)
    clean, bad = families.replay(model, call), families.replay(spoiled, call)
    assert torch.isfinite(clean).all() and not torch.isfinite(bad[1]).all()
    assert torch.equal(bad[0], clean[0])
    watching = guarded(comfy, spoiled, on_nan="report")
    families.replay(watching, call)
    (event,) = report_of(watching).events
    assert (event.layer, event.batch_rows) == (SPOILED, [1])


@pytest.mark.parametrize("whole", [True, False])
def test_what_is_escalated_in_int8_is_dequantized(comfy, wan, call, whole):
    model = guarded(comfy, load_int8(comfy, wan))
    exact = families.replay(load(comfy, wan, "fp32", "fp32"), call)
    families.replay(model, call)
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.fp32() if whole else state.plan.wider({CULPRIT: "fp16"}))
    products, count, result = made(model, call)
    assert count == (0 if whole else 19) and products[CULPRIT] == ("fp32" if whole else "fp16")
    assert relative_error(exact, result) < 0.02
    layers = {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}
    assert {name: layers[name]["mode"] for name in products} == products
    assert layers[CULPRIT]["kernel"] == "dequantized"


def four_bits(path, weights, biases):
    """``convrot_w4a4``, ``nvfp4`` and ``mxfp8``, one after the other, as ComfyUI and comfy-kitchen write them."""
    from comfy.quant_ops import QuantizedTensor

    kinds = {
        "convrot_w4a4": ("TensorCoreConvRotW4A4Layout", {"convrot_groupsize": 64}, {"convrot_groupsize": 64}),
        "nvfp4": ("TensorCoreNVFP4Layout", {}, {}),
        "mxfp8": ("TensorCoreMXFP8Layout", {}, {}),
    }
    tensors = {}
    for index, (layer, weight) in enumerate(weights.items()):
        name = list(kinds)[index % 3]
        layout, options, settings = kinds[name]
        held = QuantizedTensor.from_float(weight, layout, **options).state_dict(f"{layer}.weight")
        tensors |= {**held, f"{layer}.comfy_quant": dialects.comfy_quant_bytes({"format": name, **settings})}
    tensors = {name: t.view(torch.uint8) if t.dtype == torch.float8_e8m0fnu else t for name, t in tensors.items()}
    return dialects.save(path, tensors, biases, {"format": "pt"})


def test_four_bit_weights_are_dequantized_when_they_are_escalated(comfy, wan, models_dir, call):
    path = model_files.in_dialect(wan, models_dir / "diffusion_models" / "four_bits.safetensors", four_bits)
    model = guarded(comfy, load(comfy, path, "as_file", "auto"))
    families.replay(model, call)
    layers = {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}
    kernels = {(layer["storage"], layer["kernel"]) for layer in layers.values() if layer["kernel"]}
    assert kernels == {("int4", "eager"), ("nvfp4", "dequantized"), ("mxfp8", "dequantized")}
    before, packed = families.replay(model, call), layers_of(model)
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.fp32())
    with Products(packed) as products:
        after = families.replay(model, call)
    # The last product of each is the layer's own; those before it undo rotations, as a part of dequantizing.
    assert {made[-1] for made in products.made.values()} == {"fp32"}
    assert len(products.made) == 20, sorted(products.made)
    layers = {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}
    assert {(layers[name]["mode"], layers[name]["kernel"]) for name in packed} == {("fp32", "dequantized")}
    assert 0 < relative_error(after, before) < 0.5
    assert json.dumps(layers)
