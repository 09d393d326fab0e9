"""torch.compile before and after a plan: the right result, one graph, and no new compilation at later steps."""

import importlib

import pytest
import torch
import torch._dynamo
from halfsafe.nodes.host.compute import compute_of
from halfsafe.precision.quantize import relative_error
from support import families, tiny_models
from support.families import load, with_compute
from torch._dynamo.utils import counters


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "compiled.safetensors")


@pytest.fixture(scope="module")
def reference(comfy, wan):
    return families.sample(load(comfy, wan, "fp32"), "wan")


@pytest.fixture(autouse=True)
def one_graph_attention(monkeypatch):
    """As on a GPU. The CPU's default asks the system for free memory, which breaks the graph without us too."""
    attention = importlib.import_module("comfy.ldm.modules.attention").attention_pytorch
    monkeypatch.setattr(importlib.import_module("comfy.ldm.wan.model"), "optimized_attention", attention)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiled(model, backend="aot_eager", keys=("diffusion_model",)):
    """What ComfyUI's TorchCompileModel does, with a backend that needs no compiler."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = model.clone(disable_dynamic=True)
    set_torch_compile_wrapper(model=clone, backend=backend, keys=list(keys))
    return clone


def planned_and_compiled(comfy, wan, order, **options):
    if order == "plan first":
        return compiled(load(comfy, wan, "as_file", "fp16_safe"), **options)
    return with_compute(comfy, compiled(load(comfy, wan, "as_file", "bf16"), **options), "fp16_safe")


@pytest.mark.parametrize("order", ["plan first", "compile first"])
def test_one_graph_no_break_and_no_recompilation(comfy, wan, reference, order):
    model = planned_and_compiled(comfy, wan, order)
    for _ in range(2):
        assert relative_error(reference, families.sample(model, "wan", steps=4)) < 2e-3
        assert counters["stats"]["unique_graphs"] == 1
        assert sum(counters["graph_break"].values()) == 0


def test_blocks_compiled_on_their_own(comfy, wan, reference):
    keys = [f"diffusion_model.blocks.{index}" for index in range(2)]
    model = planned_and_compiled(comfy, wan, "compile first", keys=keys)
    for _ in range(2):
        assert relative_error(reference, families.sample(model, "wan", steps=4)) < 2e-3
        assert counters["stats"]["unique_graphs"] <= len(keys)
        assert sum(counters["graph_break"].values()) == 0
    compute = compute_of(model)
    assert len(compute.runs.of(model.model).operations) == len(compute.plan.decisions)


def test_a_later_overflow_is_right_and_compiles_once_more(comfy, wan):
    fp32, model = load(comfy, wan, "fp32"), planned_and_compiled(comfy, wan, "plan first")
    call = families.capture(fp32, "wan")
    families.replay(model, call)
    families.replay(model, call)
    text = call.args[3] * 1e7
    reference = families.replay(fp32, call, c_crossattn=text)
    for _ in range(3):
        assert relative_error(reference, families.replay(model, call, c_crossattn=text)) < 2e-3
    assert compute_of(model).runs.of(model.model).ranges.repeats == 1
    assert counters["stats"]["unique_graphs"] == 2


def test_the_compiled_model_is_left_without_patches(comfy, wan):
    model = planned_and_compiled(comfy, wan, "plan first")
    families.sample(model, "wan", steps=2)
    assert not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules())
