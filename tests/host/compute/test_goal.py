"""The one node: what each goal puts on the model, and that the input model stays as it was."""

import json

import pytest
import torch
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.precision.base import flags
from support import tiny_models
from support.families import denoise
from support.measures import relative_error


@pytest.fixture(scope="module")
def model(comfy, models_dir):
    path = tiny_models.wan_overflowing(models_dir / "diffusion_models" / "auto.safetensors")
    return comfy.core["UNETLoader"]().load_unet(path.name, "default")[0]


@pytest.fixture(scope="module")
def reference(comfy, model):
    return denoise(comfy.run("HalfsafeComputeDtype", model=model, compute="fp32", rules=None)[0])


def with_goal(comfy, model, goal, **inputs):
    return comfy.run("HalfsafeAutoPrecision", model=model, goal=goal, **inputs)


@pytest.mark.parametrize(
    ("profile", "goal", "used"),
    [
        ("sm_75", "quality", "fp16_safe"),
        ("sm_86", "quality", "fp16_safe"),
        ("cpu", "quality", "fp32"),
        ("cpu", "balanced", "fp32"),
        ("cpu", "memory", "fp32"),
    ],
)
def test_a_goal_is_carried_out_on_this_model(comfy, model, reference, monkeypatch, profile, goal, used):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    before = denoise(model)
    planned, _, _, why = with_goal(comfy, model, goal)
    overruled = with_goal(comfy, comfy.run("HalfsafeComputeDtype", model=model, compute="fp16", rules=None)[0], goal)[3]
    assert (
        f"model: {used}." in why
        and "was set to" not in why
        and f"Computed in {used}, not in the fp16 that the model was set to." in overruled
    )
    assert relative_error(reference, denoise(planned)) < 2e-3
    assert torch.equal(denoise(model), before)


def test_quality_keeps_sums_exact_while_it_runs_and_speed_asks_for_fast_ones(comfy, model, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    before = {name: flags.state_of(name) for name in flags.SETTINGS}
    requested = {}
    for goal in ("quality", "speed", "balanced"):
        planned = with_goal(comfy, model, goal)[0]
        denoise(planned)
        entries = json.loads(comfy.run("HalfsafeReport", model=planned)[1])["flags"]
        requested[goal] = [
            entries[name]["requested"] for name in ("fp16_accumulation", "reduced_precision_reduction", "tf32")
        ]
    assert requested == {
        "quality": ["off", "off", "off"],
        "speed": ["auto", "unchanged", "on"],
        "balanced": ["unchanged"] * 3,
    }
    assert {name: flags.state_of(name) for name in flags.SETTINGS} == before


def test_quality_gives_a_copy_of_the_vae_that_works_in_fp32(comfy, model, models_dir):
    path = tiny_models.sd_vae(models_dir / "vae" / "auto_vae.safetensors")
    (vae,) = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype="bf16")
    _, _, copy, why = with_goal(comfy, model, "quality", vae=vae)
    assert (copy.vae_dtype, vae.vae_dtype) == (torch.float32, torch.bfloat16) and "VAE: fp32" in why
    assert with_goal(comfy, model, "balanced", vae=vae, guard="off")[2] is vae


def test_the_one_node_guards_what_it_is_given_and_off_leaves_it(comfy, model, models_dir):
    path = tiny_models.sd_vae(models_dir / "vae" / "guarded_vae.safetensors")
    (vae,) = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype="fp32")
    for guard in ("retry_higher", "stop", "report", "off"):
        planned, clip, decoder, _ = with_goal(comfy, model, "balanced", vae=vae, guard=guard, check="off")
        assert (Guard.on(planned).on_nan if Guard.on(planned) else "off") == guard
        assert clip is None and (decoder is vae) == (guard == "off")


def test_rules_come_before_the_goal(comfy, model):
    rules, _ = comfy.run("HalfsafeLayerRules", rules="blocks.0.ffn.0 compute=fp16 stream=same", preset="none")
    planned = with_goal(comfy, model, "quality", rules=rules)[0]
    denoise(planned)
    modes = {
        layer["name"]: layer["mode"] for layer in json.loads(comfy.run("HalfsafeReport", model=planned)[1])["layers"]
    }
    assert modes["blocks.0.ffn.0"] == "fp16" != modes["blocks.0.ffn.2"]
