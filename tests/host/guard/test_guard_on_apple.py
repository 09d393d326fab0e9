"""What Apple's devices do otherwise than others: norms that pass over NaN, a lack of memory that is a plain RuntimeError.

CPU tensors stand for those of a Mac here; see ``NormsLoseNaN``.
"""

import math

import pytest
import torch
from comfy import model_management
from halfsafe.nodes.host.comfyui.execution import is_oom
from halfsafe.nodes.host.guard.clamps import ClampWatch
from halfsafe.precision.guard.verdicts import NonFinite
from support import families
from support.families import load
from support.guarding import guarded, inside, is_finite, nan_at, plain_fp16, raising_at, report_of

MPS_OOM = "MPS backend out of memory (MPS allocated: 19.13 GiB, other allocations: 6.17 GiB, max allowed: 36.27 GiB)."


class AcceleratorError(RuntimeError):
    """As torch raises it where CUDA itself, not torch's allocator, had no memory."""

    error_code = 2


def test_a_call_that_gives_nan_is_seen_where_norms_lose_it(comfy, wan, as_on_mps):
    model = inside(guarded(comfy, load(comfy, wan, "as_file", "fp16")), nan_at(2))
    families.sample(model, "wan")
    assert [event.recovered for event in report_of(model).events] == [True]


def test_a_conditioning_with_nan_is_seen_where_norms_lose_it(comfy, wan, as_on_mps):
    positive = families.conditioning("wan")
    positive[0][0][0, 3, 5] = math.nan
    with pytest.raises(NonFinite, match="positive conditioning") as error:
        families.sample(guarded(comfy, load(comfy, wan, "as_file", "bf16")), "wan", cond=positive)
    assert error.value.verdict == "bad_input"


def test_a_clamp_of_nan_is_seen_where_norms_lose_it(as_on_mps):
    with ClampWatch(torch.device("cpu")) as watch:
        torch.nan_to_num(torch.tensor([1.0, math.nan], dtype=torch.float16))
    assert math.isnan(watch.largest[0].item())


def test_comfyui_does_not_know_the_lack_of_memory_of_mps():
    """Why the pack has a test of its own beside ComfyUI's; where this fails, it can go."""
    assert model_management.is_oom(torch.OutOfMemoryError("Allocation on device"))
    assert not model_management.is_oom(RuntimeError(MPS_OOM))


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no memory"), RuntimeError(MPS_OOM), AcceleratorError("CUDA error")]
)
def test_a_lack_of_memory_for_a_repeat_is_told_whatever_its_class(comfy, overflowing, caplog, error):
    model = inside(guarded(comfy, plain_fp16(comfy, overflowing)), raising_at(error, 3))
    assert not is_finite(families.sample(model, "wan"))
    assert report_of(model).verdict == "stopped" and "memory" in report_of(model).advice
    assert "Not enough memory to repeat" in caplog.text


def test_another_error_of_a_repeat_is_not_told_as_a_lack_of_memory(comfy, overflowing, caplog):
    model = inside(guarded(comfy, plain_fp16(comfy, overflowing)), raising_at(RuntimeError("shapes differ"), 3))
    assert not is_finite(families.sample(model, "wan")), "as without the guard"
    assert (
        report_of(model).verdict == "stopped" and "RuntimeError: shapes differ" in report_of(model).events[0].evidence
    )
    assert "Not enough memory" not in caplog.text and not is_oom(RuntimeError("shapes differ"))
