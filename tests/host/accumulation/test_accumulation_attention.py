"""fp16 attention that cannot overflow, with every attention function of ComfyUI and with another node's override."""

import contextlib

import pytest
import torch
from halfsafe.nodes.host.accumulation.executor import Accumulation
from halfsafe.nodes.host.compute.attention import overridden
from support import families
from support.families import load, report
from support.measures import relative_error
from support.summing import accumulation

OVERRIDE = "optimized_attention_override"
FUNCTIONS = ("attention_pytorch", "attention_split", "attention_sub_quad", "attention_basic")


def onediff_454(offset=3000.0, size=1.0):
    """Queries, keys and values of OneDiff #454: the keys are noise on a large constant per channel."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 48, 4 * 64) for _ in range(3))
    return (q * size + 1).half(), (k * size + torch.randn(4 * 64) * offset).half(), v.half()


def attention_run(comfy, model):
    """What a model under `attention=auto` keeps of its calls."""
    ours = accumulation(comfy, model, attention="auto")
    ours.pre_run()
    try:
        return Accumulation.on(ours).runs.of(ours.model)
    finally:
        ours.cleanup()


@contextlib.contextmanager
def fp16_math():
    """torch's attention in plain fp16: the math backend, its products not widened."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    before = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(before)


@pytest.mark.parametrize(("offset", "size", "in_fp32"), [(0.0, 1.0, False), (3000.0, 1.0, True), (0.0, 100.0, True)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_attention_function_of_core_is_right_where_plain_fp16_is_not(
    comfy, base, ampere, name, offset, size, in_fp32
):
    from comfy.ldm.modules import attention as core

    tensors = onediff_454(offset, size)
    function = getattr(core, name)
    with torch.inference_mode(), fp16_math():
        exact = core.attention_basic(*(tensor.double() for tensor in tensors), 4)
        plain = relative_error(exact, function(*tensors, 4))
        run = attention_run(comfy, base)
        options = overridden({}, run.attend)

        def call():
            run.attention.begin()
            return function(*tensors, 4, transformer_options=options)

        errors = [relative_error(exact, run.calibration.run(call)) for _ in range(2)]
    assert max(errors) <= 2e-3
    assert run.attention.calls_in_fp32 == [in_fp32] and run.calibration.repeats == 0
    if offset:
        assert not plain <= 2e-3, "plain fp16 was to fail"


def test_a_model_whose_keys_have_an_offset(comfy, wan, call, ampere):
    path = families.write_scaled(wan, wan.with_name("offset.safetensors"), {r"self_attn\.norm_[qk]\.weight": 200})
    model = load(comfy, path, "fp16", "fp16")
    exact = families.replay(load(comfy, path, "fp32", "fp32"), call)
    assert not relative_error(exact, families.replay(model, call)) < 0.01
    ours = accumulation(comfy, model, attention="auto")
    always = accumulation(comfy, model, attention="fp32")
    for _ in range(2):
        assert relative_error(exact, families.replay(ours, call)) < 0.01
        assert relative_error(exact, families.replay(always, call)) < 0.01
    found = report(comfy, ours)["decisions"]["attention"]
    assert "2 in fp32" in found
