"""A LoRA before, behind and on both sides of each node that makes a patcher: the result is that of ComfyUI alone in fp32 with the same LoRA.

The error is bounded by that of the same graph without a LoRA, which is what its storage and its arithmetic cost.
"""

from __future__ import annotations

import functools
from pathlib import Path

import folder_paths
import pytest
import torch
from comfy.sd import load_bypass_lora_for_models, load_lora_for_models
from comfy_extras import nodes_hooks
from comfy_extras.nodes_model_merging import ModelMergeSimple
from halfsafe.nodes.host.comfyui.layers import is_quantized
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from halfsafe.nodes.host.load.at_hand import STORAGES_AT_HAND
from halfsafe.precision.base.errors import HalfsafeError
from safetensors.torch import save_file
from support import families, model_files, tiny_models
from support.dynamic_vram import dynamic_vram
from support.families import load
from support.measures import relative_error
from support.rows import rotated

LAYERS = {"blocks.0.ffn.0": (256, 128), "blocks.0.self_attn.q": (128, 128), "blocks.0.cross_attn.o": (128, 128)}
KEPT = {"text_embedding.0": (128, 4096), "time_projection.1": (768, 128), "head.head": (64, 128)}
"""Layers that every storage leaves in 16 bit."""
SIDES = {"before": (1.0, 0.0), "behind": (0.0, 1.0), "both": (0.5, 0.5)}
HELD = [name for name in STORAGES_AT_HAND[1:] if name in held_storages()]


def node(name: str, **inputs):
    return lambda comfy, model: comfy.run(name, model=model, **inputs)[0]


def halfsafe(storage: str = "as loaded", goal: str = "quality", guard: str = "off"):
    return node("HalfsafeAutoPrecision", goal=goal, storage=storage, guard=guard)


def in_turn(*steps):
    return lambda comfy, model: functools.reduce(lambda made, step: step(comfy, made), steps, model)


AT_HAND = {
    **{f"Halfsafe, {storage}": halfsafe(storage) for storage in HELD},
    "Halfsafe, int8, balanced, guarded": halfsafe("int8", "balanced", "retry_higher"),
    "Halfsafe, int8, then int8": in_turn(halfsafe("int8"), halfsafe("int8")),
    "Compute Dtype, then Halfsafe, int8": in_turn(node("HalfsafeComputeDtype", compute="bf16"), halfsafe("int8")),
    "Halfsafe, int8, then Compute Dtype": in_turn(halfsafe("int8"), node("HalfsafeComputeDtype", compute="fp16_safe")),
    "NaN Guard, then Halfsafe, fp8": in_turn(
        node("HalfsafeNaNGuard", on_nan="stop", max_retries=1), halfsafe("fp8_e4m3fn")
    ),
}
SUMS = {
    "fp16_accumulation": "off",
    "reduced_precision_reduction": "off",
    "tf32": "off",
    "fp8_fast_accumulation": "off",
    "attention": "auto",
}
ON_ANY = {
    "Halfsafe": halfsafe(),
    "Halfsafe, speed": halfsafe(goal="speed"),
    "Compute Dtype, bf16": node("HalfsafeComputeDtype", compute="bf16"),
    "Compute Dtype, fp16_safe": node("HalfsafeComputeDtype", compute="fp16_safe"),
    "Compute Dtype, fp8": node("HalfsafeComputeDtype", compute="fp8"),
    "Accumulation": node("HalfsafeAccumulation", **SUMS),
    "NaN Guard": node("HalfsafeNaNGuard", on_nan="retry_higher", max_retries=1),
    "Halfsafe, int8, on what is quantized": halfsafe("int8"),
}
SOURCES = ["ComfyUI, bf16", "ComfyUI, fp8", *(f"ours, {storage}" for storage in HELD)]
GRAPHS = [*rotated(AT_HAND, SOURCES[:1]), *rotated(ON_ANY, SOURCES, whole=("Halfsafe",))]


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def one_block(comfy, models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "beside_nodes.safetensors", dim=128, blocks=1, ffn=256)


@pytest.fixture(scope="module")
def lora():
    return model_files.lora(LAYERS, rank=8, size=0.5)


@pytest.fixture(scope="module")
def exact(one_block):
    return families.stock(one_block, torch.float32)


@pytest.fixture(scope="module")
def captured(exact):
    return families.capture(exact, "wan")


@pytest.fixture(scope="module")
def plain(exact, captured):
    return families.replay(exact, captured)


@pytest.fixture(scope="module")
def right(exact, captured, lora):
    """Strength -> ComfyUI's result."""
    return {one: families.replay(with_lora(exact, lora, one), captured) for one in (1.0, -0.7)}


def with_lora(model, lora, strength: float, add=load_lora_for_models):
    return add(model, None, dict(lora), strength, 0.0)[0] if strength else model


def source(comfy, path, name: str):
    loader, _, storage = name.partition(", ")
    if loader == "ours":
        return load(comfy, path, storage, "bf16")
    import comfy.sd

    return comfy.sd.load_diffusion_model(
        str(path), model_options={"dtype": torch.float8_e4m3fn if storage == "fp8" else torch.bfloat16}
    )


def judged(result: torch.Tensor, right: torch.Tensor, plain: torch.Tensor, floor: float) -> str:
    """What is wrong with a result; "" if nothing is. ``floor``: the error without a LoRA."""
    bound, error, moved = 2 * floor + 0.003, relative_error(right, result), relative_error(plain, right)
    assert moved > 2.5 * bound, f"the LoRA moves the result by {moved:.4f}, which is too little beside {bound:.4f}"
    return f"error {error:.4f}, bound {bound:.4f}, moved {moved:.4f}" if error > bound else ""


@pytest.mark.parametrize(("name", "made"), GRAPHS)
def test_a_lora_acts_wherever_it_stands(comfy, one_block, lora, captured, plain, right, made, name):
    loaded, run = source(comfy, one_block, made), functools.partial((AT_HAND | ON_ANY)[name], comfy)
    floor = relative_error(plain, families.replay(run(loaded), captured))
    wrong = {}
    for side, (before, behind) in SIDES.items():
        begun = run(with_lora(loaded, lora, before))
        result = families.replay(with_lora(begun, lora, behind), captured)
        wrong[side] = judged(result, right[1.0], plain, floor)
        if side == "behind":  # the next prompt: the node's result is cached, the LoRA's strength is another
            families.unload_models()
            other = families.replay(with_lora(begun, lora, -0.7), captured)
            wrong["another strength"] = judged(other, right[-0.7], plain, floor)
    assert not any(wrong.values()), {side: what for side, what in wrong.items() if what}


@pytest.fixture
def at_hand(comfy, one_block):
    """A model that the node Halfsafe quantized, of ComfyUI's loader."""
    return lambda storage, model=None: halfsafe(storage)(comfy, model or source(comfy, one_block, "ComfyUI, bf16"))


@pytest.fixture
def floor(at_hand, plain, captured):
    return lambda storage: relative_error(plain, families.replay(at_hand(storage), captured))


@pytest.fixture
def hooked(models_dir):
    """Conditioning that hooks a LoRA: at 0.7 of its strength, and not before half of the steps."""

    def make(lora, strength: float = 1.0) -> list:
        save_file(lora, str(models_dir / "loras" / "beside_by_hook.safetensors"))
        (hooks,) = nodes_hooks.CreateHookLoraModelOnly().create_hook_model_only("beside_by_hook.safetensors", strength)
        (off,) = nodes_hooks.CreateHookKeyframe().create_hook_keyframe(0.0, 0.0)
        (on,) = nodes_hooks.CreateHookKeyframe().create_hook_keyframe(0.7, 0.5, off)
        (hooks,) = nodes_hooks.SetHookKeyframes().set_hook_keyframes(hooks, on)
        set_on = nodes_hooks.ConditioningSetProperties().set_properties
        return set_on(families.conditioning("wan"), 1.0, "default", hooks=hooks)[0]

    return make


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_lora_of_a_hook_acts_on_a_model_quantized_at_hand(comfy, one_block, at_hand, hooked, exact, lora, storage):
    cond, by_hook = families.conditioning("wan"), hooked(lora)
    model = at_hand(storage, with_lora(source(comfy, one_block, "ComfyUI, bf16"), lora, 0.3))
    expected, without = (
        families.sample(with_lora(exact, lora, 0.3), "wan", cond=one, steps=2) for one in (by_hook, cond)
    )
    floor = relative_error(without, families.sample(model, "wan", cond=cond, steps=2))
    assert not judged(families.sample(model, "wan", cond=by_hook, steps=2), expected, without, floor)
    assert not model.hook_backup and not model.cached_hook_patches


@pytest.mark.parametrize("made", [*(f"ours, {storage}" for storage in HELD), "ComfyUI, bf16"])
def test_a_lora_of_a_hook_acts_on_layers_that_stay_in_16_bit(comfy, one_block, at_hand, hooked, exact, made):
    """Of a model with quantized layers. The next prompt has another strength, and the last one no hook."""
    model = at_hand("int8") if made.startswith("ComfyUI") else source(comfy, one_block, made)
    kept, cond = model_files.lora(KEPT, rank=8, size=0.5), families.conditioning("wan")
    layers = {name: model.get_model_object(f"diffusion_model.{name}") for name in KEPT}
    assert not any(map(is_quantized, layers.values())) and any(map(is_quantized, model.model.modules()))
    before = {name: layer.weight.clone() for name, layer in layers.items()}
    without = families.sample(exact, "wan", cond=cond, steps=2)
    floor = relative_error(without, families.sample(model, "wan", cond=cond, steps=2))
    wrong = {}
    for strength in (1.0, -0.7):
        expected, result = (families.sample(one, "wan", cond=hooked(kept, strength), steps=2) for one in (exact, model))
        wrong[f"strength {strength}"] = judged(result, expected, without, floor)
        changed = [name for name, layer in layers.items() if not torch.equal(layer.weight, before[name])]
        wrong[f"left after strength {strength}"] = ", ".join(changed)
        families.unload_models()
    error = relative_error(without, families.sample(model, "wan", cond=cond, steps=2))
    wrong["no hook"] = f"error {error:.4f}, before the hooks {floor:.4f}" if error > 1.01 * floor else ""
    assert not any(wrong.values()), {what: text for what, text in wrong.items() if text}


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_bypass_lora_acts_behind_and_is_refused_before(
    comfy, one_block, at_hand, floor, captured, lora, plain, right, storage
):
    model = with_lora(at_hand(storage), lora, 1.0, load_bypass_lora_for_models)
    assert not judged(families.replay(model, captured), right[1.0], plain, floor(storage))
    before = with_lora(source(comfy, one_block, "ComfyUI, bf16"), lora, 1.0, load_bypass_lora_for_models)
    with pytest.raises(HalfsafeError, match="storage cannot be changed here: bypass_lora"):
        at_hand(storage, before)


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_merge_and_a_saved_file_have_the_lora_behind(
    comfy, one_block, at_hand, floor, captured, lora, exact, plain, right, storage
):
    model = with_lora(at_hand(storage), lora, 1.0)
    writer = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    (name,) = writer.execute(model, "behind", "as_file", None).args
    path = Path(folder_paths.get_output_directory()) / name
    assert not judged(families.replay(families.stock(path), captured), right[1.0], plain, floor(storage))
    (merged,) = ModelMergeSimple().merge(at_hand(storage), with_lora(exact, lora, 1.0), 0.0)
    assert not judged(families.replay(merged, captured), right[1.0], plain, 2 * floor(storage))


@pytest.mark.parametrize("way", ["a static clone", "another device", "a clone of a clone"])
def test_clones_of_a_model_quantized_at_hand_have_the_lora(
    at_hand, floor, captured, lora, plain, right, monkeypatch, way
):
    model = with_lora(at_hand("int8"), lora, 1.0)
    if way == "a static clone":
        monkeypatch.setattr(model, "is_dynamic", lambda: True)
        clone = model.clone(disable_dynamic=True)
    elif way == "another device":
        clone = model.deepclone_multigpu(new_load_device=torch.device("cpu"))
    else:
        clone = model.clone().clone()
    assert (clone.model is model.model) == (way == "a clone of a clone")
    assert not judged(families.replay(clone, captured), right[1.0], plain, floor("int8"))


@pytest.mark.parametrize("way", ["transferred", "resident"])
@torch.inference_mode()
def test_a_lora_acts_behind_a_model_quantized_at_hand_under_dynamic_vram(
    at_hand, floor, captured, lora, plain, right, way
):
    model = with_lora(at_hand("int8"), lora, 1.0)
    families.replay(model, captured)
    with dynamic_vram(model, way):
        result = families.replay(model, captured)
    assert not judged(result, right[1.0], plain, floor("int8"))


def test_a_model_split_over_several_devices_is_not_quantized_at_hand(comfy, one_block, at_hand):
    """Its clones on the other devices would go on running the weights as they came in."""
    model = source(comfy, one_block, "ComfyUI, bf16").clone()
    model.set_additional_models("multigpu", [model.clone()])
    with pytest.raises(HalfsafeError, match="storage cannot be changed here: MultiGPU"):
        at_hand("int8", model)


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_text_encoders_lora_acts_before_and_behind_its_guard(comfy, models_dir, storage):
    path = tiny_models.narrow_clip_l(models_dir / "text_encoders" / "beside_nodes.safetensors")
    layers = {f"text_model.encoder.layers.{number}.mlp.fc1": (1024, 256) for number in range(4)}
    tensors = model_files.lora(layers, size=0.3)
    named = {name.replace("diffusion_model.", "text_encoders.clip_l.transformer."): it for name, it in tensors.items()}

    def encoder(storage: str):
        return comfy.run(
            "HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage=storage, compute="auto"
        )[0]

    def patched(clip, strength: float):
        return load_lora_for_models(None, clip, dict(named), 0.0, strength)[1] if strength else clip

    def guarded(clip):
        return comfy.run("HalfsafeGuardCLIP", clip=clip, on_nan="stop")[0]

    def encode(clip):
        return clip.encode_from_tokens(clip.tokenize("a lighthouse"))

    exact, clip = encoder("fp32"), encoder(storage)
    plain, right = encode(exact), encode(patched(exact, 1.0))
    floor = relative_error(plain, encode(guarded(clip)))
    for before, behind in SIDES.values():
        assert not judged(encode(patched(guarded(patched(clip, before)), behind)), right, plain, floor), (
            before,
            behind,
        )
