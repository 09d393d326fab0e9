"""Rules per layer: what the report says is what reaches the matrix product."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.nodes.host.compute.planned_model import PlannedModel
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from halfsafe.precision.base import flags
from halfsafe.precision.plan.rules import rules_from
from support import families, tiny_models
from support.compiling import compiled
from support.families import load, with_compute
from support.measures import relative_error
from support.summing import accumulation, states
from torch.overrides import TorchFunctionMode

LAYER = "blocks.0.ffn.0"
SHAPE = (768, 256)


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "rules.safetensors", ffn=SHAPE[0])


@pytest.fixture(scope="module")
def call(comfy, wan):
    return families.capture(load(comfy, wan, "fp32"), "wan")


class Products(TorchFunctionMode):
    """Records the operand dtype and the result of each linear product with a weight of one shape, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is F.linear and tuple(args[1].shape) == SHAPE:
            self.seen.append((args[0].dtype, args[1].dtype, args[0], args[1]))
        return result


def first_product(model, call):
    """The operands of the first block's product (the model has two such layers)."""
    with Products() as products:
        families.replay(model, call)
    assert len(products.seen) in (2, 4)
    return products.seen[-2]


DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
MODES = {"fp16": "fp16", "bf16": "bf16", "fp32": "fp32", "fp16_safe": "fp16_wide"}


def layer(comfy, model, name=LAYER):
    return next(entry for entry in families.report(comfy, model)["layers"] if entry["name"] == name)


@pytest.mark.parametrize("rule", ["fp16", "bf16", "fp32", "fp16_safe"])
@pytest.mark.parametrize("base", ["bf16", "fp16", "fp32", "fp16_safe"])
def test_the_mode_in_the_report_is_the_one_that_ran(comfy, wan, call, base, rule):
    model = load(comfy, wan, "as_file", base, rules_from(f"{LAYER} compute={rule}"))
    families.replay(model, call)
    x_dtype, weight_dtype, x, weight = first_product(model, call)
    assert layer(comfy, model)["mode"] == MODES[rule]
    if rule == "fp16_safe":
        assert torch.equal(x, x.half().float()) and torch.equal(weight, weight.half().float()), "not fp16 operands"
    else:
        assert x_dtype == weight_dtype == DTYPES[rule]
    other = layer(comfy, model, "blocks.1.ffn.0")
    assert other["mode"] == MODES[base]


@pytest.mark.parametrize("base", ["bf16", "fp16"])
def test_stream_fp32_makes_the_layers_result_fp32(comfy, wan, call, base):
    seen = {}
    for stream in ("fp32", "same"):
        model = load(comfy, wan, "as_file", base, rules_from(f"{LAYER} compute=fp32 stream={stream}"))
        hook = (
            model.model.diffusion_model.blocks[0]
            .ffn[0]
            .register_forward_hook(lambda module, inputs, output, stream=stream: seen.update({stream: output.dtype}))
        )
        families.replay(model, call)
        hook.remove()
        assert layer(comfy, model)["stream"] == ("fp32" if stream == "fp32" else base)
    assert seen == {"fp32": torch.float32, "same": DTYPES[base]}


def test_one_wide_layer_cures_an_fp16_model_that_overflows_there(comfy, models_dir, wan, call):
    factors = {r"blocks\.0\.ffn\.0\.weight": 128, r"blocks\.0\.ffn\.2\.weight": 512}
    path = families.write_scaled(wan, models_dir / "diffusion_models" / "one.safetensors", factors)
    reference = families.replay(load(comfy, path, "fp32"), call)
    assert not torch.isfinite(families.replay(load(comfy, path, "as_file", "fp16"), call)).all()
    rules = rules_from("*.ffn.* compute=fp16_safe stream=fp32\nhead.head stream=fp32")
    model = load(comfy, path, "as_file", "fp16", rules)
    assert relative_error(reference, families.replay(model, call)) < 0.01


@pytest.mark.parametrize("node", ["loader", "compute"])
def test_rules_that_cannot_act_are_named(comfy, wan, node):
    text = "class:LayerNorm compute=fp32\nblocks.0.norm3 stream=fp32\nnowhere.* compute=fp32\nblocks.0.* compute=fp32"
    if node == "loader":
        model = load(comfy, wan, "as_file", "bf16", rules_from(text))
    else:
        model = with_compute(comfy, load(comfy, wan, "as_file", "bf16"), "bf16", rules_from(text))
    reasons = {entry["setting"]: entry["reason"] for entry in families.report(comfy, model)["without_effect"]}
    assert "LayerNorm has no matrix product" in reasons["class:LayerNorm compute=fp32"]
    assert "follows the stream" in reasons["blocks.0.norm3 stream=fp32"]
    assert "matches no layer" in reasons["nowhere.* compute=fp32"]
    assert "blocks.0.* compute=fp32" not in reasons, "it does act on the Linear layers"


class Sums(TorchFunctionMode):
    """Whether fp16 sums were on in each linear product with a weight of one shape, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is F.linear and tuple(args[1].shape) == SHAPE:
            self.seen.append(flags.is_on(FP16_ACCUMULATION))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("asked", "node"), [("fp16", "unchanged"), ("fp32", "on"), ("fp16", "off")])
def test_a_rule_on_sums_holds_for_its_layer_alone(comfy, wan, call, monkeypatch, asked, node):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    model = with_compute(
        comfy, load(comfy, wan, "fp16", "fp16"), "fp16", rules_from(f"{LAYER} accumulation={asked}", "none")
    )
    model = accumulation(comfy, model, fp16_accumulation=node)
    before = states()
    with Sums() as sums:
        families.replay(model, call)
    assert sums.seen[-2:] == [asked == "fp16", node == "on"]
    assert states() == before
    layers = {layer["name"]: layer for layer in families.report(comfy, model)["layers"]}
    assert layers[LAYER]["accumulation"] == asked
    assert layers[LAYER]["mode"] == ("fp16_acc16" if asked == "fp16" else "fp16")


def test_a_plan_with_a_rule_on_sums_is_freed_without_a_garbage_collection(comfy, wan):
    """It holds weights, which would stay in the device's memory."""
    model = with_compute(
        comfy, load(comfy, wan, "fp16", "fp16"), "fp16", rules_from(f"{LAYER} accumulation=fp16", "none")
    )
    layers = PlannedModel(compute_of(model).plan, model.model)
    dropped = weakref.ref(layers)
    gc.disable()
    try:
        del layers
        assert dropped() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("several", ["devices", "graphs"])
def test_a_rule_on_sums_that_cannot_act_is_reported_so(comfy, wan, call, monkeypatch, several):
    """torch's flag is the whole process's: another device's thread would sum in fp16 too, and no graph can switch it."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    model = with_compute(
        comfy, load(comfy, wan, "fp16", "fp16"), "fp16", rules_from(f"{LAYER} accumulation=fp16", "none")
    )
    if several == "devices":
        model.is_multigpu_base_clone = True
    else:
        model = compiled(model)
    with Sums() as sums, torch.compiler.set_stance("force_eager"):
        families.replay(model, call)
    assert len(sums.seen) >= 2 and not any(sums.seen)
    found = families.report(comfy, model)
    assert {layer["name"]: layer["accumulation"] for layer in found["layers"]}[LAYER] == "fp32"
    (entry,) = (entry for entry in found["without_effect"] if entry["setting"] == "accumulation=fp16")
    assert "per layer" in entry["reason"] and LAYER in entry["reason"]
