"""Samplers, wrappers and step caches that compute in float64 (the default of ClownsharkBatwing/RES4LYF) or 16 bit, on every node that acts in a call: the result of ComfyUI's own fp32."""

from __future__ import annotations

import itertools

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy.sample import sample_custom
from comfy.samplers import KSAMPLER, calculate_sigmas
from halfsafe.precision.base.options import GOALS
from halfsafe.precision.guard.verdicts import NonFinite
from support import control_files, families, tiny_models
from support.guarding import guarded, plain_fp16, report_of
from support.measures import relative_error
from support.summing import accumulation

STEPS = 2
BOUND = {"fp8": 0.1, "int8": 0.03, "bf16": 0.02}
pytestmark = pytest.mark.usefixtures("one_thread")


class Euler:
    """A sampler of another pack that keeps its latent in a dtype of its own. ``seen``: the dtypes of what the model returned to it."""

    def __init__(self, dtype: torch.dtype, sigmas: torch.dtype = torch.float32):
        self.dtype, self.sigmas = dtype, sigmas
        self.seen: list[torch.dtype] = []

    def __call__(self, model, x, sigmas, extra_args=None, callback=None, disable=None):
        x, sigmas = x.to(self.dtype), sigmas.to(self.sigmas)
        for now, then in itertools.pairwise(sigmas):
            denoised = model(x, now * sigmas.new_ones(len(x)), **(extra_args or {}))
            self.seen.append(denoised.dtype)
            x = x + (x - denoised) / now * (then - now)
        return x


def sampled(model, sampler, positive=None, negative=None, steps=STEPS):
    start, positive = families.noise(model), positive or families.conditioning("wan")
    negative = negative or families.conditioning("wan", seed=9)
    sigmas = calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps)
    run = KSAMPLER(sampler)
    return sample_custom(model, start, 3.0, run, sigmas, positive, negative, torch.zeros_like(start), seed=1)


def wrapped(model, kind, dtype):
    """A clone on which another pack's wrapper returns its results in a dtype."""
    clone = model.clone()
    clone.add_wrapper_with_key(
        kind, "test.cache", lambda executor, *args, **kwargs: executor(*args, **kwargs).to(dtype)
    )
    return clone


def casting(model, dtype):
    """A clone whose function wrapper hands on latent and noise level in a dtype."""
    clone = model.clone()
    clone.set_model_unet_function_wrapper(
        lambda apply, given: apply(given["input"].to(dtype), given["timestep"].to(dtype), **given["c"])
    )
    return clone


WAYS = {
    **{
        f"{storage}, {compute}": lambda comfy, path, plain, how=(storage, compute): families.load(comfy, path, *how)
        for storage, compute in (
            ("as_file", "auto"), ("as_file", "fp16_safe"), ("as_file", "bf16"), ("as_file", "fp32"),
            ("fp8_e4m3fn", "fp8"), ("fp8_e4m3fn", "fp16_safe"), ("int8", "auto"), ("int8", "fp16_safe"),
        )
    },
    **{
        f"NaN Guard set to {on_nan}": lambda comfy, path, plain, on_nan=on_nan: guarded(comfy, plain, on_nan)
        for on_nan in ("retry_higher", "stop", "report")
    },
    **{
        f"Halfsafe, {goal}": lambda comfy, path, plain, goal=goal: comfy.run(
            "HalfsafeAutoPrecision", model=plain, goal=goal
        )[0]
        for goal in GOALS
    },
    "NaN Guard with checks": lambda comfy, path, plain: guarded(comfy, plain, check="every 5th step"),
    "Compute Dtype": lambda comfy, path, plain: families.with_compute(comfy, plain, "fp16_safe"),
    "Accumulation": lambda comfy, path, plain: accumulation(comfy, plain, fp16_accumulation="on", attention="auto"),
}  # fmt: skip
MAKERS = {
    "a sampler in float64": lambda model: (model, Euler(torch.float64)),
    "noise levels in float64": lambda model: (model, Euler(torch.float64, torch.float64)),
    "a sampler in fp16": lambda model: (model, Euler(torch.float16)),
    "a step cache in float64": lambda model: (
        wrapped(model, WrappersMP.DIFFUSION_MODEL, torch.float64),
        Euler(torch.float32),
    ),
    "a wrapper in float64": lambda model: (wrapped(model, WrappersMP.APPLY_MODEL, torch.float64), Euler(torch.float64)),
    "a function that casts": lambda model: (casting(model, torch.float64), Euler(torch.float32)),
}
PROFILES = ("sm_75", "sm_89")
FIRST, *OTHERS = MAKERS
CASES = [(way, FIRST, profile) for way in WAYS for profile in PROFILES]
CASES += [(way, maker, "sm_75") for maker in OTHERS for way in ("as_file, auto", "NaN Guard set to retry_higher")]


@pytest.fixture(scope="module")
def plain(comfy, wan):
    return plain_fp16(comfy, wan)


@pytest.fixture(scope="module")
def expected(comfy, wan):
    """(who makes float64) -> latent and dtypes of ComfyUI's own fp32 with the same."""
    model, known = families.stock(wan), {}

    def of(maker):
        if maker not in known:
            made, sampler = MAKERS[maker](model)
            known[maker] = sampled(made, sampler), sampler.seen
        return known[maker]

    return of


@pytest.mark.parametrize(("way", "maker", "profile"), CASES)
def test_every_node_takes_what_a_sampler_hands_over(comfy, monkeypatch, wan, plain, expected, way, maker, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    model, sampler = MAKERS[maker](WAYS[way](comfy, wan, plain))
    result = sampled(model, sampler)
    exact, seen = expected(maker)
    bound = next((bound for name, bound in BOUND.items() if name in way), 0.003)
    assert relative_error(exact, result) < bound
    assert (result.dtype, sampler.seen) == (exact.dtype, seen), "dtypes that ComfyUI alone returns"


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("way", ["as_file, auto", "fp8_e4m3fn, fp8", "int8, auto", "NaN Guard set to retry_higher"])
def test_an_overflow_is_repaired_as_with_a_sampler_in_fp32(comfy, monkeypatch, overflowing, fp32, way, profile):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    errors = {}
    for dtype in (torch.float32, torch.float64):
        model = WAYS[way](comfy, overflowing, plain_fp16(comfy, overflowing))
        sampler = Euler(dtype)
        errors[dtype] = relative_error(sampled(fp32, Euler(dtype)), sampled(model, sampler))
        assert report_of(model).verdict == "recovered" and sampler.seen == [dtype] * STEPS
    assert errors[torch.float64] < 1.2 * errors[torch.float32]


def test_a_check_compares_with_a_call_in_the_same_dtype(comfy, wan):
    figures = {}
    for dtype in (torch.float32, torch.float64):
        model = guarded(comfy, families.load(comfy, wan, "as_file", "bf16"), check="first step")
        sampled(model, Euler(dtype))
        (figures[dtype],) = [each.snr_db for each in report_of(model).checks]
    assert figures[torch.float64] == pytest.approx(figures[torch.float32], abs=0.1)


@pytest.mark.parametrize("bad", [torch.float64, torch.float16])
def test_an_input_with_nan_in_another_dtype_is_bad_input(comfy, plain, bad):
    ((text, more),) = families.conditioning("wan")
    spoiled = [[torch.full_like(text, torch.nan).to(bad), more]]
    with pytest.raises(NonFinite) as raised:
        sampled(guarded(comfy, plain), Euler(torch.float64), spoiled)
    assert raised.value.verdict == "bad_input" and "positive conditioning" in str(raised.value)


def test_a_controlnet_takes_a_sampler_and_a_hint_in_float64(comfy, monkeypatch, models_dir):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    path = tiny_models.sd15_unet(models_dir / "diffusion_models" / "float64_sd15.safetensors")
    net = control_files.sd15(models_dir / "controlnet" / "float64_control.safetensors").name
    picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1)).double()
    text = [[torch.randn(1, 77, 768, generator=torch.Generator().manual_seed(2)), {}]]

    def run(model, control):
        apply = comfy.core["ControlNetApplyAdvanced"]().apply_controlnet
        return sampled(model, Euler(torch.float64), *apply(text, text, control, picture, 1.0, 0.0, 1.0), steps=1)

    exact = run(families.stock(path), comfy.core["ControlNetLoader"]().load_controlnet(net)[0])
    planned = {"control_net_name": net, "storage": "as_file", "compute": "fp16_safe"}
    result = run(guarded(comfy, families.load(comfy, path)), comfy.run("HalfsafeLoadControlNet", **planned)[0])
    assert relative_error(exact, result) < 0.003 and result.dtype == exact.dtype
