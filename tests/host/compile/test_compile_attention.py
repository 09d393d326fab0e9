"""Attention in a model that ComfyUI's own TorchCompileModel has compiled, which guards nothing in ``transformer_options``."""

import pytest
import torch
from halfsafe.nodes.host.accumulation.executor import Accumulation
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.precision.arithmetic.attention_bounds import AttentionRange
from halfsafe.precision.plan.rules import rules_from
from support import families, tiny_models
from support.compiling import compiled
from support.families import load, with_compute
from support.measures import relative_error
from support.rows import all_of, the_rest_before_a_release
from support.summing import accumulation
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("one_graph", "ampere")
KEYS = {"whole": ["diffusion_model"], "block": ["diffusion_model.blocks.0"]}
OVERRIDE = "optimized_attention_override"


@pytest.fixture
def plain(comfy, base, keys):
    """The plain fp16 model, compiled."""
    return compiled(base, KEYS[keys], backend="eager")


def each_time(keys):
    """The model compiled in one of the two ways each time, in the other before a release."""
    return pytest.mark.parametrize(("keys",), the_rest_before_a_release([(keys,)], all_of(KEYS)))


@pytest.fixture
def operands(monkeypatch):
    """The dtypes of the operands of every attention that runs, compiled or not; traced into the graphs."""
    from comfy.ldm.modules import attention as core

    met, product = [], core.comfy.ops.scaled_dot_product_attention

    @torch.library.custom_op("halfsafe_test::met", mutates_args=())
    def note(q: torch.Tensor) -> torch.Tensor:
        met.append(q.dtype)
        return q.clone()

    note.register_fake(lambda q: torch.empty_like(q))
    monkeypatch.setattr(
        core.comfy.ops, "scaled_dot_product_attention", lambda q, *args, **kwargs: product(note(q), *args, **kwargs)
    )
    return met


def run_of(model):
    return Accumulation.on(model).runs.kept()[0]


@pytest.mark.parametrize("keys", KEYS)
def test_fp32_attention_after_a_plain_run(comfy, plain, call, operands):
    families.replay(plain, call)
    operands.clear()
    families.replay(plain, call)
    assert operands == [torch.float16] * 2
    wide = accumulation(comfy, plain, attention="fp32")
    for _ in range(2):
        operands.clear()
        families.replay(wide, call)
        assert operands == [torch.float32] * 2


@each_time("block")
def test_a_rule_on_one_attention_and_then_a_plain_run(comfy, plain, call, operands):
    families.replay(plain, call)
    ruled = with_compute(comfy, plain, "fp16", rules_from("blocks.0.self_attn attention=fp32"))
    for _ in range(3):
        operands.clear()
        families.replay(ruled, call)
        assert operands == [torch.float32, torch.float16]
    graphs = counters["stats"]["unique_graphs"]
    families.replay(ruled, call)
    assert counters["stats"]["unique_graphs"] == graphs <= 3
    operands.clear()
    families.replay(plain, call)
    assert operands == [torch.float16] * 2


@each_time("whole")
def test_a_plain_run_after_bounded_attention(comfy, plain, call):
    expected = families.replay(plain, call)
    torch._dynamo.reset()
    bounded = accumulation(comfy, plain, attention="auto")
    for _ in range(2):
        families.replay(bounded, call)
    assert torch.equal(families.replay(plain, call), expected)
    assert torch.equal(families.replay(bounded, call), expected)


@each_time("block")
def test_every_compiled_attention_is_watched(comfy, plain, call):
    families.replay(plain, call)
    bounded = accumulation(comfy, plain, attention="auto")
    families.replay(bounded, call)
    run = run_of(bounded)
    run.attention.range.largest = 0.0
    families.replay(bounded, call)
    assert run.calibration.repeats == 0
    assert run.attention.range.largest > 1.0, "the largest norm or score of the call was recorded"


@each_time("whole")
def test_a_bound_that_is_passed_is_compiled_once_and_repeated_once(comfy, plain, call, operands, monkeypatch):
    bounded = accumulation(comfy, plain, attention="auto")
    for _ in range(2):
        families.replay(bounded, call)
    run, graphs = run_of(bounded), counters["stats"]["unique_graphs"]
    monkeypatch.setattr(AttentionRange, "holds", lambda self, magnitude: magnitude < 1e-6)
    for _ in range(4):
        operands.clear()
        families.replay(bounded, call)
    assert run.calibration.repeats == 1
    assert set(run.attention.calls_in_fp32) == {True} and set(operands) == {torch.float32}
    assert counters["stats"]["unique_graphs"] == graphs + 1


def test_another_override_is_followed_when_it_changes(comfy, base, call):
    """What runs in front of somebody's override is that override, not the one the graph was compiled with."""
    results = {}
    for factor in (2.0, 3.0):
        model = base.clone()
        model.model_options["transformer_options"][OVERRIDE] = lambda f, q, *args, factor=factor, **kwargs: f(
            q * factor, *args, **kwargs
        )
        results[factor] = families.replay(accumulation(comfy, model, attention="auto"), call)
        ours = accumulation(comfy, compiled(model, backend="eager"), attention="auto")
        for _ in range(2):
            assert relative_error(results[factor], families.replay(ours, call)) < 1e-3
    assert relative_error(results[2.0], results[3.0]) > 1e-3


@each_time("block")
def test_compute_and_accumulation_share_the_attention_of_a_compiled_model(comfy, overflowing, call, fp32, keys):
    """Both put their attention in front of the other's; neither is lost where a graph is entered."""
    reference = families.replay(fp32, call)
    model = accumulation(
        comfy, compiled(load(comfy, overflowing, "as_file", "fp16_safe"), KEYS[keys]), attention="auto"
    )
    for _ in range(3):
        assert relative_error(reference, families.replay(model, call)) < 2e-3
    assert run_of(model).attention.calls_in_fp32 and compute_of(model).runs.kept()[0].attention.range.largest > 0
    assert not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules())


@pytest.mark.parametrize("setting", ["fp16_safe", "attention"])
def test_nine_blocks_compiled_one_by_one_share_their_graphs(comfy, models_dir, setting):
    """torch compiles a function eight times and then no longer runs it compiled, without a word to the user."""
    path = tiny_models.wan(models_dir / "diffusion_models" / "nine_blocks.safetensors", blocks=9, ffn=256)
    start = load(comfy, path, "as_file", "fp16_safe") if setting == "fp16_safe" else load(comfy, path, "fp16", "fp16")
    model = compiled(start, [f"diffusion_model.blocks.{index}" for index in range(9)], backend="eager")
    model = model if setting == "fp16_safe" else accumulation(comfy, model, attention="auto")
    expected = families.sample(
        start if setting == "fp16_safe" else accumulation(comfy, start, attention="auto"), "wan", steps=2
    )
    for _ in range(2):
        assert torch.equal(families.sample(model, "wan", steps=2), expected)
    assert counters["stats"]["unique_graphs"] <= 3 and not counters["recompile_limit"]
