"""The pack's usual chains of nodes among ComfyUI's own nodes: every result against fp32 of the same setup."""

import math

import pytest
import torch
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import load_file, save_file
from support import families, model_files, tiny_models
from support.families import load
from support.guarding import core, guarded, is_finite, left_on, sample
from support.measures import relative_error
from support.rows import the_rest_before_a_release
from support.summing import accumulation, states

LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.1.ffn.2": (256, 1024), "blocks.1.self_attn.v": (256, 256)}
BOUND = 0.01
pytestmark = pytest.mark.usefixtures("ampere")


@pytest.fixture(scope="module")
def clean(models_dir):
    """Another model, with other weights."""
    return tiny_models.wan(models_dir / "diffusion_models" / "interplay_clean.safetensors", seed=3)


@pytest.fixture(scope="module")
def lora(models_dir):
    save_file(model_files.lora(LAYERS, size=30.0), str(models_dir / "loras" / "interplay.safetensors"))
    return "interplay.safetensors"


STACKS = {"fp8 stored, fp16_safe": ("fp8_e4m3fn", "fp16_safe"), "fp16, guarded": ("fp16", "fp16")}
stacks = pytest.mark.parametrize("stack", STACKS)


def through_the_nodes(comfy, model):
    """Accumulation and NaN Guard on a loaded model."""
    return guarded(comfy, accumulation(comfy, model, fp16_accumulation="auto", attention="auto"))


def pair(comfy, path, stack):
    """The same stored weights computed in fp32, and through the pack's usual nodes."""
    storage, compute = STACKS[stack]
    return load(comfy, path, storage, "fp32"), through_the_nodes(comfy, load(comfy, path, storage, compute))


@pytest.mark.parametrize(("stack", "order"), zip(STACKS, ("before", "after"), strict=True))
def test_a_lora_of_the_core_node(comfy, overflowing, lora, stack, order):
    def with_lora(model):
        return comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, lora, 1.0)[0]

    storage, compute = STACKS[stack]
    plain = load(comfy, overflowing, storage, "fp32")
    expected = families.sample(with_lora(plain), "wan")
    loaded = load(comfy, overflowing, storage, compute)
    model = (
        with_lora(through_the_nodes(comfy, loaded)) if order == "after" else through_the_nodes(comfy, with_lora(loaded))
    )
    result = families.sample(model, "wan")
    assert relative_error(families.sample(plain, "wan"), expected) > 5 * BOUND, "the LoRA acts"
    assert relative_error(expected, result) < BOUND
    assert torch.equal(families.sample(model, "wan"), result) or stack == "fp16, guarded"


@stacks
def test_a_lora_with_nan_is_named(comfy, clean, models_dir, stack):
    tensors = model_files.lora(LAYERS, size=0.1)
    tensors["diffusion_model.blocks.1.ffn.2.lora_B.weight"][3] = math.nan
    save_file(tensors, str(models_dir / "loras" / "interplay_nan.safetensors"))
    _, model = pair(comfy, clean, stack)
    broken = comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, "interplay_nan.safetensors", 1.0)[0]
    with pytest.raises(NonFinite) as raised:
        families.sample(broken, "wan")
    assert raised.value.verdict == "bad_weights"
    assert "blocks.1.ffn.2" in str(raised.value)
    assert is_finite(families.sample(model, "wan")), "the model without it is as it was"


@pytest.fixture(scope="module")
def control(models_dir):
    """ComfyUI's ControlNet for Stable Diffusion 1.5, with the one level of the small UNet."""
    module = tiny_models.on_meta(
        core("comfy.cldm.cldm").ControlNet,
        **{key: value for key, value in tiny_models.sd15_unet_config().items() if key not in ("out_channels",)},
        hint_channels=3,
    )
    path = tiny_models.write_shapes(
        models_dir / "controlnet" / "control.safetensors", tiny_models.shapes_of(module), torch.float16, 1
    )
    return path.name


@pytest.mark.parametrize(("stack", "strength"), zip(STACKS, (1.0, 1e5), strict=True))
def test_a_controlnet(comfy, models_dir, control, stack, strength):
    """ComfyUI's own ControlNet on the UNet; at the higher strength its outputs pass fp16's range."""
    path = tiny_models.sd15_unet(models_dir / "diffusion_models" / "interplay_sd15.safetensors")
    net = comfy.core["ControlNetLoader"]().load_controlnet(control)[0]
    picture = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(1))
    text = torch.randn(2, 1, 77, 768, generator=torch.Generator().manual_seed(2))
    conds = [[[row, {}]] for row in text]
    controlled = comfy.core["ControlNetApplyAdvanced"]().apply_controlnet(*conds, net, picture, strength, 0.0, 1.0)
    reference, model = pair(comfy, path, stack)
    expected = sample(reference, *controlled)
    assert relative_error(sample(reference, *conds), expected) > 5 * BOUND, "the ControlNet acts"
    for _ in range(2):
        assert relative_error(expected, sample(model, *controlled)) < BOUND


def scheduled(comfy, lora, cond, start=0.5):
    """The conditioning with a LoRA by hook, on from a part of the steps, as ComfyUI's nodes make it."""
    nodes = core("comfy_extras.nodes_hooks")
    (hooks,) = nodes.CreateHookLoraModelOnly().create_hook_model_only(lora, 1.0)
    (off,) = nodes.CreateHookKeyframe().create_hook_keyframe(0.0, 0.0)
    (on,) = nodes.CreateHookKeyframe().create_hook_keyframe(1.0, start, off)
    (hooks,) = nodes.SetHookKeyframes().set_hook_keyframes(hooks, on)
    return nodes.ConditioningSetProperties().set_properties(cond, 1.0, "default", hooks=hooks)[0]


@pytest.mark.parametrize(("storage", "compute"), [("fp16", "fp16"), ("fp16", "fp16_safe"), ("int8", "auto")])
def test_a_scheduled_lora_by_hook(comfy, overflowing, lora, storage, compute):
    cond = families.conditioning("wan")
    reference = load(comfy, overflowing, storage, "fp32")
    model = through_the_nodes(comfy, load(comfy, overflowing, storage, compute))
    expected = sample(reference, scheduled(comfy, lora, cond), cfg=1.0, steps=4)
    without = sample(reference, cond, cfg=1.0, steps=4)
    assert relative_error(without, expected) > 2 * BOUND, "the LoRA acts"
    for _ in range(2):
        assert relative_error(expected, sample(model, scheduled(comfy, lora, cond), cfg=1.0, steps=4)) < BOUND
    assert relative_error(without, sample(model, cond, cfg=1.0, steps=4)) < BOUND, "and is gone afterwards"


@pytest.fixture(scope="module")
def vaes(models_dir):
    """A picture VAE and a video VAE whose decoders overflow in fp16."""
    made = {
        "image": (
            tiny_models.sd_vae(models_dir / "vae" / "interplay_image.safetensors"),
            "decoder.mid.block_1.conv2.weight",
        ),
        "video": (
            tiny_models.wan_vae(models_dir / "vae" / "interplay_video.safetensors"),
            "decoder.middle.0.residual.6.weight",
        ),
    }
    for path, name in made.values():
        tensors = load_file(str(path))
        tensors[name] = tensors[name].float() * 2e5
        save_file({key: tensor.to(torch.bfloat16) for key, tensor in tensors.items()}, str(path))
    return {kind: path for kind, (path, _) in made.items()}


LATENTS = {"image": (2, 4, 8, 8), "video": (1, 16, 3, 4, 8)}


def interrupting(module, at: int = 1):
    """Press ComfyUI's Cancel when the module runs for the given time."""
    ran = []

    def press(*_):
        ran.append(1)
        if len(ran) == at:
            core("comfy.model_management").interrupt_current_processing()

    return module.register_forward_pre_hook(press)


CANCELLED = list(zip([*STACKS] * 2, (1, 2, 3, 5), strict=True))


@pytest.mark.parametrize(("stack", "at"), the_rest_before_a_release(CANCELLED[1:3], CANCELLED))
def test_cancel_in_a_step(comfy, overflowing, stack, at):
    """In the first call, in each repeat of the guard, in a later call."""
    reference, model = pair(comfy, overflowing, stack)
    families.sample(reference, "wan", steps=1)
    families.sample(through_the_nodes(comfy, load(comfy, overflowing, *STACKS[stack])), "wan", steps=1)
    families.sample(model, "wan", steps=1)
    _, model = pair(comfy, overflowing, stack)
    core("comfy.model_management").load_models_gpu([model])
    modules, flags, cast = left_on(model.model), states(), model.model.manual_cast_dtype
    hook = interrupting(model.model.diffusion_model.blocks[1].ffn[0], at)
    with pytest.raises(core("comfy.model_management").InterruptProcessingException):
        families.sample(model, "wan", steps=6)
    hook.remove()
    assert (left_on(model.model), states(), model.model.manual_cast_dtype) == (modules, flags, cast)
    assert not core("comfy.model_management").processing_interrupted()
    assert relative_error(families.sample(reference, "wan"), families.sample(model, "wan")) < BOUND


@pytest.mark.slow
@pytest.mark.parametrize("kind", LATENTS)
@pytest.mark.parametrize("at", [1, 2])
def test_cancel_in_a_decode(comfy, vaes, kind, at):
    """In the first decode and in the repeat."""
    latent = torch.randn(LATENTS[kind], generator=torch.Generator().manual_seed(3))[..., :4, :4]
    half = comfy.run("HalfsafeLoadVAE", vae_name=vaes[kind].name, dtype="fp16")[0]
    vae = comfy.run("HalfsafeGuardVAE", vae=half, on_nan="retry_higher")[0]
    with torch.inference_mode():
        expected = vae.decode(latent)
        module, flags = vae.first_stage_model.decoder, states()
        modules = left_on(module)
        hooks = dict(vae.patcher.object_patches)
        per_decode = 1 if kind == "image" else LATENTS[kind][2]
        hook = interrupting(module, 1 + (at - 1) * per_decode)
        with pytest.raises(core("comfy.model_management").InterruptProcessingException):
            vae.decode(latent)
        hook.remove()
        assert states() == flags and vae.vae_dtype == half.vae_dtype == torch.float16
        assert torch.equal(vae.decode(latent), expected)
        assert left_on(module) == modules
        assert vae.patcher.object_patches == hooks


@pytest.mark.parametrize("storage", ["as_file", "fp8_e4m3fn"])
def test_cancel_while_loading(comfy, overflowing, storage, monkeypatch):
    """Pressed at the first weight and half way; nothing is left behind and the next load is whole."""
    management = core("comfy.model_management")
    expected, flags = families.sample(load(comfy, overflowing, storage, "fp32"), "wan", steps=1), states()
    for at in (1, 20):
        seen = []

        def check(seen=seen, at=at, check=management.throw_exception_if_processing_interrupted):
            seen.append(1)
            if len(seen) == at:
                management.interrupt_current_processing()
            check()

        with monkeypatch.context() as patch:
            patch.setattr(management, "throw_exception_if_processing_interrupted", check)
            with pytest.raises(management.InterruptProcessingException):
                load(comfy, overflowing, storage, "fp32")
        assert not management.processing_interrupted()
        assert states() == flags
    assert torch.equal(families.sample(load(comfy, overflowing, storage, "fp32"), "wan", steps=1), expected)
