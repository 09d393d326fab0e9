"""The classes of failures that users report, each made to happen in a real ComfyUI, with the guard's verdict and its error."""

import math
from typing import NamedTuple

import pytest
import torch
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from halfsafe.precision.base import flags
from halfsafe.precision.base.patching import patched
from halfsafe.precision.guard.verdicts import NonFinite
from support import dialects, families, model_files
from support.broken_arithmetic import HalfProductsAreZero, SumsInFp16
from support.families import load, stock
from support.guarding import core, guarded, inside, is_finite, nan_at, plain_fp16, report_of
from support.measures import relative_error
from support.probing import forget_probes
from support.summing import accumulation

GOOD = 0.01


@pytest.fixture(scope="module")
def files(models_dir):
    """(family, kind) -> the file of that model; kind None: the clean one."""
    return families.files_in(models_dir / "diffusion_models", "class")


@pytest.fixture(scope="module")
def fp32(comfy, files, call_of_two):
    """The clean Wan in fp32, and a call of it with two rows."""
    return load(comfy, files("wan"), "fp32", "fp32"), call_of_two


class Row(NamedTuple):
    """The verdict on a call that the guard has seen; errors without the guard and with it; repeats."""

    verdict: str
    before: float
    after: float
    extra_calls: int


def seen(reference, before, model, after) -> Row:
    report = report_of(model)
    return Row(report.verdict, relative_error(reference, before), relative_error(reference, after), report.extra_calls)


def compared(reference_model, plain, model, call) -> Row:
    reference, before, after = (families.replay(one, call) for one in (reference_model, plain, model))
    return seen(reference, before, model, after)


def cured(row, most=GOOD, calls=2):
    assert row.verdict == "recovered" and row.after < most and row.extra_calls <= calls
    assert not row.before < 10 * most, "without the guard it fails"


def hopeless(comfy, plain, run, verdict, calls) -> str:
    """The error of a run that gives NaN without the guard and ends with an error with it."""
    assert not is_finite(run(plain))
    model = guarded(comfy, plain)
    with pytest.raises(NonFinite) as error:
        run(model)
    assert error.value.verdict == verdict and report_of(model).extra_calls == calls
    return str(error.value)


def unseen(row, least):
    """The guard says nothing, and the result is wrong."""
    assert row.verdict == "clean" and row.extra_calls == 0 and row.after > least


@pytest.mark.parametrize("name", ["attention_basic", "attention_sub_quad"])
def test_5_scores_of_an_unfused_attention(comfy, files, monkeypatch, name):
    attention = getattr(core("comfy.ldm.modules.attention"), name)
    monkeypatch.setattr(core("comfy.ldm.wan.model"), "optimized_attention", attention)
    path = files("wan", "attention")
    reference_model, plain = load(comfy, path, "fp32", "fp32"), plain_fp16(comfy, path)
    call = families.capture(reference_model, "wan")
    model = guarded(comfy, plain)
    cured(compared(reference_model, plain, model, call))


def test_6_a_quantized_attention_kernel(comfy, files, fp32):
    def kernel(function, q, k, v, heads, *args, **kwargs):
        result = function(q, k, v, heads, *args, **kwargs)
        return result * (math.nan if kwargs["transformer_options"].get("block_index") == 1 else 1.0)

    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    plain.model_options["transformer_options"]["optimized_attention_override"] = kernel
    model = guarded(comfy, plain)
    cured(compared(reference_model, plain, model, call))
    assert set(report_of(model).escalations) == {"residual stream"}


def test_7_sums_in_fp16(comfy, files, ampere):
    def cancelling(model):
        """Half of the terms of a sum cancel the other half."""
        ffn = model.model.diffusion_model.blocks[1].ffn
        with torch.no_grad():
            ffn[2].weight[:, 512:] = -ffn[2].weight[:, :512]
            ffn[2].weight *= 5e4
            ffn[0].weight[512:], ffn[0].bias[512:] = ffn[0].weight[:512], ffn[0].bias[:512]
        return model

    reference_model, plain = (cancelling(load(comfy, files("wan"), dtype, dtype)) for dtype in ("fp32", "fp16"))
    call = families.capture(reference_model, "wan")
    reference = families.replay(reference_model, call)
    fast = accumulation(comfy, plain, fp16_accumulation="on")
    model = guarded(comfy, fast)
    with SumsInFp16():
        before, after = families.replay(fast, call), families.replay(model, call)
    row = seen(reference, before, model, after)
    cured(row)
    assert not flags.is_on(FP16_ACCUMULATION)


def with_norm(norm, *models):
    """A context with ``norm(x)`` in place of a norm of block 1, as custom model code has."""
    return patched((model.model.diffusion_model.blocks[1].norm2, "forward", norm) for model in models)


def rms(eps, zero=None):
    def norm(x):
        x = x * (1.0 if zero is None else zero)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    return norm


NORMS = {
    "its square is inf, its result zero": lambda x: rms(1e-6)(x * 3e3),
    "of a blank input: eps is 0 in fp16": rms(1e-9, zero=0.0),
}


@pytest.mark.parametrize("kind", NORMS)
def test_8_a_hand_written_norm(comfy, files, fp32, kind):
    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = guarded(comfy, plain)
    with with_norm(NORMS[kind], reference_model, plain):
        cured(compared(reference_model, plain, model, call))


def test_9_rounded_positions(comfy, files, fp32, monkeypatch):
    reference_model, call = fp32
    module = core("comfy.ldm.flux.layers")
    rope = module.rope
    far = {"rope_options": {"shift_x": 4000.0, "shift_y": 3000.0}}

    def replay(model):
        def moved(executor, args, kwargs):
            return executor(*args[:5], {**args[5], **far}, *args[6:], **kwargs)

        return families.replay(inside(model, moved), call)

    reference = replay(reference_model)
    monkeypatch.setattr(module, "rope", lambda pos, *args: rope(pos.bfloat16().float(), *args))
    model = guarded(comfy, plain_fp16(comfy, files("wan")))
    result = replay(model)
    row = seen(reference, result, model, result)
    unseen(row, 0.02)


def test_10_rounded_timesteps(comfy, files, fp32):
    def rounded(executor, args, kwargs):
        x, t, *rest = args
        return executor(x, (t * 1000).bfloat16().float() / 1000, *rest, **kwargs)

    reference_model, call = fp32
    t = torch.full((2,), 0.7007)
    reference = families.replay(reference_model, call, t=t)
    model = inside(guarded(comfy, plain_fp16(comfy, files("wan"))), rounded)
    result = families.replay(model, call, t=t)
    row = seen(reference, result, model, result)
    unseen(row, 1e-3)


def test_11_a_mask_made_for_bf16(comfy, files, monkeypatch):
    """One row of the mask hides every token, as an empty prompt does."""
    module = core("comfy.ldm.wan.model")
    attention = core("comfy.ldm.modules.attention").attention_basic

    def masked(q, k, v, heads, **kwargs):
        mask = torch.zeros(1, 1, q.shape[-2], k.shape[-2])
        mask[..., 0, :] = torch.finfo(torch.bfloat16).min
        return attention(q, k, v, heads, mask=mask.to(q.dtype), **kwargs)

    monkeypatch.setattr(module, "optimized_attention", masked)
    reference_model, plain = load(comfy, files("wan"), "fp32", "fp32"), plain_fp16(comfy, files("wan"))
    call = families.capture(reference_model, "wan")
    model = guarded(comfy, plain)
    cured(compared(reference_model, plain, model, call))


def test_13_a_clamp_that_belongs_to_the_model(comfy, files, fp32):
    """As in Sana: values past 65504 are cut in fp16 only, and that is what the model was made with."""

    def clipped(x):
        result = x.float() * 1e5
        return (result.clamp(-65504, 65504) if x.dtype == torch.float16 else result).to(x.dtype) * 1e-4

    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = guarded(comfy, plain)
    with with_norm(clipped, reference_model, plain):
        row = compared(reference_model, plain, model, call)
        assert torch.equal(families.replay(plain, call), families.replay(model, call))
    assert row.verdict == "clean" and row.before > 0.02


def test_14_fp16_forced_on(comfy, files):
    """LTX-Video is not made for fp16; ComfyUI's own node forces it."""
    path = files("ltxv", "residual")
    (stock,) = comfy.core["UNETLoader"]().load_unet(path.name, "default")
    plain = core("comfy_extras.nodes_model_advanced").ModelComputeDtype().patch(stock, "fp16")[0]
    reference_model = load(comfy, path, "fp32", "fp32")
    call = families.capture(reference_model, "ltxv")
    cured(compared(reference_model, plain, guarded(comfy, plain), call))


def test_16_fp16_with_wide_parts_where_core_takes_fp32(comfy, files, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    path = files("ltxv", "residual")
    reference_model = load(comfy, path, "fp32", "fp32")
    call = families.capture(reference_model, "ltxv")
    plain = load(comfy, path, "as_file", "auto")
    model = guarded(comfy, plain)
    row = compared(reference_model, plain, model, call)
    assert row.verdict == "clean" and row.after < GOOD


def test_17_dropped_scales(comfy, files, models_dir, fp32):
    target = models_dir / "diffusion_models" / "class_modelopt.safetensors"
    path = model_files.in_dialect(files("wan"), target, dialects.modelopt)
    reference_model, call = fp32
    reference, model = families.replay(reference_model, call), guarded(comfy, stock(path))
    result = families.replay(model, call)
    ours = relative_error(reference, families.replay(load(comfy, path, "as_file", "fp32"), call))
    unseen(seen(reference, result, model, result), 0.5)
    assert ours < 0.1


def test_18_scaled_e5m2(comfy, files, models_dir, fp32):
    target = models_dir / "diffusion_models" / "class_e5m2.safetensors"
    path = model_files.in_dialect(files("wan"), target, dialects.scaled_fp8, dtype=dialects.E5M2)
    reference_model, call = fp32
    ours = relative_error(
        families.replay(reference_model, call), families.replay(load(comfy, path, "as_file", "fp32"), call)
    )
    text = hopeless(comfy, stock(path), lambda model: families.replay(model, call), "bad_weights", 1)
    assert "e5m2" in text and ours < 0.2


def test_20_a_cast_to_fp8_without_a_scale(comfy, files, models_dir):
    def louder(tensors):
        tensors["blocks.0.ffn.0.weight"][3, 4] = 1000.0

    path = model_files.changed(files("wan"), models_dir / "diffusion_models" / "class_loud.safetensors", louder)
    reference_model = load(comfy, path, "fp32", "fp32")
    call = families.capture(reference_model, "wan")
    ours = load(comfy, path, "fp8_e4m3fn", "fp32")
    error = relative_error(families.replay(reference_model, call), families.replay(ours, call))
    plain = comfy.core["UNETLoader"]().load_unet(path.name, "fp8_e4m3fn")[0]
    text = hopeless(comfy, plain, lambda model: families.replay(model, call), "bad_weights", 1)
    assert "blocks.0.ffn.0.weight" in text and "fp8" in text and error < 0.2


def test_26_two_dtypes_meet(comfy, files, fp32):
    _, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = guarded(comfy, plain)
    mixed = with_norm(lambda x: torch.nn.functional.linear(x.bfloat16(), torch.zeros(256, 256)), plain)
    with mixed, pytest.raises(RuntimeError, match="dtype") as error:
        families.replay(model, call)
    assert not isinstance(error.value, NonFinite) and is_finite(families.replay(model, call))


def test_29_a_compiled_graph(comfy, files, fp32):
    def broken(graph, inputs):
        return lambda *args: tuple(value * math.nan for value in graph(*args))

    torch._dynamo.reset()
    reference_model, call = fp32
    clone = plain_fp16(comfy, files("wan")).clone(disable_dynamic=True)
    keys = ["diffusion_model.blocks.1"]
    core("comfy_api.torch_helpers").set_torch_compile_wrapper(model=clone, backend=broken, keys=keys)
    model = guarded(comfy, clone)
    reference, before, after = (families.replay(one, call) for one in (reference_model, clone, model))
    torch._dynamo.reset()
    row = seen(reference, before, model, after)
    assert row.verdict == "device_fault" and row.after < GOOD and row.extra_calls == 2
    assert "torch.compile" in report_of(model).advice


def test_30_wrong_products(comfy, files, fp32):
    forget_probes()
    reference_model, call = fp32
    reference = families.replay(reference_model, call)
    plain = plain_fp16(comfy, files("wan"))
    model = guarded(comfy, plain)
    try:
        with HalfProductsAreZero():
            before, after = families.replay(plain, call), families.replay(model, call)
    finally:
        forget_probes()
    row = seen(reference, before, model, after)
    assert row.verdict == "device_fault" and row.after < GOOD and row.extra_calls == 0


def test_31_nan_in_every_dtype(comfy, files, fp32):
    _, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    with with_norm(lambda x: x * math.nan, plain):
        text = hopeless(comfy, plain, lambda model: families.replay(model, call), "not_precision", 4)
    assert "blocks.1.norm2" in text


def test_32_finite_when_run_again(comfy, files, fp32):
    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = inside(guarded(comfy, plain), nan_at(1))
    reference, before, after = (
        families.replay(one, call) for one in (reference_model, inside(plain, nan_at(1)), model)
    )
    row = seen(reference, before, model, after)
    assert row.verdict == "device_fault" and row.after < GOOD and row.extra_calls == 2


def test_33_nan_in_a_file(comfy, files, models_dir, fp32):
    def spoil(tensors):
        tensors["blocks.1.self_attn.k.weight"][3, 5] = math.nan

    path = model_files.changed(files("wan"), models_dir / "diffusion_models" / "class_nan.safetensors", spoil)
    _, call = fp32
    plain = comfy.core["UNETLoader"]().load_unet(path.name, "default")[0]
    text = hopeless(comfy, plain, lambda model: families.replay(model, call), "bad_weights", 1)
    assert "class_nan.safetensors" in text and "blocks.1.self_attn.k.weight" in text


def test_35_a_scheduler_that_divides_by_zero(comfy, files):
    plain = plain_fp16(comfy, files("wan"))
    noise, cond = families.noise(plain), families.conditioning("wan")

    def run(model):
        return core("comfy.sample").sample(
            model, noise, 1, 1.0, "euler", "kl_optimal", cond, cond, torch.zeros_like(noise), seed=1
        )

    text = hopeless(comfy, plain, run, "not_precision", 0)
    assert "scheduler" in text
