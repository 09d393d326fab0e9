"""fp8 matrix products with a dynamic activation scale, as on a device that has them (simulated: kernels are the CPU's)."""

import contextlib
import logging

import pytest
import torch
import torch.nn.functional as F
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_bypass_lora_for_models
from halfsafe.nodes.host.comfyui.weights import core_weights
from halfsafe.nodes.host.compute.bound import Fp8Linear
from halfsafe.precision.arithmetic.linear import lent
from halfsafe.precision.base.layers import kind_of
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.formats.fp8 import fast_accumulation
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files, tiny_models
from support.families import load, with_compute
from support.matmul_spy import Products
from support.measures import relative_error
from support.summing import accumulation


@pytest.fixture
def with_fp8_units(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(logging.getLogger("comfy_kitchen.tensor.fp8"), "disabled", True)


def fp8_layer(comfy, wan):
    model = load(comfy, wan, "fp8_e4m3fn", "fp8")
    return model, model.model.diffusion_model.blocks[0].ffn[0]


def outliers(dtype=torch.bfloat16):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[:, 3] *= 1000
    return x


@torch.inference_mode()
def test_a_channel_of_outliers_costs_core_its_picture_and_us_three_percent(comfy, wan, with_fp8_units):
    _, module = fp8_layer(comfy, wan)
    x = outliers()
    before = x.clone()
    reference = F.linear(x.float(), module.weight.dequantize().float(), module.bias.float())
    assert relative_error(reference, Fp8Linear(module)(x)) < 0.03
    assert torch.equal(x, before)
    module._full_precision_mm = module.comfy_force_cast_weights = False
    assert relative_error(reference, type(module).forward(module, x)) > 0.5


@torch.inference_mode()
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_stays_visible(comfy, wan, with_fp8_units, bad):
    _, module = fp8_layer(comfy, wan)
    x = outliers()
    x[0, 0] = bad
    assert not torch.isfinite(Fp8Linear(module)(x)).all()


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_scale_that_the_file_states_clips_no_input_and_hides_no_overflow(comfy, wan, with_fp8_units, dtype):
    _, module = fp8_layer(comfy, wan)
    x = (outliers() / 8).to(dtype)
    expected = Fp8Linear(module)(x)
    module.input_scale = torch.nn.Parameter(x.abs().amax().float() / 448 / 4, requires_grad=False)
    assert torch.equal(Fp8Linear(module)(x), expected)
    x[0, 0] = torch.inf
    assert not torch.isfinite(Fp8Linear(module)(x)).all()


@torch.inference_mode()
@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 5, 256), (2, 3, 4, 256)])
def test_every_rank_of_input_and_an_fp32_stream(comfy, wan, with_fp8_units, shape):
    _, module = fp8_layer(comfy, wan)
    x = torch.randn(shape)
    result = Fp8Linear(module)(x)
    assert result.shape == (*shape[:-1], 1024)
    assert relative_error(F.linear(x, module.weight.dequantize().float(), module.bias.float()), result) < 0.06


def test_the_model_multiplies_in_fp8_where_weights_are_and_16_bit_elsewhere(comfy, wan, call, with_fp8_units):
    model, _ = fp8_layer(comfy, wan)
    products = []
    quantize = Fp8Linear.__call__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fp8Linear, "__call__", lambda self, x: products.append(self.module) or quantize(self, x))
        result = families.replay(model, call)
    layers = {entry["name"]: entry for entry in families.report(comfy, model)["layers"]}
    fp8 = {name for name, entry in layers.items() if entry["mode"] == "fp8"}
    assert fp8 == {name for name, entry in layers.items() if entry["storage"] == "fp8_e4m3fn"}
    modules = dict(model.model.diffusion_model.named_modules())
    assert {id(module) for module in products} == {id(modules[name]) for name in fp8}
    assert layers["head.head"]["mode"] == "fp16", "the rest is as auto has it"
    weight_only = families.replay(load(comfy, wan, "fp8_e4m3fn", "fp16"), call)
    assert 1e-4 < relative_error(weight_only, result) < 0.05


def test_sizes_that_are_no_multiple_of_16_run_in_16_bit_and_are_named(comfy, models_dir, call, with_fp8_units):
    path = tiny_models.wan(models_dir / "diffusion_models" / "odd.safetensors", ffn=1000)
    model = load(comfy, path, "fp8_e4m3fn", "fp8")
    reference = families.replay(load(comfy, path, "fp8_e4m3fn", "bf16"), call)
    assert relative_error(reference, families.replay(model, call)) < 0.05
    reasons = [entry["reason"] for entry in families.report(comfy, model)["without_effect"]]
    named = [reason for reason in reasons if "multiples of 16" in reason]
    assert len(named) == 4 and any("blocks.1.ffn.2" in reason and "256 x 1000" in reason for reason in named)


def test_without_fp8_units_weights_are_widened_and_the_report_says_so(comfy, wan, call, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    model = load(comfy, wan, "fp8_e4m3fn", "fp8")
    report = families.report(comfy, model)
    reference = families.replay(load(comfy, wan, "fp8_e4m3fn", "auto"), call)
    assert torch.equal(families.replay(model, call), reference)
    assert any(
        entry["setting"] == "compute=fp8" and "no fp8 matmul" in entry["reason"] for entry in report["without_effect"]
    )
    assert "fp8" not in {entry["mode"] for entry in report["layers"]}


def linears(model):
    return {name: module for name, module in model.model.diffusion_model.named_modules() if kind_of(module) == "linear"}


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
@torch.inference_mode()
def test_activations_are_e4m3_beside_weights_of_either_format(comfy, wan, call, with_fp8_units, storage, fast):
    """CUDA multiplies no e5m2 by e5m2; a CPU does."""
    model = load(comfy, wan, storage, "fp8")
    if fast:
        model = accumulation(comfy, model, fp8_fast_accumulation="on")
    with Products(linears(model)) as products:
        result = families.replay(model, call)
    weight = {"fp8_e4m3fn": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}[storage]
    assert set(products.scaled) == {(torch.float8_e4m3fn, weight)}
    fp8 = {entry["name"] for entry in families.report(comfy, model)["layers"] if entry["mode"] == "fp8"}
    assert fp8 == {name for name, made in products.made.items() if "fp8" in made} and len(products.scaled) == len(fp8)
    assert relative_error(families.replay(load(comfy, wan, storage, "fp32"), call), result) < 0.08


@pytest.mark.parametrize(
    ("storage", "rules"),
    [("as_file", "blocks.0.ffn.0 storage=fp8_e4m3fn"), ("fp8_e4m3fn", "blocks.0.ffn.0 storage=as_file")],
)
@torch.inference_mode()
def test_of_a_file_in_two_storages_the_layers_in_fp8_multiply_in_fp8(
    comfy, wan, call, models_dir, with_fp8_units, storage, rules
):
    """Whatever most of the file is stored in."""
    path = models_dir / "diffusion_models" / f"two_storages_{storage}.safetensors"
    convert_file(wan, path, storage, rules_from(rules, "none"))
    model = load(comfy, path, "as_file", "fp8")
    with Products(linears(model)) as products:
        families.replay(model, call)
    fp8 = {name for name, made in products.made.items() if "fp8" in made}
    assert fp8 == {
        name
        for name, layer in linears(model).items()
        if isinstance(layer.weight, QuantizedTensor) and name in products.made
    }
    report = families.report(comfy, model)
    assert fp8 == {entry["name"] for entry in report["layers"] if entry["mode"] == "fp8"}
    assert ("blocks.0.ffn.0" in fp8) == (storage == "as_file") and not report["without_effect"]


@pytest.mark.parametrize("base", ["fp16_safe", "bf16", "fp16"])
@pytest.mark.parametrize("node", ["loader", "compute"])
@torch.inference_mode()
def test_a_rule_multiplies_in_fp8_whatever_dtype_the_weight_stands_for(comfy, wan, call, with_fp8_units, base, node):
    rules = rules_from("*.ffn.0 compute=fp8")
    if node == "loader":
        model = load(comfy, wan, "fp8_e4m3fn", base, rules)
    else:
        model = with_compute(comfy, load(comfy, wan, "fp8_e4m3fn", "fp32"), base, rules)
    with Products(linears(model)) as products:
        families.replay(model, call)
    fp8 = {name for name, made in products.made.items() if "fp8" in made}
    assert fp8 == {"blocks.0.ffn.0", "blocks.1.ffn.0"}
    assert fp8 == {entry["name"] for entry in families.report(comfy, model)["layers"] if entry["mode"] == "fp8"}


@pytest.mark.parametrize("amax", [1.0, 5e-3, 1e-3, 0.0])
@torch.inference_mode()
def test_quiet_fp16_activations_are_no_nan(comfy, wan, with_fp8_units, amax):
    """comfy-kitchen's eager kernel multiplies by 1 / scale in fp16, which passes its range below amax 0.0068."""
    _, module = fp8_layer(comfy, wan)
    x = (torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) * 2 - 1).half() * amax
    reference = F.linear(x.float(), module.weight.dequantize().float())
    result = Fp8Linear(module)(x).float() - module.bias.float()
    assert (result - reference).norm() <= 0.04 * reference.norm() + 1e-3 * module.bias.float().norm()


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_weights_are_handed_out_as_plain_numbers(comfy, wan, storage, dtype):
    """A quantized one would be transposed a byte at a time, in every product."""
    module = load(comfy, wan, storage, "fp16_safe").model.diffusion_model.blocks[0].ffn[0]
    with lent(core_weights(module, torch.zeros(1), dtype)) as (weight, bias):
        assert not isinstance(weight, QuantizedTensor) and weight.dtype == dtype and bias.dtype == torch.float32
        assert torch.equal(weight, module.weight.to(dtype).dequantize())


@pytest.mark.parametrize("base", ["fp8", "fp16_safe"])
def test_a_lora_in_bypass_mode_is_multiplied_in_16_bit(comfy, wan, call, with_fp8_units, base):
    """The layer's forward is then the LoRA's, which our product cannot stand in for."""
    lora = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=0.1)
    rules = rules_from("*.ffn.0 compute=fp8") if base != "fp8" else None
    model = load_bypass_lora_for_models(load(comfy, wan, "fp8_e4m3fn", base, rules), None, lora, 1.0, 0.0)[0]
    families.replay(model, call)
    with Products(linears(model)) as products:
        families.replay(model, call)
    modes = {entry["name"]: entry["mode"] for entry in families.report(comfy, model)["layers"]}
    expected = "fp16" if base == "fp8" else "bf16"  # bf16 between fp32 values
    assert modes["blocks.0.ffn.0"] == expected and expected in products.made["blocks.0.ffn.0"]
    assert modes["blocks.1.ffn.0"] == "fp8" and set(products.made["blocks.1.ffn.0"]) == {"fp8"}


@pytest.mark.parametrize("fast", [False, True])
@torch.inference_mode()
def test_a_product_that_lacks_memory_is_asked_once(comfy, wan, monkeypatch, fast):
    """Its fallback dequantizes the weight, which takes more."""
    _, module = fp8_layer(comfy, wan)
    asked = []

    def lacking(*operands, **options):
        asked.append(operands)
        raise torch.OutOfMemoryError("Allocation on device")

    monkeypatch.setattr(torch, "_scaled_mm", lacking)
    refused = {}
    with fast_accumulation(refused) if fast else contextlib.nullcontext(), pytest.raises(torch.OutOfMemoryError):
        Fp8Linear(module)(outliers())
    assert len(asked) == 1 and not refused


def test_a_product_that_cannot_run_in_fp8_is_told_once(comfy, wan, call, monkeypatch, caplog):
    def refused(*args, **options):
        raise RuntimeError("no such product on this device")

    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(torch, "_scaled_mm", refused)
    model = families.load(comfy, wan, "fp8_e4m3fn", "fp8")
    for _ in range(2):
        families.replay(model, call)
    assert sum("no such product" in record.getMessage() for record in caplog.records) == 1
