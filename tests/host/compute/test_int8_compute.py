"""compute=int8: int8 weights multiply in int8 wherever the device can, and the report says what every layer really did."""

import pytest
import torch
from comfy.sd import load_bypass_lora_for_models, load_lora_for_models
from halfsafe.nodes.host.comfyui.layers import modules_of
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.precision.base.options import COMPUTE_OPTIONS
from halfsafe.precision.base.patching import patched
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files
from support.families import load, with_compute
from support.int8_models import PastForward, layers_of
from support.matmul_spy import Products, int8_products
from support.measures import relative_error
from support.summing import accumulation

STORAGES = ("int8", "fp8_e4m3fn", "as_file")


@pytest.fixture(scope="module")
def ltxv(models_dir):
    """A model that ComfyUI does not list as safe in fp16."""
    return families.write("ltxv", models_dir / "diffusion_models")


@pytest.fixture(scope="module")
def ltxv_call(comfy, ltxv):
    return families.capture(load(comfy, ltxv, "fp32"), "ltxv")


@pytest.fixture(scope="module")
def stored(comfy, wan):
    """Storage -> the Wan model that is loaded so; each test puts its own plan on a clone."""
    with torch.inference_mode():
        return {storage: load(comfy, wan, storage, "bf16") for storage in STORAGES}


@pytest.fixture
def profile(monkeypatch):
    return lambda name: monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", name)


def entries(comfy, model):
    return {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}


def block_linears(model):
    found = {name: module for name, module in modules_of(model.model).items() if name in model_files.WAN_LINEARS}
    assert len(found) == 20
    return found


def ran(model, call, layers):
    """Layer -> the mode of its products in one call, and how many products of int8 by int8 that call made."""
    families.replay(model, call)
    with Products(layers) as products, int8_products() as spy:
        families.replay(model, call)
    return products.modes(), len(spy)


def run_of(model):
    """The plan's run of a model that was not called yet."""
    model.model.current_patcher = model
    return compute_of(model).runs.of(model.model)


def kernel_of(layer):
    if layer["storage"] not in ("int8", "fp8_e4m3fn"):
        return ""
    return "eager" if layer["mode"] in ("int8", "fp8") else "dequantized"


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("compute", COMPUTE_OPTIONS)
def test_the_report_is_what_the_products_are(comfy, wan, stored, call, profile, compute, storage):
    profile("sm_89")
    models = [with_compute(comfy, stored[storage], compute)]
    if storage == "int8":
        models.append(load(comfy, wan, storage, compute))
    for model in models:
        layers = block_linears(model)
        made, count = ran(model, call, layers)
        found = entries(comfy, model)
        assert {name: found[name]["mode"].replace("fp16_scaled", "fp16_wide") for name in layers} == made
        assert count == sum(layer["mode"] == "int8" for layer in found.values())
        assert (count == 20) == (storage == "int8" and compute in ("auto", "fp8", "int8"))
        assert {name: layer["kernel"] for name, layer in found.items()} == {
            n: kernel_of(layer) for n, layer in found.items()
        }


# profile: (mode of int8 weights, of the others, stream), for a model that is not safe in plain fp16
DEVICES = {
    "sm_61": ("fp32", "fp32", "fp32"),
    "sm_70": ("fp16_wide", "fp16_wide", "fp32"),
    "sm_75": ("int8", "fp16_wide", "fp32"),
    "sm_86": ("int8", "bf16", "bf16"),
    "gfx1100": ("int8", "bf16", "bf16"),
    "mps_m1": ("fp16_wide", "fp16_wide", "fp32"),
    "xpu": ("bf16", "bf16", "bf16"),
    "cpu": ("int8", "fp32", "fp32"),
}


@pytest.mark.parametrize("compute", ["auto", "int8"])
@pytest.mark.parametrize("name", DEVICES)
def test_the_stream_is_fp32_where_the_model_is_not_safe_in_16_bit(comfy, ltxv, ltxv_call, profile, name, compute):
    profile(name)
    model = load(comfy, ltxv, "int8", compute)
    of_int8, of_others, stream = DEVICES[name]
    if compute == "auto" and name == "gfx1100":
        of_int8 = "bf16"  # measured to be slower in int8
    layers = layers_of(model)
    made, count = ran(model, ltxv_call, layers)
    found = entries(comfy, model)
    plain = lambda layer: layer["mode"].replace("fp16_scaled", "fp16_wide")  # noqa: E731
    assert {name: plain(found[name]) for name in layers} == made
    # Where a bound proves that its result fits, a layer of a safe plan returns fp16.
    either = {"fp16", "fp16_wide"} if of_int8 == "fp16_wide" else {of_int8}
    assert set(made.values()) <= either and count == len(layers) * (of_int8 == "int8")
    others = {plain(layer) for layer in found.values() if layer["class"] == "Linear" and layer["name"] not in layers}
    assert (
        others <= ({"fp16", "fp16_wide"} if of_others == "fp16_wide" else {of_others})
        and others
        and {layer["stream"] for layer in found.values()} == {stream}
    )
    told = [entry["setting"] for entry in families.report(comfy, model)["without_effect"]]
    assert told == (["compute=int8"] if compute == "int8" and of_int8 != "int8" else [])
    if of_int8 != "int8":
        why = f"{name} has no int8 matmul" if compute == "int8" else "its int8 weight is unpacked in each call: "
        assert all(why in found[layer]["reason"] for layer in layers)


def test_int8_with_an_fp32_stream_cannot_overflow(comfy, models_dir, profile):
    """Weights whose plain fp16 result is not finite."""
    path = families.files_in(models_dir / "diffusion_models", "int8_loud")("ltxv", "ffn")
    exact = load(comfy, path, "fp32", "fp32")
    call = families.capture(exact, "ltxv")
    profile("sm_75")
    assert not torch.isfinite(families.replay(load(comfy, path, "fp16", "fp16"), call)).all()
    result = families.replay(load(comfy, path, "int8", "int8"), call)
    assert relative_error(families.replay(exact, call), result) < 0.02


def test_a_model_without_int8_weights_is_told_so(comfy, wan, profile):
    profile("sm_86")
    model = load(comfy, wan, "as_file", "int8")
    (entry,) = families.report(comfy, model)["without_effect"]
    assert entry["setting"] == "compute=int8" and "storage int8" in entry["reason"]


RULES = {
    "a layer in int8": ("int8", "bf16", "*.ffn.0 compute=int8", "int8", ""),
    "a layer in int8 beside fp16_safe": ("int8", "fp16_safe", "*.ffn.0 compute=int8", "int8", ""),
    "a layer in bf16": ("int8", "int8", "*.ffn.0 compute=bf16", "bf16", ""),
    "a layer that is not stored in int8": ("as_file", "bf16", "*.ffn.0 compute=int8", "bf16", "not in int8"),
    "an fp8 weight": ("fp8_e4m3fn", "bf16", "*.ffn.0 compute=int8", "bf16", "not in int8"),
    "fp8 of an int8 weight": ("int8", "auto", "*.ffn.0 compute=fp8", "int8", "not in fp8"),
    "fp16 sums of int8": ("int8", "int8", "*.ffn.0 accumulation=fp16", "int8", "multiply in int8"),
}


@pytest.mark.parametrize("case", RULES)
def test_rules(comfy, stored, call, profile, case):
    profile("sm_86")
    storage, compute, text, expected, problem = RULES[case]
    model = with_compute(comfy, stored[storage], compute, rules_from(text))
    made, _ = ran(model, call, block_linears(model))
    found = entries(comfy, model)
    assert {found[f"blocks.{block}.ffn.0"]["mode"] for block in (0, 1)} == {expected}
    assert {name: found[name]["mode"].replace("fp16_scaled", "fp16_wide") for name in made} == made
    told = [entry["reason"] for entry in families.report(comfy, model)["without_effect"] if entry["setting"] == text]
    assert [problem in reason for reason in told] == [True] * len(told) and bool(told) == bool(problem)


def test_a_rule_for_int8_on_a_device_without_it_says_so(comfy, wan, call, profile):
    profile("sm_70")
    model = load(comfy, wan, "int8", "fp16_safe", rules_from("blocks.0.ffn.0 compute=int8"))
    (entry,) = families.report(comfy, model)["without_effect"]
    assert entry["setting"] == "blocks.0.ffn.0 compute=int8" and "no int8 matmul" in entry["reason"]
    assert set(ran(model, call, block_linears(model))[0].values()) <= {"fp16", "fp16_wide"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rule_on_the_stream_takes_the_fp32_result_of_the_product(comfy, stored, profile, dtype):
    profile("sm_86")
    compute = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
    model = with_compute(comfy, stored["int8"], compute, rules_from("blocks.0.ffn.2 compute=int8 stream=fp32"))
    module, run = block_linears(model)["blocks.0.ffn.2"], run_of(model)
    x = (module.weight.dequantize()[:4].sign() * 3e4).to(dtype)
    with patched(run.patches), int8_products() as spy:
        result = module(x)
    expected = x.float() @ module.weight.dequantize().float().T + module.bias.float()
    assert len(spy) == 1 and result.dtype == torch.float32
    assert relative_error(expected, result) < 0.02 and expected.abs().max() > 65504


@pytest.mark.parametrize("compute", ["int8", "fp16_safe", "fp8"])
@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
@pytest.mark.parametrize("way", ["merged", "at each call"])
def test_a_lora_runs_as_the_report_says(comfy, stored, call, profile, way, storage, compute):
    profile("sm_89")
    lora = model_files.lora({"blocks.0.ffn.0": (1024, 256), "blocks.1.self_attn.v": (256, 256)}, size=0.1)
    model = with_compute(comfy, stored[storage], compute)
    layers = block_linears(model)
    undo = []
    if way == "merged":
        model = load_lora_for_models(model, None, dict(lora), 1.0, 0.0)[0]
    else:
        added = {name: model_files.lora_delta(lora, name) for name in ("blocks.0.ffn.0", "blocks.1.self_attn.v")}
        for name, delta in added.items():
            layers[name].weight_function.append(lambda weight, delta=delta: weight + delta.to(weight.dtype))
            undo.append(layers[name])
    made, _ = ran(model, call, layers)
    found = entries(comfy, model)
    for module in undo:
        module.weight_function.clear()
    assert {name: found[name]["mode"].replace("fp16_scaled", "fp16_wide") for name in layers} == made
    quantized = {name: layer["kernel"] for name, layer in found.items() if layer["kernel"]}
    assert quantized == {name: kernel_of(found[name]) for name in quantized}


@pytest.mark.parametrize("compute", ["auto", "int8", "fp32"])
def test_a_lora_in_bypass_mode(comfy, stored, call, profile, compute):
    profile("sm_86")
    lora = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=0.1)
    plain = with_compute(comfy, stored["int8"], compute)
    model = load_bypass_lora_for_models(plain, None, lora, 1.0, 0.0)[0]
    with int8_products() as spy:
        moved = families.replay(model, call)
    assert len(spy) == (0 if compute == "fp32" else 20)
    assert relative_error(families.replay(plain, call), moved) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("text", ["", "*.ffn.2 stream=fp32", "*.ffn.2 compute=fp32"])
def test_layers_that_comfyui_multiplies_past_their_forward(comfy, stored, profile, text, dtype):
    """ComfyUI dequantizes there where the weight's dtype is not the input's."""
    profile("sm_86")
    model = with_compute(comfy, stored["int8"], "int8", rules_from(text))
    mlp, run = PastForward(block_linears(model)["blocks.0.ffn.2"]), run_of(model)
    x = torch.randn(4, 1024).to(dtype)
    with patched(run.patches), run.calling, int8_products() as spy:
        result = mlp(x)
    assert len(spy) == ("compute" not in text)
    assert result.dtype == (torch.float32 if "stream" in text else dtype)
    active = torch.nn.functional.gelu(x.float(), approximate="tanh")
    expected = active @ mlp.fc2.weight.dequantize().float().T + mlp.fc2.bias.float()
    assert relative_error(expected, result) < 0.02


def test_neither_fp16_sums_nor_fast_fp8_sums_act_on_int8(comfy, stored, call, profile):
    profile("sm_89")
    model = accumulation(
        comfy, with_compute(comfy, stored["int8"], "int8"), fp16_accumulation="auto", fp8_fast_accumulation="on"
    )
    families.replay(model, call)
    report = families.report(comfy, model)
    int8 = [layer for layer in report["layers"] if layer["mode"] == "int8"]
    assert len(int8) == 20 and {layer["accumulation"] for layer in int8} == {"fp32"}
    assert all("int32" in layer["reason"] for layer in int8)
    told = {entry["setting"]: entry["reason"] for entry in report["without_effect"]}
    assert "int8" in told["fp8_fast_accumulation=on"]
    assert not report["flags"]["fp8_fast_accumulation"]["in_scope"]
