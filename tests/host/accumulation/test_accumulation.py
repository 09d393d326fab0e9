"""How a model's products are summed, in a real ComfyUI: set inside its calls, exactly as before outside of them."""

import threading

import pytest
import torch
from halfsafe.nodes.host.accumulation.executor import accumulation_of
from halfsafe.nodes.host.comfyui.wrappers import ACCUMULATION
from halfsafe.precision.base import flags
from halfsafe.precision.plan.accumulation import PARTS
from support import families, tiny_models
from support.families import load, report
from support.summing import FP16_ACCUMULATION, SETTINGS, accumulation, raising, spied, started_with, states

pytestmark = pytest.mark.usefixtures("flags_as_before")


@pytest.fixture(scope="module")
def of_dtype(comfy, wan):
    """Dtype -> two models whose products the switches act on: TF32 on fp32, the others on fp16."""
    return {dtype: [load(comfy, wan, dtype, dtype) for _ in range(2)] for dtype in ("fp16", "fp32")}


def succeed(comfy, model, another, call, look):
    families.replay(spied(model, look), call)


def fail_with(error):
    def situation(comfy, model, another, call, look):
        with pytest.raises(type(error)):
            families.replay(spied(spied(model, look), raising(error)), call)

    return situation


def interrupt(comfy, model, another, call, look):
    from comfy.model_management import InterruptProcessingException

    fail_with(InterruptProcessingException())(comfy, model, another, call, look)


def run_from_a_cached_node(comfy, model, another, call, look):
    for _ in range(2):
        families.replay(spied(model, look), call)


def opposite(comfy, model, another):
    request = accumulation_of(model).request
    return accumulation(comfy, another, **{n: {"on": "off", "off": "on"}.get(getattr(request, n), "unchanged") for n in SETTINGS[:3]})


def nest(comfy, model, another, call, look):
    """The model runs inside of another model's call, with the settings the other way round."""
    outer, seen = opposite(comfy, model, another), []

    def inner():
        seen.append(states())
        families.replay(spied(model, look), call)
        seen.append(states())

    families.replay(spied(outer, inner), call)
    held = accumulation_of(outer).plan_for(outer).flags
    assert seen[0] == seen[1] and all(flags.SETTINGS[name].is_on(seen[1][name]) is value for name, value in held.items())


def run_on_threads(comfy, model, another, call, look):
    """The same wrapper on two models side by side, as on two GPUs."""
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    gate, results = threading.Barrier(2, timeout=30), []

    def inside():
        gate.wait()
        look()
        gate.wait()

    twin = another.clone()
    twin.add_wrapper_with_key(WrappersMP.APPLY_MODEL, ACCUMULATION, accumulation_of(model))
    both = [spied(patcher, inside) for patcher in (model, twin)]
    comfy.model_management.load_models_gpu(both)
    for patcher in both:
        patcher.pre_run()
    threads = [threading.Thread(target=lambda p=patcher: results.append(families.apply(p, call, call.args[0]))) for patcher in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for patcher in both:
        patcher.cleanup()
    assert len(results) == 2


def alternate_with_another_model(comfy, model, another, call, look):
    other, before, inside = opposite(comfy, model, another), states(), []
    for _ in range(2):
        families.replay(spied(model, look), call)
        families.replay(spied(other, lambda: inside.append(states())), call)
        assert states() == before
    held = accumulation_of(other).plan_for(other).flags
    assert all(flags.SETTINGS[name].is_on(state[name]) is value for state in inside for name, value in held.items())


SITUATIONS = {
    "success": succeed,
    "error": fail_with(ValueError("broken")),
    "interrupt": interrupt,
    "out of memory": fail_with(torch.OutOfMemoryError("no memory")),
    "cached node": run_from_a_cached_node,
    "two models": alternate_with_another_model,
    "nested": nest,
    "threads": run_on_threads,
}
CASES = [
    (setting, situation, ("on", "off")[(row + column) % 2], bool((row + column // 2) % 2))
    for row, situation in enumerate(SITUATIONS)
    for column, setting in enumerate(SETTINGS[:3])
]
"""Each setting in each situation, either value and either state outside with each of both."""


@pytest.mark.parametrize(("setting", "situation", "value", "start"), CASES)
def test_set_inside_and_exactly_as_before_outside(comfy, of_dtype, call, ampere, setting, situation, value, start):
    base, another = of_dtype["fp32" if setting == "tf32" else "fp16"]
    with started_with(PARTS[setting], start) as before:
        inside = []
        model = accumulation(comfy, base, **{setting: value})
        assert states() == before, "the node itself changed a flag"
        SITUATIONS[situation](comfy, model, another, call, lambda: inside.append(states()))
        assert states() == before
    on = [flags.SETTINGS[part].is_on(state[part]) for state in inside for part in PARTS[setting]]
    assert set(on) == {value == "on"}
    pairs = [state[part] for state in inside for part in PARTS[setting] if isinstance(state[part], tuple)]
    assert all(pair == (value == "on", True) for pair in pairs), "cuBLAS refuses half products without split-k"


def test_the_sampler_the_text_encoder_and_the_vae_see_the_outside(comfy, wan, models_dir, monkeypatch, ampere):
    from comfy.patcher_extension import WrappersMP
    from comfy.sd import VAE, CLIPType, load_clip
    from comfy.utils import load_torch_file

    tiny_models.sd_vae(models_dir / "vae" / "vae.safetensors")
    tiny_models.clip_l(models_dir / "text_encoders" / "clip.safetensors")
    vae = VAE(sd=load_torch_file(str(models_dir / "vae" / "vae.safetensors")))
    clip = load_clip([str(models_dir / "text_encoders" / "clip.safetensors")], clip_type=CLIPType.SD3)
    seen = {}

    def noted(name, function):
        def run(*args, **kwargs):
            seen[name] = states()
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(vae.first_stage_model, "decode", noted("vae", vae.first_stage_model.decode))
    encoder = clip.cond_stage_model
    monkeypatch.setattr(encoder, "encode_token_weights", noted("text", encoder.encode_token_weights))
    with started_with([FP16_ACCUMULATION], True) as before:
        model = accumulation(comfy, load(comfy, wan), fp16_accumulation="off", tf32="on")
        model = spied(model, lambda: seen.update(model=states()))
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "spy", lambda run, *a, **k: noted("sampler", run)(*a, **k))
        families.sample(model, "wan", steps=1)
        clip.encode_from_tokens(clip.tokenize("a lighthouse"))
        vae.decode(torch.zeros(1, 4, 8, 8))
    assert seen["sampler"] == seen["text"] == seen["vae"] == before
    assert seen["model"][FP16_ACCUMULATION] is False and flags.SETTINGS["tf32_matmul"].is_on(seen["model"]["tf32_matmul"])


@pytest.mark.parametrize(
    ("profile", "compute", "setting", "value", "why"),
    [
        ("sm_86", "bf16", FP16_ACCUMULATION, "on", "acts on fp16 products only"),
        ("sm_86", "fp32", FP16_ACCUMULATION, "auto", "acts on fp16 products only"),
        ("sm_90", "fp16", FP16_ACCUMULATION, "auto", "risk without gain"),
        ("gfx1100", "fp16", FP16_ACCUMULATION, "on", "NVIDIA"),
        ("mps_m1", "fp16", FP16_ACCUMULATION, "auto", "NVIDIA"),
        ("xpu", "fp16", FP16_ACCUMULATION, "on", "NVIDIA"),
        ("cpu", "fp16", FP16_ACCUMULATION, "auto", "NVIDIA"),
        ("sm_75", "fp32", "tf32", "on", "does not have it"),
        ("sm_89", "bf16", "fp8_fast_accumulation", "on", "no layer multiplies in fp8"),
        ("sm_86", "bf16", "fp8_fast_accumulation", "auto", ""),
        ("sm_86", "bf16", "attention", "fp32", "attention runs in fp16 nowhere"),
    ],
)
def test_a_setting_that_cannot_act_says_why(comfy, wan, call, monkeypatch, profile, compute, setting, value, why):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    ours = accumulation(comfy, load(comfy, wan, "as_file", compute), **{setting: value})
    for _ in range(2):
        found = report(comfy, ours)
        reasons = [e["reason"] for e in found["without_effect"] if e["setting"] == f"{setting}={value}"]
        assert len(reasons) == 1 and why in reasons[0]
        assert reasons[0][:80] in " ".join(comfy.run("HalfsafeReport", model=ours)[0].split())
        families.replay(ours, call)


def test_tf32_acts_on_the_layer_that_wan_itself_calls_in_fp32(comfy, wan, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    found = report(comfy, accumulation(comfy, load(comfy, wan, "as_file", "bf16"), tf32="on"))
    assert [layer["name"] for layer in found["layers"] if layer["mode"] == "fp32" and layer["class"] == "Conv3d"] == ["patch_embedding"]
    assert not [e for e in found["without_effect"] if e["setting"] == "tf32=on"]


def test_unchanged_adds_nothing(comfy, wan):
    model = load(comfy, wan)
    ours = accumulation(comfy, model)
    assert ours is not model and ours.wrappers == model.wrappers and ours.attachments.keys() == model.attachments.keys()
    assert report(comfy, ours)["flags"] == report(comfy, model)["flags"]
    accumulation(comfy, model, tf32="on")
    assert ACCUMULATION not in model.attachments and not any(ACCUMULATION in wrappers for wrappers in model.wrappers.values())
