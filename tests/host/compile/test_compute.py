"""torch.compile before and after a plan: the right result, one graph, and no new compilation at later steps."""

import pytest
import torch
from halfsafe.nodes.host.compute.executor import compute_of
from support import families, tiny_models
from support.compiling import COMPILER, compiled
from support.families import load, with_compute
from support.measures import relative_error
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("one_graph")


@pytest.fixture(scope="module")
def reference(fp32):
    return families.sample(fp32, "wan")


def planned_and_compiled(comfy, overflowing, order, **options):
    if order == "plan first":
        return compiled(load(comfy, overflowing, "as_file", "fp16_safe"), **options)
    return with_compute(comfy, compiled(load(comfy, overflowing, "as_file", "bf16"), **options), "fp16_safe")


@pytest.mark.parametrize(("order", "backend"), [("plan first", "eager"), ("compile first", COMPILER)])
def test_one_graph_no_break_and_no_recompilation(comfy, overflowing, reference, order, backend):
    model = planned_and_compiled(comfy, overflowing, order, backend=backend)
    for _ in range(2):
        assert relative_error(reference, families.sample(model, "wan", steps=4)) < 2e-3
        assert counters["stats"]["unique_graphs"] == 1
        assert sum(counters["graph_break"].values()) == 0
        assert not any("forward" in module.__dict__ for module in model.model.diffusion_model.modules()), (
            "no patch is left"
        )


def test_blocks_compiled_on_their_own(comfy, models_dir):
    path = tiny_models.wan_overflowing(models_dir / "diffusion_models" / "blocks_on_their_own.safetensors", blocks=2)
    reference = families.sample(load(comfy, path, "fp32", "fp32"), "wan", steps=4)
    keys = [f"diffusion_model.blocks.{index}" for index in range(2)]
    model = planned_and_compiled(comfy, path, "compile first", keys=keys, backend="eager")
    for _ in range(2):
        assert relative_error(reference, families.sample(model, "wan", steps=4)) < 2e-3
        assert counters["stats"]["unique_graphs"] <= len(keys)
        assert sum(counters["graph_break"].values()) == 0
    compute = compute_of(model)
    assert len(compute.runs.of(model.model).layers.operations) == len(compute.plan.decisions)


def test_a_later_overflow_is_right_and_compiles_once_more(comfy, overflowing, fp32, call):
    model = planned_and_compiled(comfy, overflowing, "plan first", backend="eager")
    families.replay(model, call)
    families.replay(model, call)
    with torch.inference_mode(False):  # as the captured text is: torch.compile tells the two apart
        text = families.louder(call, 1e7)
    reference = families.replay(fp32, call, c_crossattn=text)
    for _ in range(3):
        assert relative_error(reference, families.replay(model, call, c_crossattn=text)) < 2e-3
    assert compute_of(model).runs.of(model.model).calibration.repeats == 1
    assert counters["stats"]["unique_graphs"] == 2


def test_a_plan_for_a_model_in_which_a_block_is_compiled(comfy, overflowing, reference):
    """Other packs put the compiled block in the place of the block, where it stays while the model is loaded."""
    model = load(comfy, overflowing, "as_file", "bf16")
    other, block = model.clone(), model.model.diffusion_model.blocks[0]
    other.add_object_patch("diffusion_model.blocks.0", torch.compile(block, backend="eager"))
    families.sample(other, "wan", steps=1)
    assert model.model.diffusion_model.blocks[0] is not block
    for start in (other, model):
        planned = with_compute(comfy, start, "fp16_safe")
        assert relative_error(reference, families.sample(planned, "wan", steps=4)) < 2e-3
