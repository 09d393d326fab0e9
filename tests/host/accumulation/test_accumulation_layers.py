"""fp16 sums layer by layer in a real ComfyUI: on for what is proven, off for the rest, and the report says which."""


import pytest
import torch
from halfsafe.nodes.host.accumulation.accumulation_report import described
from halfsafe.nodes.host.accumulation.executor import accumulation_of
from halfsafe.precision.arithmetic import fp16_accumulation
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.fp16_accumulation import Fp16AccumulationLinear, SumBound
from halfsafe.precision.base import flags
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files
from support.families import Call, load, report, with_compute
from support.measures import relative_error
from support.summing import FP16_ACCUMULATION, accumulation, products, spied

pytestmark = pytest.mark.usefixtures("flags_as_before")
UNPROVEN, SCALED = "text_embedding.0", "blocks.1.self_attn.v"


@pytest.fixture(autouse=True)
def small_layers_are_worth_scaling(monkeypatch):
    """As large ones are: a layer this small gains less by fp16 sums than scaling costs."""
    monkeypatch.setattr(fp16_accumulation, "WORTH_SCALING", 1)


@pytest.fixture(scope="module")
def mixed(comfy, wan, call):
    """A model with a layer whose bound is hopeless though its sums are small, one that scaling proves; and its text.

    The first 256 channels of the text are zero, and huge in the weight they meet.
    """

    def change(weights):
        weights[f"{UNPROVEN}.weight"][:, :256] *= 1e5
        weights[f"{SCALED}.weight"] *= 4e3

    path = model_files.changed(wan, wan.with_name("mixed.safetensors"), change)
    text = call.args[3].clone()
    text[..., :256] = 0
    return load(comfy, path, "fp16", "fp16"), Call((*call.args[:3], text, *call.args[4:]), call.kwargs)


def layers_of(comfy, model):
    return {layer["name"]: layer for layer in report(comfy, model)["layers"]}


def test_proven_layers_sum_in_fp16_and_the_others_in_fp32(comfy, mixed, ampere):
    model, call = mixed
    ours = accumulation(comfy, model, fp16_accumulation="auto")
    first, _ = products(ours, call)
    later, _ = products(ours, call)
    assert first and not any(on for _, on in first), "the first call is the measurement"
    layers = layers_of(comfy, ours)
    assert layers[UNPROVEN]["accumulation"] == "fp32" and layers[UNPROVEN]["mode"] == "fp16"
    assert "fp32 sums: bound" in layers[UNPROVEN]["reason"]
    assert "scaled by 2^-" in layers[SCALED]["reason"]
    assert layers[SCALED]["accumulation"] == "fp16" and layers[SCALED]["mode"] == "fp16_acc16"
    proven = [layer for layer in layers.values() if layer["accumulation"] == "fp16"]
    assert sum(on for _, on in later) == len(proven) == len(later) - 1
    flag = report(comfy, ours)["flags"][FP16_ACCUMULATION]
    assert (flag["requested"], flag["in_scope"], flag["outside"]) == ("auto", True, False)
    assert f"{len(proven)} of {len(later)} fp16 layers are proven" in flag["reason"]


def test_the_result_is_that_of_the_plain_model(comfy, wan, call, mixed, ampere):
    model = load(comfy, wan, "fp16", "fp16")
    plain = families.replay(model, call)
    ours = accumulation(comfy, model, fp16_accumulation="auto", attention="auto", reduced_precision_reduction="off")
    for _ in range(2):
        assert torch.equal(families.replay(ours, call), plain)
    scaled, text = mixed
    plain, ours = families.replay(scaled, text), accumulation(comfy, scaled, fp16_accumulation="auto")
    for _ in range(2):
        assert relative_error(plain, families.replay(ours, text)) < 2e-3
    assert torch.equal(families.replay(scaled, text), plain), "the model that came in was changed"


def test_a_lora_is_part_of_the_weight_that_is_proven(comfy, wan, call, ampere):
    from comfy.sd import load_lora_for_models

    model = accumulation(comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto")
    families.replay(model, call)
    tensors = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=1000.0)
    patched = load_lora_for_models(model, None, dict(tensors), 1.0, 0.0)[0]
    for name, scaled in ((model, False), (patched, True), (model, False)):
        families.replay(name, call)
        layers = {layer["name"]: layer for layer in report(comfy, name)["layers"]}
        assert ("input scaled" in layers["blocks.0.ffn.0"]["reason"]) is scaled
        assert "input scaled" not in layers["blocks.1.ffn.0"]["reason"]


def test_a_louder_step_is_repeated_without_the_layers_it_disproves(comfy, base, call, ampere):
    ours = accumulation(comfy, base, fp16_accumulation="auto")
    for _ in range(2):
        seen, _ = products(ours, call)
    count, run = len(seen), accumulation_of(ours).runs.kept()[0]
    assert run.calibration.repeats == 0
    seen, _ = products(ours, call, c_crossattn=call.args[3] * 2000)
    assert run.calibration.repeats == 1 and len(seen) == 2 * count
    assert not any(on for _, on in seen[count:]), "the repeated call summed in fp16"
    assert "scaled by 2^-" in layers_of(comfy, ours)[UNPROVEN]["reason"]
    assert "1 calls were repeated" in report(comfy, ours)["flags"][FP16_ACCUMULATION]["reason"]


def test_on_is_obeyed_and_measures_nothing(comfy, mixed, ampere):
    model, call = mixed
    ours = accumulation(comfy, model, fp16_accumulation="on")
    for _ in range(2):
        seen, _ = products(ours, call)
        assert seen and all(on for _, on in seen)
    layer = layers_of(comfy, ours)[UNPROVEN]
    assert layer["accumulation"] == "fp16" and "fp16 sums as requested, not proven safe" in layer["reason"]
    assert not accumulation_of(ours).runs.kept()[0].operations


@pytest.mark.parametrize("order", ["compute first", "compute last"])
def test_a_rule_that_makes_a_layer_fp16_is_bounded_in_fp16(comfy, wan, call, ampere, order):
    rules, model = rules_from("blocks.0.ffn.* compute=fp16"), load(comfy, wan, "as_file", "bf16")
    if order == "compute first":
        ours = accumulation(comfy, with_compute(comfy, model, "bf16", rules), fp16_accumulation="auto")
    else:
        ours = with_compute(comfy, accumulation(comfy, model, fp16_accumulation="auto"), "bf16", rules)
    plain = families.replay(with_compute(comfy, model, "bf16", rules), call)
    for expected in (False, True, True):
        seen, result = products(ours, call)
        assert [on for _, on in seen] == [expected] * 2
        assert torch.equal(result, plain)


def test_fp16_safe_has_fp32_results_and_says_so(comfy, wan, call, ampere):
    model = load(comfy, wan, "as_file", "fp16_safe")
    ours = accumulation(comfy, model, fp16_accumulation="auto", attention="auto")
    assert torch.equal(families.replay(ours, call), families.replay(model, call))
    found = report(comfy, ours)
    assert any(e["setting"] == "fp16_accumulation=auto" and "return fp32" in e["reason"] for e in found["without_effect"])
    assert found["flags"][FP16_ACCUMULATION]["in_scope"] is False


@pytest.mark.parametrize("quiet", [True, False])
def test_under_torch_compile_all_or_none(comfy, base, mixed, call, ampere, monkeypatch, quiet):
    from comfy.ldm.modules import attention
    from comfy.ldm.wan import model as wan_model
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    monkeypatch.setattr(wan_model, "optimized_attention", attention.attention_pytorch)
    model, call = (base, call) if quiet else mixed
    model = accumulation(comfy, model, fp16_accumulation="auto", attention="auto")
    set_torch_compile_wrapper(model, backend="eager")
    inside = []
    model = spied(model, lambda: inside.append(flags.is_on(FP16_ACCUMULATION)))
    for _ in range(3):
        families.replay(model, call)
    assert inside == [False, quiet, quiet]
    reason = report(comfy, model)["flags"][FP16_ACCUMULATION]["reason"]
    assert "cannot be switched layer by layer" in reason and reason.endswith("on for all." if quiet else "off.")


def test_on_several_devices_all_or_none(comfy, base, call, ampere, monkeypatch):
    from comfy.ldm.modules import attention
    from comfy.ldm.wan import model as wan_model

    ours = accumulation(comfy, base, fp16_accumulation="auto", attention="auto")
    ours.is_multigpu_base_clone = True
    families.replay(ours, call)
    assert not any(on for _, on in products(ours, call)[0]), "attention that sums on its own was trusted"
    assert "the products inside attention have no overflow bound" in report(comfy, ours)["flags"][FP16_ACCUMULATION]["reason"]
    monkeypatch.setattr(wan_model, "optimized_attention", attention.attention_pytorch)
    ours = accumulation(comfy, base, fp16_accumulation="auto", attention="auto")
    ours.is_multigpu_base_clone = True
    families.replay(ours, call)
    seen, _ = products(ours, call)
    assert seen and all(on for _, on in seen)


@pytest.mark.parametrize(("norm", "in_fp16", "how"), [
    (1.0, True, "fp16 sums: bound 1 of"), (1.0, False, "fp32 sums, because not all layers are proven safe: bound 1 of"),
    (1e9, False, "fp32 sums: bound 1e+09 of"),
])  # fmt: skip
def test_a_reason_says_how_a_layer_sums_and_by_which_numbers(norm, in_fp16, how):
    module, sums = torch.nn.Linear(2, 2), SumBound("layer")
    operation = Fp16AccumulationLinear(module, module.forward, sums, Calibration(), weights=lambda *args: None)
    assert described(operation, False)[1] == "fp32 sums until a call proves fp16 sums safe"
    sums.prove(largest=norm, norm=1e12, row_sum=1.0, row_norm=1.0, terms=2, can_scale=True)
    accumulation, reason = described(operation, in_fp16)
    assert accumulation == ("fp16" if in_fp16 else "fp32") and reason.startswith(how)
    unknown = Fp16AccumulationLinear(module, module.forward, SumBound("own"), Calibration(), weights=None)
    assert described(unknown, False) == ("fp32", "fp32 sums: Linear has its own matmul")
