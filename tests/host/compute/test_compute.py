"""Compute plans in a real ComfyUI: fp16 that cannot overflow, per-layer dtypes, and models that stay as they were."""

import gc
import math
import tracemalloc

import pytest
import torch
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.nodes.host.replay.interceptor import COMPUTE, Interceptor
from support import families
from support.families import denoise, load
from support.leaf_operations import LeafOperations
from support.measures import relative_error


@pytest.fixture(scope="module")
def reference(fp32):
    return denoise(fp32)


def test_plain_fp16_overflows(comfy, overflowing):
    assert not torch.isfinite(denoise(load(comfy, overflowing, "fp16", "fp16"))).all()


@pytest.mark.parametrize("storage", ["as_file", "fp16", "fp32", "fp8_e4m3fn", "auto"])
def test_fp16_safe_is_finite_and_closer_than_bf16(comfy, overflowing, reference, storage):
    model = load(comfy, overflowing, storage, "fp16_safe")
    fp32 = reference if storage != "fp8_e4m3fn" else denoise(load(comfy, overflowing, storage, "fp32"))
    bf16 = relative_error(fp32, denoise(load(comfy, overflowing, storage, "bf16")))
    for _ in range(3):
        assert relative_error(fp32, denoise(model)) < 0.6 * bf16


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp16_safe_computes_in_its_own_dtypes_under_a_callers_autocast(comfy, overflowing, dtype):
    """As a node does that samples inside of ``torch.autocast``; no guard is on the model."""
    expected = denoise(load(comfy, overflowing, "fp16", "fp16_safe"))
    with torch.autocast("cpu", dtype):
        result = denoise(load(comfy, overflowing, "fp16", "fp16_safe"))
    assert result.isfinite().all() and torch.equal(expected, result)


def repeats(model):
    return compute_of(model).runs.of(model.model).calibration.repeats


def test_an_overflow_of_a_later_call_in_one_row_repeats_that_call_once(comfy, wan, call_of_two):
    model, fp32 = load(comfy, wan, "as_file", "fp16_safe"), load(comfy, wan, "fp32")
    families.replay(model, call_of_two)
    text = families.louder(call_of_two, 1e7, slice(1, 2))
    reference = families.replay(fp32, call_of_two, c_crossattn=text)
    assert not torch.isfinite(
        families.replay(load(comfy, wan, "as_file", "fp16"), call_of_two, c_crossattn=text)[1]
    ).all()
    for _ in range(3):
        assert relative_error(reference, families.replay(model, call_of_two, c_crossattn=text)) < 2e-3
        assert repeats(model) == 1
    assert relative_error(families.replay(fp32, call_of_two), families.replay(model, call_of_two)) < 2e-3
    assert repeats(model) == 1, "what the large call taught was forgotten"
    assert "; 1 calls were repeated" in families.report(comfy, model)["decisions"]["work"]


class Full(LeafOperations):
    """A device that runs out of memory in an operation, so many times."""

    def __init__(self, times, is_meant):
        super().__init__()
        self.left, self.is_meant = times, is_meant

    def leaf(self, func, args, kwargs):
        if self.left and self.is_meant(func.overloadpacket.__name__, *args):
            self.left -= 1
            raise torch.OutOfMemoryError("on purpose")
        return func(*args, **kwargs)


def test_measuring_that_runs_out_of_memory_takes_less_of_it(comfy, overflowing, fp32, call_of_two):
    model, reference = load(comfy, overflowing, "as_file", "fp16_safe"), families.replay(fp32, call_of_two)
    with Full(
        1,
        lambda name, x=None, ord=None, *_: (
            name == "linalg_vector_norm" and ord == math.inf and x.dtype == torch.float16 and x.dim() == 2
        ),
    ) as full:  # of a weight
        results = [families.replay(model, call_of_two)]
    results += [families.replay(model, call_of_two) for _ in range(2)]
    assert (
        full.left == 0 and repeats(model) == 0 and max(relative_error(reference, result) for result in results) < 2e-3
    )
    assert compute_of(model).runs.of(model.model).calibration.spares_memory


def test_a_product_that_runs_out_of_memory_is_comfyuis_to_handle(comfy, overflowing, fp32, call_of_two):
    model = load(comfy, overflowing, "as_file", "fp16_safe")
    with (
        pytest.raises(torch.OutOfMemoryError, match="on purpose"),
        Full(9, lambda name, *args: name in ("mm", "addmm")) as full,
    ):
        families.replay(model, call_of_two)
    assert full.left == 7, "once, and once with less"
    assert relative_error(families.replay(fp32, call_of_two), families.replay(model, call_of_two)) < 2e-3
    assert not compute_of(model).runs.of(model.model).calibration.spares_memory


def test_through_the_sampler_twice_in_one_prompt(comfy, overflowing):
    reference = families.sample(load(comfy, overflowing, "fp32"), "wan")
    model = load(comfy, overflowing, "as_file", "fp16_safe")
    assert families.sample(load(comfy, overflowing, "as_file", "fp16"), "wan").isnan().all()
    for sampler in ("euler", "euler"):
        latent = families.sample(model, "wan", sampler=sampler)
        assert relative_error(reference, latent) < 0.02
    heun = families.sample(load(comfy, overflowing, "fp32"), "wan", sampler="heun")
    assert relative_error(heun, families.sample(model, "wan", sampler="heun")) < 0.02


def test_a_plan_that_changes_nothing_adds_nothing(comfy, wan):
    for model in (load(comfy, wan, "as_file", "bf16"), load(comfy, wan, "as_file", "fp16")):
        assert COMPUTE not in Interceptor.on(model).stages
        assert compute_of(model).runs.of(model.model).patches == []


def held_by_the_pack():
    """Bytes allocated by the pack's own lines that are still held; pytest, for one, keeps every log record."""
    own = [tracemalloc.Filter(True, f"*/{folder}/*") for folder in ("precision", "nodes/host")]
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(own).traces)


def test_calls_leave_no_memory_behind(comfy, wan, call_of_two):
    model = load(comfy, wan, "as_file", "fp16_safe")
    tracemalloc.start()
    try:
        taken = []
        for _ in range(8):  # a module's attributes move once, after as many settings as its dict had room for
            for _ in range(5):
                families.replay(model, call_of_two)
            gc.collect()
            taken.append(held_by_the_pack())
        assert taken[7] - taken[6] < 2_000
    finally:
        tracemalloc.stop()
