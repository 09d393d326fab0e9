"""torch.compile on a real device: CUDA graphs of single blocks, and the whole model as ComfyUI's node compiles it."""

import os

import pytest
import torch
from halfsafe.nodes.host.run.accumulation import accumulation_of
from halfsafe.nodes.host.run.compute import compute_of
from support import families, tiny_models
from support.compiling import COMPILER, compiled
from support.families import load
from support.measures import relative_error
from support.summing import accumulation
from torch._dynamo.utils import counters

DRY = bool(os.environ.get("HALFSAFE_DRY_RUN"))
BACKEND = COMPILER if DRY else "inductor"


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "gpu_compiled_overflowing.safetensors")


@pytest.fixture(scope="module")
def reference(comfy, overflowing):
    return families.sample(load(comfy, overflowing, "fp32", "fp32"), "wan").cpu()


def blocks_with_cuda_graphs(model):
    """Each block compiled on its own with CUDA graphs, as other packs do."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    clone = model.clone(disable_dynamic=True)
    keys = [f"diffusion_model.blocks.{index}" for index in range(2)]
    set_torch_compile_wrapper(model=clone, backend=BACKEND, mode=None if DRY else "reduce-overhead", keys=keys)
    return clone


def test_fp16_safe_with_cuda_graphs_of_single_blocks(comfy, overflowing, reference):
    """What a graph records outlives its results, which the next replay overwrites."""
    model = blocks_with_cuda_graphs(load(comfy, overflowing, "as_file", "fp16_safe"))
    for _ in range(3):
        assert relative_error(reference, families.sample(model, "wan").cpu()) < 0.01
    calibration = compute_of(model).runs.last(model.model).calibration
    assert calibration.repeats == 0 and calibration.largest()
    assert DRY or counters["inductor"]["cudagraph_skips"] == 0


def test_bounded_attention_with_cuda_graphs_of_single_blocks(comfy, overflowing):
    clean = tiny_models.wan(overflowing.with_name("gpu_compiled_clean.safetensors"))
    expected = families.sample(load(comfy, clean, "fp32", "fp32"), "wan").cpu()
    model = accumulation(comfy, blocks_with_cuda_graphs(load(comfy, clean, "fp16", "fp16")), attention="auto")
    for _ in range(3):
        assert relative_error(expected, families.sample(model, "wan").cpu()) < 0.02
    run = accumulation_of(model).runs.last(model.model)
    assert run.calibration.repeats == 0 and run.attention.states


def test_the_whole_model_is_one_graph(comfy, overflowing, reference):
    model = compiled(load(comfy, overflowing, "as_file", "fp16_safe"), backend=BACKEND)
    for _ in range(2):
        assert relative_error(reference, families.sample(model, "wan").cpu()) < 0.01
    if not DRY:
        assert counters["stats"]["unique_graphs"] == 1 and sum(counters["graph_break"].values()) == 0
