"""The guard with what keeps state of its own between calls: compiled graphs and step caches."""

import importlib

import pytest
import torch
import torch._dynamo
from halfsafe.precision.quantize import relative_error
from support import families, tiny_models
from support.families import load
from support.guarding import core, guarded, inside, plain_fp16, report_of, sample
from torch._dynamo.utils import counters


@pytest.fixture(scope="module")
def clean(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "state_clean.safetensors")


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "state_overflowing.safetensors")


@pytest.fixture(scope="module")
def fp32(comfy, overflowing):
    return load(comfy, overflowing, "fp32", "fp32")


@pytest.fixture
def one_graph(monkeypatch):
    """As on a GPU. The CPU's default asks the system for free memory, which breaks the graph without us too."""
    attention = core("comfy.ldm.modules.attention").attention_pytorch
    monkeypatch.setattr(core("comfy.ldm.wan.model"), "optimized_attention", attention)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model, keys=("diffusion_model",)):
    """What ComfyUI's TorchCompileModel does, with a backend that needs no compiler."""
    clone = model.clone(disable_dynamic=True)
    core("comfy_api.torch_helpers").set_torch_compile_wrapper(model=clone, backend="aot_eager", keys=list(keys))
    return clone


KEYS = {"whole": ["diffusion_model"], "blocks": ["diffusion_model.blocks.0", "diffusion_model.blocks.1"]}


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("order", ["guard first", "compile first"])
def test_a_compiled_clean_model_is_compiled_as_without_the_guard(comfy, clean, one_graph, order, keys):
    plain = plain_fp16(comfy, clean)
    unguarded = compiled(plain, KEYS[keys])
    expected = families.sample(unguarded, "wan")
    graphs = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    model = compiled(guarded(comfy, plain), KEYS[keys]) if order == "guard first" else guarded(comfy, compiled(plain, KEYS[keys]))
    for _ in range(2):
        assert torch.equal(families.sample(model, "wan"), expected)
        assert counters["stats"]["unique_graphs"] == graphs
        assert sum(counters["graph_break"].values()) == 0
    assert report_of(model).verdict == "clean"


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("order", ["guard first", "compile first"])
def test_a_compiled_model_that_overflows_is_cured(comfy, overflowing, fp32, one_graph, order, keys):
    reference = families.sample(fp32, "wan")
    plain = plain_fp16(comfy, overflowing)
    model = compiled(guarded(comfy, plain), KEYS[keys]) if order == "guard first" else guarded(comfy, compiled(plain, KEYS[keys]))
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
        options = args[5]
        sigmas = options["sample_sigmas"].tolist()
        step = min(range(len(sigmas)), key=lambda i: abs(sigmas[i] - float(options["sigmas"][0])))
        return executor(*(change(args) if step >= number else args), **kwargs)

    return run


def cached(model):
    easy = importlib.import_module("comfy_extras.nodes_easycache").EasyCacheNode
    return easy.execute(model, 0.2, 0.1, 0.95, False).args[0]


@pytest.mark.parametrize("order", ["cache first", "guard first"])
def test_a_step_cache_keeps_no_bad_result(comfy, clean, order):
    """EasyCache keeps the results of calls to use them again; after a change of dtype it would skip all later steps."""
    loud = from_step(3, lambda args: [*args[:3], args[3] * 3e4, *args[4:]])
    cond = families.conditioning("wan")
    expected = sample(cached(inside(load(comfy, clean, "fp32", "fp32"), loud)), cond, steps=8)
    plain = inside(plain_fp16(comfy, clean), loud)
    model = guarded(comfy, cached(plain)) if order == "cache first" else cached(guarded(comfy, plain))
    assert relative_error(expected, sample(model, cond, steps=8)) < 0.02
    assert report_of(model).verdict == "recovered" and report_of(model).extra_calls == 2


def test_a_step_cache_gives_no_clamped_result_for_a_repeat(comfy, models_dir):
    path = families.write("flux", models_dir / "diffusion_models")

    def run(model):
        """The text's feed-forward of the first block is loud from the fourth step on."""
        module, factor = model.model.diffusion_model.double_blocks[0].txt_mlp[2], [1.0]
        forward = type(module).forward
        module.forward = lambda x: forward(module, x) * factor[0]

        def louder(args):
            factor[0] = 3e5
            return args

        try:
            return families.sample(cached(inside(model, from_step(3, louder))), "flux", steps=8)
        finally:
            del module.forward

    reference = run(load(comfy, path, "fp32", "fp32"))
    plain = plain_fp16(comfy, path)
    assert relative_error(reference, run(plain)) > 0.01
    model = guarded(comfy, plain)
    assert relative_error(reference, run(model)) < 2e-3
    assert report_of(model).verdict == "recovered" and report_of(model).events[0].kind == "saturation"
