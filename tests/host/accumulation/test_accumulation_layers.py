"""fp16 sums layer by layer in a real ComfyUI: on for what is proven, off for the rest, and the report says which."""

import pytest
import torch
from halfsafe.nodes.host.accumulation.accumulation_report import described
from halfsafe.nodes.host.accumulation.executor import accumulation_of
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.fp16_accumulation import ProvenSums, SumBound
from halfsafe.precision.base import flags
from halfsafe.precision.plan.rules import rules_from
from support import families, model_files
from support.families import Call, load, report, with_compute
from support.summing import FP16_ACCUMULATION, accumulation, products, spied

pytestmark = pytest.mark.usefixtures("flags_as_before")
UNPROVEN = "text_embedding.0"


@pytest.fixture(scope="module")
def mixed(comfy, wan, call):
    """A model with a layer whose bound is hopeless though its sums are small; and its text.

    The first 256 channels of the text are zero, and huge in the weight they meet.
    """

    def change(weights):
        weights[f"{UNPROVEN}.weight"][:, :256] *= 1e5

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
    proven = [layer for layer in layers.values() if layer["accumulation"] == "fp16"]
    assert {layer["mode"] for layer in proven} == {"fp16_acc16"}
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
    partly, text = mixed
    plain, ours = families.replay(partly, text), accumulation(comfy, partly, fp16_accumulation="auto")
    for _ in range(2):
        assert torch.equal(families.replay(ours, text), plain)


def test_a_lora_is_part_of_the_weight_that_is_proven(comfy, wan, call, ampere):
    from comfy.sd import load_lora_for_models

    model = accumulation(comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto")
    families.replay(model, call)
    tensors = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=1000.0)
    patched = load_lora_for_models(model, None, dict(tensors), 1.0, 0.0)[0]
    for name, sums in ((model, "fp16"), (patched, "fp32"), (model, "fp16")):
        families.replay(name, call)
        layers = layers_of(comfy, name)
        assert (layers["blocks.0.ffn.0"]["accumulation"], layers["blocks.1.ffn.0"]["accumulation"]) == (sums, "fp16")


def test_a_louder_step_is_repeated_without_the_layers_it_disproves(comfy, base, call, ampere):
    ours = accumulation(comfy, base, fp16_accumulation="auto")
    for _ in range(2):
        seen, _ = products(ours, call)
    count, run = len(seen), accumulation_of(ours).runs.kept()[0]
    assert run.calibration.repeats == 0
    seen, _ = products(ours, call, c_crossattn=call.args[3] * 2000)
    assert run.calibration.repeats == 1 and len(seen) == 2 * count
    assert not any(on for _, on in seen[count:]), "the repeated call summed in fp16"
    assert layers_of(comfy, ours)[UNPROVEN]["accumulation"] == "fp32"
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
    assert any(
        e["setting"] == "fp16_accumulation=auto" and "return fp32" in e["reason"] for e in found["without_effect"]
    )
    assert found["flags"][FP16_ACCUMULATION]["in_scope"] is False


@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize("where", ["compiled", "several devices"])
def test_auto_says_where_fp16_sums_cannot_be_switched_by_layer(comfy, base, call, ampere, where):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    ours = accumulation(comfy, base, fp16_accumulation="auto", attention="auto")
    ours.is_multigpu_base_clone = where == "several devices"
    if where == "compiled":
        set_torch_compile_wrapper(ours, backend="eager")
    inside = []
    ours = spied(ours, lambda: inside.append(flags.is_on(FP16_ACCUMULATION)))
    for _ in range(2):
        families.replay(ours, call)
    assert inside == [False, False]
    found = report(comfy, ours)
    assert "cannot be switched per layer" in found["flags"][FP16_ACCUMULATION]["reason"]
    assert "fp16_accumulation=auto" in [entry["setting"] for entry in found["without_effect"]]


@pytest.mark.parametrize(("norm", "how"), [(1.0, "fp16 sums: bound 1 of"), (1e9, "fp32 sums: bound 1e+09 of")])
def test_a_reason_says_how_a_layer_sums_and_by_which_numbers(norm, how):
    module, sums = torch.nn.Linear(2, 2), SumBound("layer")
    operation = ProvenSums(module, sums, Calibration(), weights=lambda *args: None)
    assert described(operation)[1] == "fp32 sums until a call proves fp16 sums safe"
    sums.prove(norm, 1.0, 2)
    accumulation, reason = described(operation)
    assert accumulation == how[:4] and reason.startswith(how)
    unknown = ProvenSums(module, SumBound("own"), Calibration(), weights=None)
    assert described(unknown) == ("fp32", "fp32 sums: Linear has its own matmul")
