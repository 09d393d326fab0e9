"""fp16 sums layer by layer in a real ComfyUI: on where they do not overflow, off for the rest, and the report says which."""

import comfy.sd
import pytest
import torch
from comfy import model_management
from comfy.ldm.modules import attention as attentions
from comfy.ldm.wan import model as wan_code
from comfy_kitchen.backends.eager import quantization
from halfsafe.nodes.host.accumulation.executor import Accumulation
from halfsafe.nodes.host.comfyui.layers import modules_of
from halfsafe.precision.base import flags
from halfsafe.precision.plan.rules import rules_from
from support import dialects, families, model_files
from support.broken_arithmetic import SumsInFp16
from support.families import Call, load, report, with_compute
from support.int8_models import int8
from support.summing import FP16_ACCUMULATION, accumulation, products, spied
from torch.overrides import TorchFunctionMode

pytestmark = pytest.mark.usefixtures("flags_as_before")
CANCELLING = "text_embedding.0"
HALF = 2048
QUIET = 1e-3
BEFORE, BEHIND = "blocks.0.ffn.0", "blocks.0.ffn.2"
SCALES = {"fp8": None, "fp8_with_input_scale": 0.5}
BLOCKS = ("mxfp8", "nvfp4")


@pytest.fixture(scope="module")
def mixed(comfy, wan, call):
    """A model with a layer in whose sums one half of the terms cancels the other half; and its text."""

    def change(weights):
        weight = weights[f"{CANCELLING}.weight"]
        weight[:, HALF:] = -weight[:, :HALF]
        weight *= 3e4

    path = model_files.changed(wan, wan.with_name("mixed.safetensors"), change)
    text = call.args[3].clone()
    text[..., HALF:] = text[..., :HALF]
    return load(comfy, path, "fp16", "fp16"), Call((*call.args[:3], text, *call.args[4:]), call.kwargs)


def layers_of(comfy, model):
    return {layer["name"]: layer for layer in report(comfy, model)["layers"]}


def test_layers_sum_in_fp16_but_those_that_overflow(comfy, mixed, ampere):
    model, call = mixed
    plain, ours = families.replay(model, call), accumulation(comfy, model, fp16_accumulation="auto")
    with SumsInFp16():
        for _ in range(2):
            assert torch.equal(families.replay(ours, call), plain)
    later, _ = products(ours, call)
    layers = layers_of(comfy, ours)
    assert layers[CANCELLING]["accumulation"] == "fp32" and layers[CANCELLING]["mode"] == "fp16"
    assert "by fp16 sums the result was Inf or NaN" in layers[CANCELLING]["reason"]
    in_fp16 = [layer for layer in layers.values() if layer["accumulation"] == "fp16"]
    assert {layer["mode"] for layer in in_fp16} == {"fp16_acc16"}
    assert sum(on for _, on in later) == len(in_fp16) == len(later) - 1
    found = report(comfy, ours)["flags"][FP16_ACCUMULATION]
    assert (found["requested"], found["in_scope"], found["outside"]) == ("auto", True, False)
    assert f"{len(in_fp16)} of {len(later)} fp16 layers sum in fp16; 0 calls were repeated" in found["reason"]


def test_the_result_is_that_of_the_plain_model(comfy, wan, call, ampere):
    model = load(comfy, wan, "fp16", "fp16")
    plain = families.replay(model, call)
    ours = accumulation(comfy, model, fp16_accumulation="auto", attention="auto", reduced_precision_reduction="off")
    for _ in range(2):
        assert torch.equal(families.replay(ours, call), plain)


def test_a_lora_is_part_of_the_weight_that_is_tried(comfy, wan, call, ampere):
    from comfy.sd import load_lora_for_models

    model = accumulation(comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto")
    tensors = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=30000.0)
    patched = load_lora_for_models(model, None, dict(tensors), 1.0, 0.0)[0]
    with SumsInFp16():
        for each, sums in ((model, "fp16"), (patched, "fp32"), (model, "fp16")):
            families.replay(each, call)
            layers = layers_of(comfy, each)
            assert (layers["blocks.0.ffn.0"]["accumulation"], layers["time_embedding.0"]["accumulation"]) == (
                sums,
                "fp16",
            )


@pytest.mark.parametrize("attention", ["auto", "unchanged"])
def test_a_louder_step_is_repeated_and_the_layer_that_overflowed_stays_in_fp32(comfy, mixed, ampere, attention):
    model, call = mixed
    ours = accumulation(comfy, model, fp16_accumulation="auto", attention=attention)
    plain, quiet = families.replay(model, call), call.args[3] * QUIET
    with SumsInFp16():
        for _ in range(2):
            families.replay(ours, call, c_crossattn=quiet)
        run = Accumulation.on(ours).runs.kept()[0]
        assert run.calibration.repeats == 0 and layers_of(comfy, ours)[CANCELLING]["accumulation"] == "fp16"
        for _ in range(2):
            assert torch.equal(families.replay(ours, call), plain)
            assert run.calibration.repeats == 1
    assert [name for name, operation in run.operations.items() if operation.overflowed] == [CANCELLING]
    assert "1 calls were repeated" in report(comfy, ours)["flags"][FP16_ACCUMULATION]["reason"]


class Rounds(TorchFunctionMode):
    """fp16 sums are rounded otherwise than fp32 sums."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * (1 + 2**-8) if func is torch.nn.functional.linear and flags.is_on(FP16_ACCUMULATION) else result


def test_the_first_call_gives_the_bits_of_later_ones(comfy, base, call, ampere):
    ours, plain = accumulation(comfy, base, fp16_accumulation="auto"), families.replay(base, call)
    with Rounds():
        first, second = (families.replay(ours, call) for _ in range(2))
    assert torch.equal(first, second) and not torch.equal(first, plain)


class Overflows(TorchFunctionMode):
    """fp16 sums of products by a weight of this shape are Inf."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sums = func is torch.nn.functional.linear and args[1].shape == self.shape and flags.is_on(FP16_ACCUMULATION)
        return result + torch.inf if sums else result


@pytest.mark.parametrize("layer", ["head.head", "time_projection.1", "blocks.1.ffn.2", "blocks.0.self_attn.k"])
def test_an_overflow_of_any_layer_is_seen_and_no_clean_call_is_repeated(comfy, base, call, ampere, layer):
    ours = accumulation(comfy, base, fp16_accumulation="auto")
    plain, shape = families.replay(base, call), modules_of(base.model)[layer].weight.shape
    for _ in range(2):
        families.replay(ours, call)
    run = Accumulation.on(ours).runs.kept()[0]
    with Overflows(shape):
        for _ in range(2):
            assert torch.equal(families.replay(ours, call), plain)
            assert run.calibration.repeats == 1
    in_fp32 = {name for name, operation in run.operations.items() if operation.overflowed}
    assert in_fp32 == {name for name in run.operations if run.modules[name].weight.shape == shape}


@pytest.mark.parametrize(("attention", "looked"), [("auto", False), ("unchanged", True), ("fp32", True)])
def test_queries_are_looked_at_where_no_bound_of_the_attention_does(
    comfy, base, call, ampere, monkeypatch, attention, looked
):
    """Inf in a query may leave zeros, which no look at the result of the call sees."""
    monkeypatch.setattr(wan_code, "optimized_attention", attentions.attention_pytorch)
    ours = accumulation(comfy, base, fp16_accumulation="auto", attention=attention)
    for _ in range(2):
        families.replay(ours, call)
    operations = Accumulation.on(ours).runs.kept()[0].operations
    assert (operations["blocks.0.self_attn.q"].device is not None) is looked
    assert operations["head.head"].device is None, "no attention is behind it"


def test_on_is_obeyed_and_measures_nothing(comfy, mixed, ampere):
    model, call = mixed
    ours = accumulation(comfy, model, fp16_accumulation="on")
    for _ in range(2):
        seen, _ = products(ours, call)
        assert seen and all(on for _, on in seen)
    layer = layers_of(comfy, ours)[CANCELLING]
    assert layer["accumulation"] == "fp16" and "as requested, without a check of the result" in layer["reason"]
    assert not Accumulation.on(ours).runs.kept()[0].operations


@pytest.mark.parametrize("order", ["compute first", "compute last"])
def test_a_rule_that_makes_a_layer_fp16_has_fp16_sums(comfy, wan, call, ampere, order):
    rules, model = rules_from("blocks.0.ffn.* compute=fp16"), load(comfy, wan, "as_file", "bf16")
    if order == "compute first":
        ours = accumulation(comfy, with_compute(comfy, model, "bf16", rules), fp16_accumulation="auto")
    else:
        ours = with_compute(comfy, accumulation(comfy, model, fp16_accumulation="auto"), "bf16", rules)
    plain = families.replay(with_compute(comfy, model, "bf16", rules), call)
    for _ in range(3):
        seen, result = products(ours, call)
        assert [on for _, on in seen] == [True, True], "each call multiplies once, in fp16 sums"
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


def test_a_reason_says_how_a_layer_sums(comfy, base, call, ampere):
    ours = accumulation(comfy, base, fp16_accumulation="auto")
    name, layer = "blocks.0.ffn.0", modules_of(base.model)["blocks.0.ffn.2"]
    own = layer.forward
    layer.forward = lambda x: own(x)
    try:
        families.replay(ours, call)
        run = Accumulation.on(ours).runs.kept()[0]
        layers = layers_of(comfy, ours)
        run.operations[name].forget()
        untried = layers_of(comfy, ours)[name]
    finally:
        del layer.forward
    assert (layers[name]["accumulation"], layers["blocks.0.ffn.2"]["accumulation"]) == ("fp16", "fp32")
    assert "fp16 sums: the call is repeated if they overflow" in layers[name]["reason"]
    assert "fp32 sums: Linear has its own matmul" in layers["blocks.0.ffn.2"]["reason"]
    assert untried["accumulation"] == "fp32" and "fp32 sums until a call has tried" in untried["reason"]


def _written(kind: str) -> tuple:
    if kind == "int8":
        return int8, {"convrot": False}
    return (
        (dialects.in_format, {"name": kind}) if kind in BLOCKS else (dialects.scaled_fp8, {"input_scale": SCALES[kind]})
    )


@pytest.fixture
def quantized(wan, call, models_dir, monkeypatch):
    """Kind -> ComfyUI's own fp16 model with one layer that it multiplies as stored on the device."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(model_management, "SUPPORT_FP8_OPS", True)
    for name in BLOCKS:
        monkeypatch.setattr(model_management, f"supports_{name}_compute", lambda device: True)
    rounded = quantization.quantize_int8_rowwise
    # As comfy-kitchen's CUDA kernel (finite_absmax_for_int8_scale in ops/int8_linear.cu).
    saturating = lambda x, *args, **kwargs: rounded(x.nan_to_num(nan=-1.0), *args, **kwargs)  # noqa: E731
    monkeypatch.setattr(quantization, "quantize_int8_rowwise", saturating)

    def make(kind: str):
        write, options = _written(kind)
        path = models_dir / "diffusion_models" / f"sums_before_{kind}.safetensors"
        model = comfy.sd.load_diffusion_model(
            str(model_files.in_dialect(wan, path, write, layers=[BEHIND], **options)),
            model_options={"dtype": torch.float16},
        )
        model.model.manual_cast_dtype = torch.float16
        return model

    return make


@pytest.mark.parametrize("kind", [*SCALES, "int8", *BLOCKS])
def test_an_overflow_before_a_quantized_product_is_seen(comfy, quantized, call, kind):
    """A quantized product rounds an infinite input to a number, so the result of the call is finite and wrong."""
    model = quantized(kind)
    plain, ours = families.replay(model, call), accumulation(comfy, model, fp16_accumulation="auto")
    for _ in range(2):
        assert torch.equal(families.replay(ours, call), plain), "the product is not ComfyUI's own"
    inside, before = [], modules_of(model.model)[BEFORE]

    class Overflow(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            in_fp16 = inside and func is torch.nn.functional.linear and flags.is_on(FP16_ACCUMULATION)
            return result.index_fill(-1, torch.tensor([3]), torch.inf) if in_fp16 else result

    hooks = [before.register_forward_pre_hook(lambda *_: inside.append(1))]
    hooks.append(before.register_forward_hook(lambda *_: inside.clear()))
    try:
        with Overflow():
            assert torch.equal(families.replay(ours, call), plain)
    finally:
        for hook in hooks:
            hook.remove()
    assert Accumulation.on(ours).runs.kept()[0].calibration.repeats == 1
    layer = layers_of(comfy, ours)[BEHIND]
    assert layer["accumulation"] == "fp32" and layer["mode"] != "fp16_acc16"
