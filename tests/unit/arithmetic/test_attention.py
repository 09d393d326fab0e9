"""fp16 attention: left alone, or in fp32. The keys are those of OneDiff #454."""

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.calibration import Calibration
from support.measures import relative_error


def fp16_math(q, k, v, heads, mask=None, **kwargs):
    """Attention as an unfused fp16 path computes it: scores rounded to fp16, then scaled."""
    scores = ((q.double() @ k.double().mT).to(q.dtype) * q.shape[-1] ** -0.5).float()
    return (scores.softmax(-1).to(v.dtype).double() @ v.double()).to(q.dtype)


def exact_attention(q, k, v):
    return ((q.double() @ k.double().mT) * q.shape[-1] ** -0.5).softmax(-1) @ v.double()


def onediff_454(offset, size=1.0):
    """SVD's keys: noise on a constant per channel so large that q.k passes fp16's range."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 48, 64) for _ in range(3))
    return (q * size + 1).half(), (k * size + torch.randn(64) * offset).half(), v.half()


def attend(tensors, attention=fp16_math, calls=2, **how):
    calibration = Calibration()
    bound = SafeAttention(calibration)

    def call():
        bound.begin()
        return bound(Kernels(attention, fp16_math, fused=False), *tensors, 4, **how)

    with torch.inference_mode():
        results = [calibration.run(call) for _ in range(calls)]
    return results, bound, calibration


def test_scores_that_are_truly_large_are_computed_in_fp32():
    tensors = onediff_454(0.0, size=100.0)
    results, bound, _ = attend(tensors)
    assert bound.calls_in_fp32 == [True]
    assert max(relative_error(exact_attention(*tensors), result) for result in results) < 2e-3


def test_scores_that_grow_later_are_seen_and_the_call_repeated():
    state = {"tensors": onediff_454(0.0)}
    calibration = Calibration()
    bound = SafeAttention(calibration)

    def call():
        bound.begin()
        return bound(Kernels(fp16_math, fp16_math, fused=False), *state["tensors"], 4)

    calibration.run(call)
    state["tensors"] = onediff_454(3000.0)
    assert relative_error(exact_attention(*state["tensors"]), calibration.run(call)) < 2e-3
    assert calibration.repeats == 1


@pytest.mark.parametrize("mask", [torch.float16, torch.bool])
def test_masks_hide_the_same_tokens_in_every_mode(mask):
    def masked(q, k, v, heads, mask=None, **kwargs):
        assert mask.dtype in (torch.bool, q.dtype)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    hidden = torch.zeros(48, 48, dtype=torch.bool).index_fill(1, torch.arange(8), True)
    given_mask = ~hidden if mask is torch.bool else torch.zeros(48, 48, dtype=mask).masked_fill(hidden, -6e4)
    for tensors in (onediff_454(0.0), onediff_454(3000.0), onediff_454(0.0, 100.0)):
        q, k, v = (tensor.float() for tensor in tensors)
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)
        calibration = Calibration()
        bound = SafeAttention(calibration)
        result = calibration.run(lambda b=bound, t=tensors: b(Kernels(masked, masked), *t, 4, mask=given_mask))
        assert relative_error(exact, result) < 2e-3


def test_an_override_whose_result_is_not_finite_is_off_for_that_attention_only():
    def quantized(q, k, v, heads, **kwargs):
        result = fp16_math(q, k, v, heads)
        return result * float("inf") if v.abs().max() > 10 else result

    calibration = Calibration()
    bound = SafeAttention(calibration)
    quiet, loud = onediff_454(0.0), (*onediff_454(0.0)[:2], onediff_454(0.0)[2] * 100)

    def call(second):
        bound.begin()
        return [bound(Kernels(quantized, fp16_math, foreign=True), *tensors, 4) for tensors in (quiet, second)]

    first = calibration.run(lambda: call(loud))
    assert bound.calls_in_fp32 == [False, True]
    assert all(torch.isfinite(result).all() for result in first)
    calibration = Calibration()
    bound = SafeAttention(calibration)
    calibration.run(lambda: call(quiet))
    assert all(torch.isfinite(result).all() for result in calibration.run(lambda: call(loud))), (
        "an overflow at a later step"
    )
    assert calibration.repeats == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_in_another_dtype_beside_fp16_operands_hides_its_tokens(dtype):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 16, 64) for _ in range(3))
    mask = torch.zeros(16, 16, dtype=dtype)
    mask[:, 8:] = -1e30
    calibration = Calibration()
    attention = SafeAttention(calibration)
    seen = []

    def kernel(q, k, v, heads, mask=None, **kwargs):
        seen.append((q.dtype, mask.dtype))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def call():
        attention.begin()
        return attention(Kernels(kernel, kernel, fused=True), q, k, v, 1, mask=mask)

    with torch.inference_mode():
        results = [calibration.run(call) for _ in range(2)]
    errors = [relative_error(exact_attention(q, k[:, :8], v[:, :8]), result) for result in results]
    assert max(errors) < 2e-3, f"errors {errors}, operands and masks {seen}"
    assert (torch.float16, torch.float16) in seen, seen
