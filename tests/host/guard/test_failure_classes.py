"""The classes of failures that users report, each made to happen in a real ComfyUI, with the guard's verdict and its error."""

import json
import math
from dataclasses import asdict

import pytest
import torch
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE
from halfsafe.precision.base.patching import patched
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import load_file, save_file
from support import dialects, families, model_files, tiny_models
from support.broken_arithmetic import HalfProductsAreZero, SumsInFp16
from support.failure_classes import Measured
from support.families import load, stock
from support.guarding import core, guarded, inside, is_finite, modes_of, nan_at, plain_fp16, report_of
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


@pytest.fixture
def record(record_property):
    """Keep a row of the table, and give it back."""

    def keep(number, how, verdict, before, after, extra_calls, note=""):
        row = Measured(number, how, verdict, before, after, extra_calls, note)
        record_property("failure_class", json.dumps(asdict(row)))
        return row

    return keep


def seen(record, number, how, reference, before, model, after, note=""):
    """The row of a call that the guard has seen."""
    report = report_of(model)
    errors = (relative_error(reference, before), relative_error(reference, after))
    return record(number, how, report.verdict, *errors, report.extra_calls, note)


def cured(row, most=GOOD, calls=2):
    assert row.verdict == "recovered" and row.after < most and row.extra_calls <= calls
    assert not row.before < 10 * most, "without the guard it fails"


def hopeless(comfy, record, number, how, plain, run, verdict, calls, note=""):
    """The row of a run that gives NaN without the guard and ends with an error with it."""
    assert not is_finite(run(plain))
    model = guarded(comfy, plain)
    with pytest.raises(NonFinite) as error:
        run(model)
    assert error.value.verdict == verdict and report_of(model).extra_calls == calls
    record(number, how, verdict, math.nan, None, report_of(model).extra_calls, note)
    return str(error.value)


def unseen(row, least):
    """The guard says nothing, and the result is wrong."""
    assert row.verdict == "clean" and row.extra_calls == 0 and row.after > least


OVERFLOWS = {
    1: ("wan", "ffn", "Wan in fp16, its down-projection scaled"),
    2: ("wan", "residual", "Wan in fp16, what is added to the residual scaled"),
    12: ("flux", "ffn", "Flux in fp16: ComfyUI's own nan_to_num"),
}


@pytest.mark.parametrize("number", OVERFLOWS)
def test_an_overflow_of_the_model(comfy, files, record, number):
    family, kind, how = OVERFLOWS[number]
    path = files(family, kind)
    reference_model, plain = load(comfy, path, "fp32", "fp32"), plain_fp16(comfy, path)
    call = families.capture(reference_model, family)
    reference, before = families.replay(reference_model, call), families.replay(plain, call)
    model = guarded(comfy, plain)
    after = families.replay(model, call)
    families.replay(model, call)
    half = sum(mode == "fp16" for mode in modes_of(model).values())
    note = f"afterwards {half} of {len(modes_of(model))} layers are plain fp16"
    cured(seen(record, number, how, reference, before, model, after, note))
    assert report_of(model).extra_calls == 2


def test_3_a_text_encoder_in_fp16(comfy, models_dir, record, monkeypatch):
    """As a pack does that puts an encoder under autocast where ComfyUI would compute in fp16; ComfyUI's run in fp32."""
    path = tiny_models.clip_l(models_dir / "text_encoders" / "class_clip.safetensors", dtype=torch.float32)
    tensors = load_file(str(path))
    for name, factor in (("fc1", 3e5), ("fc2", 1e-5)):
        tensors[f"text_model.encoder.layers.5.mlp.{name}.weight"] *= factor
    save_file(tensors, str(path))
    clip = comfy.run("HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage="fp32", compute="auto")[0]
    model = clip.cond_stage_model
    encode_weights = type(model).encode_token_weights

    def in_its_dtype(tokens):
        with torch.autocast("cpu", torch.float16, enabled=getattr(model, "manual_cast_dtype", None) == torch.float16):
            return encode_weights(model, tokens)

    def encode(clip):
        return clip.encode_from_tokens_scheduled(clip.tokenize("a black image"))[0][0]

    monkeypatch.setattr(model, "encode_token_weights", in_its_dtype)
    half = clip.clone()
    half.patcher.set_model_compute_dtype(torch.float16)
    watched = comfy.run("HalfsafeGuardCLIP", clip=half, on_nan="retry_higher")[0]
    reference, before, after = encode(clip), encode(half), encode(watched)
    errors = relative_error(reference, before), relative_error(reference, after)
    guard = getattr(watched, ATTRIBUTE).log
    how = "CLIP-L under autocast, one feed-forward scaled; Guard CLIP"
    cured(record(3, how, guard.verdict, *errors, len(guard.events), "ComfyUI's own encoders run in fp32"), calls=1)


def test_4_a_vae_in_fp16(comfy, models_dir, record):
    path = tiny_models.sd_vae(models_dir / "vae" / "class_vae.safetensors", dtype=torch.float32)
    tensors = load_file(str(path))
    tensors["decoder.mid.block_1.conv2.weight"] *= 2e5
    save_file(tensors, str(path))
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    reference, half = (comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype=dtype)[0] for dtype in ("fp32", "fp16"))
    vae = comfy.run("HalfsafeGuardVAE", vae=half, on_nan="retry_higher")[0]
    expected, before, after = (one.decode(latent) for one in (reference, half, vae))
    guard = getattr(vae, ATTRIBUTE).log
    errors = relative_error(expected, before), relative_error(expected, after)
    row = record(4, "Stable Diffusion's VAE in fp16, a convolution scaled; Guard VAE", guard.verdict, *errors, len(guard.events))
    cured(row, most=0.02, calls=1)


@pytest.mark.parametrize("name", ["attention_basic", "attention_sub_quad"])
def test_5_scores_of_an_unfused_attention(comfy, files, record, monkeypatch, name):
    attention = getattr(core("comfy.ldm.modules.attention"), name)
    monkeypatch.setattr(core("comfy.ldm.wan.model"), "optimized_attention", attention)
    path = files("wan", "attention")
    reference_model, plain = load(comfy, path, "fp32", "fp32"), plain_fp16(comfy, path)
    call = families.capture(reference_model, "wan")
    reference, before = families.replay(reference_model, call), families.replay(plain, call)
    model = guarded(comfy, plain)
    row = seen(record, 5, f"Wan in fp16, q and k scaled, ComfyUI's {name}", reference, before, model, families.replay(model, call))
    cured(row)


def test_6_a_quantized_attention_kernel(comfy, files, fp32, record):
    def kernel(function, q, k, v, heads, *args, **kwargs):
        result = function(q, k, v, heads, *args, **kwargs)
        return result * (math.nan if kwargs["transformer_options"].get("block_index") == 1 else 1.0)

    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    plain.model_options["transformer_options"]["optimized_attention_override"] = kernel
    model = guarded(comfy, plain)
    reference, before = families.replay(reference_model, call), families.replay(plain, call)
    how = "simulated: an attention override gives NaN in block 1"
    row = seen(record, 6, how, reference, before, model, families.replay(model, call), "left out in that block only")
    cured(row)
    assert set(report_of(model).escalations) == {"blocks.1"}


def test_7_sums_in_fp16(comfy, files, record, ampere):
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
    row = seen(record, 7, "simulated: products whose fp16 sum passes 65504 give inf", reference, before, model, after)
    cured(row)


def with_norm(norm, *models):
    """A context with ``norm(x)`` in place of a norm of block 1, as custom model code has."""
    return patched((model.model.diffusion_model.blocks[1].norm2, "forward", norm) for model in models)


def rms(eps, zero=None):
    def norm(x):
        x = x * (1.0 if zero is None else zero)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)

    return norm


NORMS = {
    "zeros": (lambda x: rms(1e-6)(x * 3e3), "its square is inf, its result zero"),
    "eps": (rms(1e-9, zero=0.0), "blank input: eps is 0 in fp16"),
}


@pytest.mark.parametrize("kind", NORMS)
def test_8_a_hand_written_norm(comfy, files, fp32, record, kind):
    norm, how = NORMS[kind]
    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = guarded(comfy, plain)
    with with_norm(norm, reference_model, plain):
        reference, before, after = (families.replay(one, call) for one in (reference_model, plain, model))
    row = seen(record, 8, f"a norm in fp16; {how}", reference, before, model, after)
    if kind == "eps":
        cured(row)
    else:
        unseen(row, 0.02)


def test_9_rounded_positions(comfy, files, fp32, record, monkeypatch):
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
    row = seen(record, 9, "positions at 4000 rounded to bf16", reference, result, model, result, "nothing of this pack casts them")
    unseen(row, 0.02)


def test_10_rounded_timesteps(comfy, files, fp32, record):
    def rounded(executor, args, kwargs):
        x, t, *rest = args
        return executor(x, (t * 1000).bfloat16().float() / 1000, *rest, **kwargs)

    reference_model, call = fp32
    t = torch.full((2,), 0.7007)
    reference = families.replay(reference_model, call, t=t)
    model = inside(guarded(comfy, plain_fp16(comfy, files("wan"))), rounded)
    result = families.replay(model, call, t=t)
    row = seen(record, 10, "t of 700.7 rounded to bf16", reference, result, model, result, "nothing of this pack casts them")
    unseen(row, 1e-3)


def test_11_a_mask_made_for_bf16(comfy, files, record, monkeypatch):
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
    reference, before, after = (families.replay(one, call) for one in (reference_model, plain, model))
    cured(seen(record, 11, "bf16's lowest number cast to fp16 in a row that is masked whole", reference, before, model, after))


def test_13_a_clamp_that_belongs_to_the_model(comfy, files, fp32, record):
    """As in Sana: values past 65504 are cut in fp16 only, and that is what the model was made with."""

    def clipped(x):
        result = x.float() * 1e5
        return (result.clamp(-65504, 65504) if x.dtype == torch.float16 else result).to(x.dtype) * 1e-4

    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = guarded(comfy, plain)
    with with_norm(clipped, reference_model, plain):
        reference, before, after = (families.replay(one, call) for one in (reference_model, plain, model))
    row = seen(record, 13, "a clip that acts in fp16 only", reference, before, model, after, "left alone: fp16 is the reference here")
    assert row.verdict == "clean" and torch.equal(before, after) and row.before > 0.02


def test_14_fp16_forced_on(comfy, files, record):
    """LTX-Video is not made for fp16; ComfyUI's own node forces it."""
    path = files("ltxv", "residual")
    (stock,) = comfy.core["UNETLoader"]().load_unet(path.name, "default")
    plain = core("comfy_extras.nodes_model_advanced").ModelComputeDtype().patch(stock, "fp16")[0]
    reference_model = load(comfy, path, "fp32", "fp32")
    call = families.capture(reference_model, "ltxv")
    reference, before = families.replay(reference_model, call), families.replay(plain, call)
    model = guarded(comfy, plain)
    how = "LTX-Video by UNETLoader, ModelComputeDtype fp16"
    cured(seen(record, 14, how, reference, before, model, families.replay(model, call)))


def test_16_fp16_with_wide_parts_where_core_takes_fp32(comfy, files, record, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    path = files("ltxv", "residual")
    reference_model = load(comfy, path, "fp32", "fp32")
    call = families.capture(reference_model, "ltxv")
    plain = load(comfy, path, "as_file", "auto")
    model = guarded(comfy, plain)
    reference, before, after = (families.replay(one, call) for one in (reference_model, plain, model))
    how = "LTX-Video as on sm_75: the loader's auto takes fp16_safe"
    row = seen(record, 16, how, reference, before, model, after, "speed is not measured on a CPU; nothing is left for the guard")
    assert row.verdict == "clean" and row.after < GOOD


def test_17_dropped_scales(comfy, files, models_dir, fp32, record):
    target = models_dir / "diffusion_models" / "class_modelopt.safetensors"
    path = model_files.in_dialect(files("wan"), target, dialects.modelopt)
    reference_model, call = fp32
    reference, model = families.replay(reference_model, call), guarded(comfy, stock(path))
    result = families.replay(model, call)
    ours = relative_error(reference, families.replay(load(comfy, path, "as_file", "fp32"), call))
    note = f"Load Diffusion Model reads them: error {ours:.1e}"
    unseen(seen(record, 17, "weight_scale without a marker, by ComfyUI's loader", reference, result, model, result, note), 0.5)
    assert ours < 0.1


def test_18_scaled_e5m2(comfy, files, models_dir, fp32, record):
    target = models_dir / "diffusion_models" / "class_e5m2.safetensors"
    path = model_files.in_dialect(files("wan"), target, dialects.scaled_fp8, dtype=dialects.E5M2)
    reference_model, call = fp32
    ours = relative_error(families.replay(reference_model, call), families.replay(load(comfy, path, "as_file", "fp32"), call))
    note = f"Load Diffusion Model reads it: error {ours:.1e}"
    how = "scaled_fp8 of e5m2 by ComfyUI's loader"
    text = hopeless(comfy, record, 18, how, stock(path), lambda model: families.replay(model, call), "bad_weights", 1, note)
    assert "e5m2" in text and ours < 0.2


def test_20_a_cast_to_fp8_without_a_scale(comfy, files, models_dir, record):
    def louder(tensors):
        tensors["blocks.0.ffn.0.weight"][3, 4] = 1000.0

    path = model_files.changed(files("wan"), models_dir / "diffusion_models" / "class_loud.safetensors", louder)
    reference_model = load(comfy, path, "fp32", "fp32")
    call = families.capture(reference_model, "wan")
    ours = load(comfy, path, "fp8_e4m3fn", "fp32")
    error = relative_error(families.replay(reference_model, call), families.replay(ours, call))
    plain = comfy.core["UNETLoader"]().load_unet(path.name, "fp8_e4m3fn")[0]
    how = "one weight of 1000, UNETLoader with fp8_e4m3fn"
    note = f"Load Diffusion Model scales: error {error:.1e}"
    text = hopeless(comfy, record, 20, how, plain, lambda model: families.replay(model, call), "bad_weights", 1, note)
    assert "blocks.0.ffn.0.weight" in text and "fp8" in text and error < 0.2


def test_26_two_dtypes_meet(comfy, files, fp32, record):
    _, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = guarded(comfy, plain)
    mixed = with_norm(lambda x: torch.nn.functional.linear(x.bfloat16(), torch.zeros(256, 256)), plain)
    with mixed, pytest.raises(RuntimeError, match="dtype") as error:
        families.replay(model, call)
    assert not isinstance(error.value, NonFinite) and is_finite(families.replay(model, call))
    record(26, "a norm in another dtype than its weight", "error passed on", None, None, 0, "nothing of this pack cures it")


def test_29_a_compiled_graph(comfy, files, fp32, record):
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
    how = "simulated: a compiler backend that gives NaN"
    row = seen(record, 29, how, reference, before, model, after, "each call is repeated; the advice is to leave torch.compile out")
    assert row.verdict == "device_fault" and row.after < GOOD and row.extra_calls == 2
    assert "torch.compile" in report_of(model).advice


def test_30_wrong_products(comfy, files, fp32, record):
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
    how = "simulated: fp16 products are zero"
    row = seen(record, 30, how, reference, before, model, after, "found by a test product before the first call; all in fp32")
    assert row.verdict == "device_fault" and row.after < GOOD and row.extra_calls == 0


def test_31_nan_in_every_dtype(comfy, files, fp32, record):
    _, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    how = "simulated: a norm gives NaN in every dtype"
    with with_norm(lambda x: x * math.nan, plain):
        text = hopeless(comfy, record, 31, how, plain, lambda model: families.replay(model, call), "not_precision", 3, "named, not cured")
    assert "blocks.1.norm2" in text


def test_32_finite_when_run_again(comfy, files, fp32, record):
    reference_model, call = fp32
    plain = plain_fp16(comfy, files("wan"))
    model = inside(guarded(comfy, plain), nan_at(1))
    reference, before, after = (families.replay(one, call) for one in (reference_model, inside(plain, nan_at(1)), model))
    row = seen(record, 32, "simulated: one call's result is NaN", reference, before, model, after)
    assert row.verdict == "device_fault" and row.after < GOOD and row.extra_calls == 2


def test_33_nan_in_a_file(comfy, files, models_dir, fp32, record):
    def spoil(tensors):
        tensors["blocks.1.self_attn.k.weight"][3, 5] = math.nan

    path = model_files.changed(files("wan"), models_dir / "diffusion_models" / "class_nan.safetensors", spoil)
    _, call = fp32
    plain = comfy.core["UNETLoader"]().load_unet(path.name, "default")[0]
    note = "file and tensor are named; the pack's loaders refuse it"
    text = hopeless(comfy, record, 33, "one NaN, by UNETLoader", plain, lambda model: families.replay(model, call), "bad_weights", 1, note)
    assert "class_nan.safetensors" in text and "blocks.1.self_attn.k.weight" in text


def test_35_a_scheduler_that_divides_by_zero(comfy, files, record):
    plain = plain_fp16(comfy, files("wan"))
    noise, cond = families.noise(plain), families.conditioning("wan")

    def run(model):
        return core("comfy.sample").sample(model, noise, 1, 1.0, "euler", "kl_optimal", cond, cond, torch.zeros_like(noise), seed=1)

    how = "ComfyUI's kl_optimal with one step"
    text = hopeless(comfy, record, 35, how, plain, run, "not_precision", 0, "said before the first call")
    assert "scheduler" in text
