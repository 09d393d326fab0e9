"""The guard with what keeps state of its own between calls: compiled graphs and step caches."""

import contextlib

import pytest
import torch
import torch._dynamo
from halfsafe.nodes.host.accumulation.executor import Accumulation
from halfsafe.nodes.host.guard.model import Guard
from support import families, tiny_models
from support.compiling import COMPILER, compiled
from support.families import load
from support.guarding import core, guarded, inside, plain_fp16, report_of, sample, step_of
from support.measures import relative_error
from support.rows import the_rest_before_a_release
from support.summing import accumulation
from torch._dynamo.utils import counters

KEYS = {"whole": ["diffusion_model"], "blocks": ["diffusion_model.blocks.0", "diffusion_model.blocks.1"]}
BACKENDS = {"whole": "eager", "blocks": COMPILER}
COMPILED = the_rest_before_a_release(
    [("guard first", "whole"), ("compile first", "blocks")], [("compile first", "whole")]
)


def written(models_dir, keys, write):
    """A model of as many blocks as are compiled one by one, or of one."""
    return write(models_dir / "diffusion_models" / f"{write.__name__}_{keys}.safetensors", blocks=len(KEYS[keys]))


@pytest.mark.parametrize(("order", "keys"), COMPILED)
def test_a_compiled_clean_model_is_compiled_as_without_the_guard(comfy, models_dir, one_graph, order, keys):
    plain = plain_fp16(comfy, written(models_dir, keys, tiny_models.wan))
    how = {"keys": KEYS[keys], "backend": BACKENDS[keys]}
    unguarded = compiled(plain, **how)
    expected = families.sample(unguarded, "wan")
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    model = compiled(guarded(comfy, plain), **how) if order == "guard first" else guarded(comfy, compiled(plain, **how))
    for _ in range(2):
        assert torch.equal(families.sample(model, "wan"), expected)
        assert counters["stats"]["unique_graphs"] == graphs
        assert sum(counters["graph_break"].values()) == 0
    assert report_of(model).verdict == "clean"


@pytest.mark.parametrize(("order", "keys"), COMPILED)
def test_a_compiled_model_that_overflows_is_cured(comfy, models_dir, one_graph, order, keys):
    path = written(models_dir, keys, tiny_models.wan_overflowing)
    reference = families.sample(load(comfy, path, "fp32", "fp32"), "wan")
    plain = plain_fp16(comfy, path)
    how = {"keys": KEYS[keys], "backend": BACKENDS[keys]}
    model = compiled(guarded(comfy, plain), **how) if order == "guard first" else guarded(comfy, compiled(plain, **how))
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    report = report_of(model)
    assert report.verdict == "recovered" and report.extra_calls == 2
    assert report.events[0].layer == "blocks.0.ffn.2"
    graphs = counters["stats"]["unique_graphs"]
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    assert report_of(model).verdict == "clean"
    assert counters["stats"]["unique_graphs"] == graphs, "the second run compiles nothing"


def from_step(number, change):
    """Inside of a model: ``change(args)`` before its calls from the given step on."""

    def run(executor, args, kwargs):
        return executor(*(change(args) if step_of(args) >= number else args), **kwargs)

    return run


@contextlib.contextmanager
def scaled_from(number, model, module, factor):
    """A clone in which the results of one module are multiplied from the given step on."""
    forward, now = type(module).forward, [1.0]
    module.forward = lambda x: forward(module, x) * now[0]

    def change(args):
        now[0] = factor
        return args

    try:
        yield inside(model, from_step(number, change))
    finally:
        del module.forward


def cached(model):
    easy = core("comfy_extras.nodes_easycache").EasyCacheNode
    return easy.execute(model, 0.2, 0.1, 0.95, False).args[0]


@pytest.mark.parametrize("order", ["cache first", "guard first"])
def test_a_step_cache_keeps_no_bad_result(comfy, wan, order):
    """EasyCache keeps the results of calls to use them again; after a change of dtype it would skip all later steps."""
    loud = from_step(3, lambda args: [*args[:3], args[3] * 3e4, *args[4:]])
    cond = families.conditioning("wan")
    expected = sample(cached(inside(load(comfy, wan, "fp32", "fp32"), loud)), cond, steps=8)
    plain = inside(plain_fp16(comfy, wan), loud)
    model = guarded(comfy, cached(plain)) if order == "cache first" else cached(guarded(comfy, plain))
    assert relative_error(expected, sample(model, cond, steps=8)) < 0.02
    assert report_of(model).verdict == "recovered" and report_of(model).extra_calls == 2


def test_a_step_cache_gives_no_clamped_result_for_a_repeat(comfy, models_dir):
    path = families.write("flux", models_dir / "diffusion_models")

    def run(model):
        """The text's feed-forward of the first block is loud from the fourth step on."""
        with scaled_from(3, model, model.model.diffusion_model.double_blocks[0].txt_mlp[2], 3e5) as loud:
            return families.sample(cached(loud), "flux", steps=8)

    reference = run(load(comfy, path, "fp32", "fp32"))
    plain = plain_fp16(comfy, path)
    assert relative_error(reference, run(plain)) > 0.01
    model = guarded(comfy, plain)
    assert relative_error(reference, run(model)) < 2e-3
    assert report_of(model).verdict == "recovered" and report_of(model).events[0].kind == "saturation"


def test_a_step_cache_does_not_stand_in_for_a_repeat_that_measures_attention(comfy, base, ampere):
    model = accumulation(comfy, base, attention="auto")
    with scaled_from(3, model, model.model.diffusion_model.blocks[0].self_attn.norm_q, 1000.0) as loud:
        families.sample(cached(loud), "wan", steps=8)
    run = Accumulation.on(model).runs.kept()[0]
    assert run.attention.calls_in_fp32[0] and run.calibration.repeats == 1


def test_a_step_cache_does_not_stand_in_for_a_repeat_that_measures_escalated_layers(comfy, overflowing):
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    families.sample(model, "wan")
    with scaled_from(3, model, model.model.diffusion_model.blocks[0].ffn[1], 1e6) as loud:
        families.sample(cached(loud), "wan", steps=8)
    assert report_of(model).verdict == "clean"
    assert Guard.on(model).states.kept()[0].layers.calibration.repeats == 1
