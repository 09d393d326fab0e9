"""The report against a spy on the products: every compute option, storage, rule, setting and device profile.

On a CPU an ``fp16_wide`` product is one of rounded operands in fp32; on fake CUDA tensors it is ``mm(out_dtype)`` itself.
"""

import functools

import pytest
import torch
from halfsafe.precision.devices.profiles import PROFILE_NAMES
from halfsafe.precision.plan.rules import rules_from
from support import families, tiny_models
from support.cuda_rules import CudaRules
from support.fake_cuda import FakeCuda
from support.fake_tensors import fake_cuda_tensors
from support.families import load, with_compute
from support.matmul_spy import MatmulSpy, differences
from support.rows import rotated
from support.summing import accumulation

COMPUTES = ("auto", "fp16", "fp16_safe", "bf16", "fp32", "fp8", "int8")
STORAGES = ("as_file", "fp8_e4m3fn", "fp8_e5m2", "int8")
CALLED_IN_FP32 = "patch_embedding"  # comfy/ldm/wan/model.py: self.patch_embedding(x.float())
RULES = {
    "fp32 layer": "blocks.0.ffn.0 compute=fp32",
    "safe layer": "blocks.0.ffn.* compute=fp16_safe",
    "bf16 layer": "blocks.0.self_attn.* compute=bf16",
    "fp32 stream": "blocks.0.ffn.2 compute=fp32 stream=fp32",
    "fp16 sums": "blocks.0.ffn.0 compute=fp16 accumulation=fp16",
    "fp8 layer": "blocks.0.ffn.* compute=fp8",
}
SETTINGS = {
    "auto": {"fp16_accumulation": "auto"},
    "on": {"fp16_accumulation": "on"},
    "reduced off": {"reduced_precision_reduction": "off"},
    "fp8 fast": {"fp8_fast_accumulation": "on"},
    "attention": {"attention": "fp32"},
}


@pytest.fixture(scope="module")
def wan(models_dir):
    """One block: what is compared is arithmetic, not depth."""
    return tiny_models.wan(models_dir / "diffusion_models" / "what_ran.safetensors", blocks=1, ffn=512)


@pytest.fixture(scope="module")
def call(comfy, wan):
    return families.capture(load(comfy, wan, "fp32"), "wan")


@pytest.fixture
def profile(monkeypatch):
    return lambda name: monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", name)


def on_a_cpu(model, call):
    families.replay(model, call)
    with MatmulSpy(model.model.diffusion_model) as spy:
        families.replay(model, call)
    return spy


def on_fake_cuda(model, call, answer=1.0):
    with FakeCuda(model, answer) as fake:
        fake.call(call)
        with MatmulSpy(model.model.diffusion_model) as spy:
            fake.call(call)
    return spy


def disagreements(comfy, model, spy):
    """What differs, and the layers that should multiply and did not; but for the layer that has its own test."""
    layers = [layer for layer in families.report(comfy, model)["layers"] if layer["name"] != CALLED_IN_FP32]
    silent = {layer["name"] for layer in layers if layer["class"] == "Linear"} - set(spy.by_layer())
    assert len(spy.by_layer()) > 10
    return [*differences(layers, spy), *sorted(silent)]


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_auto_on_every_profile(comfy, wan, call, profile, name):
    profile(name)
    for storage in ("as_file", "fp8_e4m3fn", "int8"):
        model = load(comfy, wan, storage, "auto")
        assert disagreements(comfy, model, on_a_cpu(model, call)) == [], storage


@pytest.fixture(scope="module")
def stored(comfy, wan):
    """(storage, compute) -> the model in it; each test puts its own settings on a clone."""
    return functools.cache(lambda storage, compute: load(comfy, wan, storage, compute))


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize(("storage", "run"), rotated(STORAGES, [on_fake_cuda, on_a_cpu], whole=["as_file", "int8"]))
def test_every_compute_option_on_every_storage(comfy, stored, call, profile, storage, run, compute):
    profile("sm_89")
    model = with_compute(comfy, stored(storage, "bf16"), compute)
    assert disagreements(comfy, model, run(model, call)) == []


@pytest.mark.parametrize("answer", [1e6, 1e-6])
def test_scaled_operands_on_fake_cuda(comfy, wan, call, answer):
    """Every read answered with a number that fp16 cannot hold, or only roughly."""
    model = load(comfy, wan, "as_file", "fp16_safe")
    assert disagreements(comfy, model, on_fake_cuda(model, call, answer)) == []


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("base", ["fp16", "fp16_safe"])
def test_rules(comfy, stored, call, profile, base, rule):
    profile("sm_89")
    model = with_compute(comfy, stored("fp8_e4m3fn", "fp16"), base, rules_from(RULES[rule], "none"))
    assert disagreements(comfy, model, on_fake_cuda(model, call)) == []


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("compute", "run"), [("fp16", on_a_cpu), ("fp16", on_fake_cuda), ("fp16_safe", on_fake_cuda), ("fp8", on_fake_cuda)]
)
def test_settings_of_the_accumulation_node(comfy, stored, call, profile, compute, run, setting):
    profile("sm_89")
    model = accumulation(comfy, stored("fp8_e4m3fn", compute), **SETTINGS[setting])
    assert disagreements(comfy, model, run(model, call)) == []


def test_a_layer_that_model_code_calls_in_fp32_is_reported_so(comfy, wan, call):
    model = load(comfy, wan, "as_file", "fp16")
    spy, layers = on_a_cpu(model, call), families.report(comfy, model)["layers"]
    assert differences([layer for layer in layers if layer["name"] == CALLED_IN_FP32], spy) == []


def test_a_report_that_lies_is_found(comfy, wan, call):
    model = load(comfy, wan, "as_file", "fp16")
    spy = on_a_cpu(model, call)
    layers = [layer for layer in families.report(comfy, model)["layers"] if layer["name"] != CALLED_IN_FP32]
    assert differences(layers, spy) == []
    for key, lie in (("mode", "bf16"), ("accumulation", "fp16")):
        (line,) = differences([{**layer, key: lie} for layer in layers if layer["name"] == "head.head"], spy)
        assert line.startswith(f"head.head: the report says {lie}")


@pytest.mark.parametrize("rows", [1, 16, 17])
def test_comfy_kitchens_general_int8_product_is_padded_to_sizes_that_cuda_takes(comfy, rows):
    from comfy_kitchen.backends.eager.quantization import mm_int8

    with fake_cuda_tensors(), CudaRules():
        a, b = (torch.empty(*size, dtype=torch.int8, device="cuda") for size in ((rows, 12), (12, 20)))
        assert mm_int8(a, b).shape == (rows, 20)
        with pytest.raises(RuntimeError, match="self.size"):
            torch._int_mm(a, b)
