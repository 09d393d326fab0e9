"""Guarded VAEs and text encoders in a real ComfyUI."""

import importlib
import math

import pytest
import torch
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE
from halfsafe.nodes.host.load import encoders as load_encoders
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import load_file, save_file
from support import tiny_models
from support.guarding import core, is_finite
from support.measures import relative_error


@pytest.fixture(autouse=True)
def as_in_comfyui():
    with torch.inference_mode():
        yield


def scaled(path, factors):
    """The VAE file with its tensors of these names multiplied."""
    tensors = load_file(str(path))
    for name, factor in factors.items():
        tensors[name] = tensors[name].float() * factor
    save_file({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}, str(path))
    return path


@pytest.fixture(scope="module")
def files(models_dir):
    """A picture VAE and a video VAE whose decoders overflow in fp16, and an encoder that does."""
    image = tiny_models.sd_vae(models_dir / "vae" / "guard_image.safetensors", dtype=torch.float32)
    scaled(image, {"decoder.mid.block_1.conv2.weight": 2e5, "encoder.mid.block_1.conv2.weight": 2e5})
    video = tiny_models.wan_vae(models_dir / "vae" / "guard_video.safetensors")
    scaled(video, {"decoder.middle.0.residual.6.weight": 2e5})
    return {"image": image, "video": video}


def load(comfy, path, dtype="fp16"):
    return comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype=dtype)[0]


def guard(comfy, vae, on_nan="retry_higher"):
    return comfy.run("HalfsafeGuardVAE", vae=vae, on_nan=on_nan)[0]


def latent(kind):
    shape = (1, 4, 4, 4) if kind == "image" else (1, 16, 2, 4, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


ACTIONS = {
    "decode": lambda vae, kind: vae.decode(latent(kind)),
    "tiled": lambda vae, kind: vae.decode_tiled(latent(kind), tile_x=8, tile_y=8, overlap=2),
}


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_decode_that_overflows_is_made_again(comfy, files, kind, action):
    run = ACTIONS[action]
    reference = run(load(comfy, files[kind], "fp32"), kind)
    original = load(comfy, files[kind])
    broken = run(original, kind)
    assert not is_finite(broken)
    guarded = guard(comfy, original)
    assert relative_error(reference, run(guarded, kind)) < 0.02
    (event,) = getattr(guarded, ATTRIBUTE).log.events
    assert (event.layer, event.from_mode, event.recovered) == ("VAE decode", "fp16", True)
    again = run(original, kind)
    assert torch.equal(torch.isnan(again), torch.isnan(broken)), "the VAE that was given is as it was"
    assert original.vae_dtype == guarded.vae_dtype == torch.float16


def test_an_encode_that_overflows_is_made_again(comfy, files):
    pixels = torch.rand(1, 32, 32, 3, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(5)
    reference = load(comfy, files["image"], "fp32").encode(pixels)
    torch.manual_seed(5)
    assert not is_finite(load(comfy, files["image"]).encode(pixels))
    state = torch.get_rng_state()
    torch.manual_seed(5)
    result = guard(comfy, load(comfy, files["image"])).encode(pixels)
    assert is_finite(result) and relative_error(reference, result) < 0.05
    assert torch.equal(torch.get_rng_state(), state), "a repeat takes no random numbers"


def test_bf16_comes_before_fp32_where_the_device_has_it(comfy, files, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    guarded = guard(comfy, load(comfy, files["image"]))
    guarded.decode(latent("image"))
    assert getattr(guarded, ATTRIBUTE).log.events[0].to_mode == "bf16"
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    guarded.decode(latent("image"))
    assert getattr(guarded, ATTRIBUTE).log.events[1].to_mode == "fp32"


def test_a_clean_decode_is_the_same_and_is_made_once(comfy, models_dir, monkeypatch):
    path = tiny_models.sd_vae(models_dir / "vae" / "guard_clean.safetensors")
    plain = load(comfy, path, "fp32")
    expected, calls = plain.decode(latent("image")), []
    decode = plain.first_stage_model.decode
    monkeypatch.setattr(
        plain.first_stage_model, "decode", lambda *args, **kwargs: calls.append(1) or decode(*args, **kwargs)
    )
    guarded = guard(comfy, plain)
    assert torch.equal(guarded.decode(latent("image")), expected)
    assert len(calls) == 1 and getattr(guarded, ATTRIBUTE).log.verdict == "clean"


def test_inf_is_seen_before_it_is_clamped_to_white(comfy, models_dir, monkeypatch):
    path = tiny_models.sd_vae(models_dir / "vae" / "guard_white.safetensors")
    plain = load(comfy, path)
    decode = plain.first_stage_model.decode

    def overflowing(latents, **kwargs):
        return decode(latents, **kwargs) + (math.inf if latents.dtype == torch.float16 else 0.0)

    monkeypatch.setattr(plain.first_stage_model, "decode", overflowing)
    assert (plain.decode(latent("image")) == 1.0).all(), "ComfyUI shows it as white"
    guarded = guard(comfy, plain)
    assert not (guarded.decode(latent("image")) == 1.0).all()
    assert getattr(guarded, ATTRIBUTE).log.verdict == "recovered"


def test_a_bad_latent_is_not_the_vaes_fault(comfy, files):
    guarded = guard(comfy, load(comfy, files["image"]))
    with pytest.raises(NonFinite, match="latent") as error:
        guarded.decode(latent("image") * math.nan)
    assert error.value.verdict == "bad_input" and "guard the model" in str(error.value)


def test_a_bad_weight_is_named(comfy, models_dir):
    path = tiny_models.sd_vae(models_dir / "vae" / "guard_nan.safetensors")
    tensors = load_file(str(path))
    tensors["decoder.conv_out.weight"][0, 0, 0, 0] = math.nan
    save_file(tensors, str(path))
    vae = comfy.core["VAELoader"]().load_vae("guard_nan.safetensors")[0]
    with pytest.raises(NonFinite, match=r"decoder\.conv_out\.weight") as error:
        guard(comfy, vae).decode(latent("image"))
    assert error.value.verdict == "bad_weights"


def test_stop_and_report(comfy, files):
    vae = load(comfy, files["image"])
    with pytest.raises(NonFinite, match="fp16") as error:
        guard(comfy, vae, "stop").decode(latent("image"))
    assert error.value.verdict == "stopped" and "retry_higher" in str(error.value)
    guarded = guard(comfy, vae, "report")
    assert not is_finite(guarded.decode(latent("image")))
    assert len(getattr(guarded, ATTRIBUTE).log.events) == 1


@pytest.fixture(scope="module")
def clip(comfy, models_dir):
    tiny_models.narrow_clip_l(models_dir / "text_encoders" / "guard_clip.safetensors")
    return comfy.run(
        "HalfsafeLoadCLIP", clip_name1="guard_clip.safetensors", type="stable_diffusion", storage="auto", compute="auto"
    )[0]


def encode(clip, text="a black image"):
    return clip.encode_from_tokens_scheduled(clip.tokenize(text))


def guard_clip(comfy, clip, on_nan="retry_higher"):
    return comfy.run("HalfsafeGuardCLIP", clip=clip, on_nan=on_nan)[0]


@pytest.fixture
def in_half(clip, monkeypatch):
    """The encoder as another pack runs it: fp16 activations that overflow, unless it was told to compute in fp32."""
    model = clip.cond_stage_model
    encode_weights = type(model).encode_token_weights

    def run(tokens):
        cond, *rest = encode_weights(model, tokens)
        half = getattr(model, "manual_cast_dtype", torch.float16) != torch.float32
        return ((cond * 1e6).half().float() / 1e6 if half else cond, *rest)

    monkeypatch.setattr(model, "encode_token_weights", run)
    clone = clip.clone()
    clone.patcher.set_model_compute_dtype(torch.float16)
    return clone


def test_a_conditioning_that_overflows_is_made_again(comfy, clip, in_half):
    expected = encode(clip)[0][0]
    assert not is_finite(encode(in_half)[0][0])
    guarded = guard_clip(comfy, in_half)
    assert torch.equal(encode(guarded)[0][0], expected)
    assert getattr(guarded, ATTRIBUTE).log.verdict == "recovered"


def test_a_clone_of_a_guarded_encoder_is_guarded(comfy, in_half):
    guarded = guard_clip(comfy, in_half).clone()
    guarded.clip_layer(-2)
    assert is_finite(encode(guarded)[0][0])


def test_a_clean_conditioning_is_the_same(comfy, clip):
    for (expected, _), (cond, _) in zip(encode(clip), encode(guard_clip(comfy, clip)), strict=True):
        assert torch.equal(cond, expected)


def test_an_embedding_with_nan_is_bad_input(comfy, clip):
    tokens = clip.tokenize("a")
    name = next(iter(tokens))
    tokens[name][0][1] = (torch.full((256,), math.nan), 1.0)
    with pytest.raises(NonFinite, match="textual inversion") as error:
        guard_clip(comfy, clip).encode_from_tokens_scheduled(tokens)
    assert error.value.verdict == "bad_input"


def test_an_encoder_with_nan_is_bad_weights(comfy, clip):
    weight = clip.cond_stage_model.clip_l.transformer.text_model.encoder.layers[3].mlp.fc1.weight
    with torch.no_grad():
        kept, weight[0, 0] = weight[0, 0].clone(), math.nan
    try:
        with pytest.raises(NonFinite, match=r"layers\.3\.mlp\.fc1\.weight") as error:
            encode(guard_clip(comfy, clip))
    finally:
        with torch.no_grad():
            weight[0, 0] = kept
    assert error.value.verdict == "bad_weights"


def small_text_model(config: dict, layers: int) -> dict[str, torch.Tensor]:
    """The weights of a CLIP text model of a width of 64."""
    from comfy.clip_model import CLIPTextModel

    fixed = {"hidden_act": "gelu", "max_position_embeddings": 77, "eos_token_id": 49407, "num_hidden_layers": layers}
    shapes = tiny_models.shapes_of(tiny_models.on_meta(CLIPTextModel, config_dict=config | fixed))
    return dict(tiny_models.tensors_of_shapes(shapes, torch.float16, layers))


@pytest.fixture(scope="module")
def two_encoders(comfy, models_dir):
    """SDXL's CLIP-L and CLIP-G, narrow; ComfyUI tells CLIP-G by its layer 30."""
    config = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "projection_dim": 64}
    options = load_encoders._options
    small = {"clip_l_model_config": config, "clip_g_model_config": config}
    names = ["guard_small_l.safetensors", "guard_small_g.safetensors"]
    for name, layers in zip(names, (12, 32), strict=True):
        save_file(small_text_model(config, layers), models_dir / "text_encoders" / name)
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(load_encoders, "_options", lambda *args: options(*args) | small)
        long_clip = core("comfy.text_encoders.long_clipl")
        patch.setattr(long_clip, "model_options_long_clip", lambda tensors, data, options: (data, options))
        return comfy.run(
            "HalfsafeLoadCLIP", clip_name1=names[0], clip_name2=names[1], type="sdxl", storage="int8", compute="auto"
        )[0]


@pytest.mark.parametrize("part", [pytest.param("clip_l", marks=pytest.mark.release), "clip_g"])
def test_of_two_encoders_the_one_that_overflows_is_named_and_widened_alone(comfy, two_encoders, part):
    (expected, given), model = encode(two_encoders)[0], two_encoders.cond_stage_model
    layer = model.get_submodule(f"{part}.transformer.text_model.encoder.layers.5.mlp.fc2")

    def in_half(module, args, result):
        return (
            result
            if getattr(model, "manual_cast_dtype", None) == torch.float32
            else (result * 1e7).half().float() / 1e7
        )

    half = two_encoders.clone()
    half.patcher.set_model_compute_dtype(torch.float16)
    hook = layer.register_forward_hook(in_half)
    try:
        cured, rest = encode(guard_clip(comfy, half))[0]
        raw, _ = encode(guard_clip(comfy, half, "report"))[0]
        with pytest.raises(NonFinite, match=rf"Inf, first in {part}\..*layers\.5.*fp32 activations") as error:
            encode(guard_clip(comfy, half, "stop"))
    finally:
        hook.remove()
    other = slice(64, None) if part == "clip_l" else slice(64)
    assert torch.equal(cured, expected) and torch.equal(rest["pooled_output"], given["pooled_output"])
    assert torch.equal(raw[..., other], expected[..., other]) and not is_finite(raw)
    assert error.value.verdict == "stopped"


def test_no_tile_or_decode_is_advised_for_a_text_encoder(comfy, clip):
    layer = clip.cond_stage_model.clip_l.transformer.text_model.encoder.layers[3].mlp.fc1
    hook = layer.register_forward_hook(lambda module, args, result: result * math.inf)
    try:
        with pytest.raises(NonFinite, match=r"not_precision\. .*LoRAs") as error:
            encode(guard_clip(comfy, clip))
    finally:
        hook.remove()
    assert "tile" not in str(error.value) and "decode" not in str(error.value)


def check(comfy, value, on_nan="report"):
    return comfy.run("HalfsafeCheckFinite", value=value, on_nan=on_nan)


def test_check_finite(comfy):
    good = {"samples": torch.zeros(1, 4, 8, 8)}
    assert check(comfy, good)[0] is good and check(comfy, good)[1] is True
    image = torch.zeros(2, 8, 8, 3)
    image[1, 0, 0, 0] = math.nan
    value, finite, text = check(comfy, image)
    assert value is image and finite is False and "batch rows 1" in text
    with pytest.raises(NonFinite, match="batch rows 1"):
        check(comfy, image, "stop")
    with pytest.raises(NonFinite, match="pooled_output"):
        check(comfy, [[torch.zeros(1, 2, 8), {"pooled_output": torch.full((1, 8), math.inf)}]], "stop")


def test_check_finite_refuses_what_it_cannot_look_into(comfy, files):
    """The page refuses the link; a prompt over the API does not."""
    with pytest.raises(HalfsafeError, match="VAE"):
        check(comfy, load(comfy, files["image"]))


def test_the_guarded_vae_is_still_a_vae(comfy, files):
    vae = load(comfy, files["image"])
    assert isinstance(guard(comfy, vae), importlib.import_module("comfy.sd").VAE)
    assert guard(comfy, guard(comfy, vae)).decode(latent("image")).shape == (1, 32, 32, 3)


REPEAT_RAISES = {
    "a dtype": lambda: RuntimeError("mat1 and mat2 must have the same dtype, but got Float and Half"),
    "no memory": lambda: torch.OutOfMemoryError("CUDA out of memory"),
    "an interrupt": lambda: core("comfy.model_management").InterruptProcessingException(),
}


@pytest.mark.parametrize(
    ("kind", "error"),
    [(kind, error) for kind in ("VAE", "CLIP") for error in REPEAT_RAISES if (kind, error) != ("VAE", "no memory")],
)
def test_a_repeat_that_raises_is_no_recovery(comfy, files, in_half, monkeypatch, kind, error):
    """Without memory for a repeat of a VAE ComfyUI decodes in tiles."""
    raised, wide = REPEAT_RAISES[error](), []
    if kind == "VAE":
        model, run = guard(comfy, load(comfy, files["image"])), lambda one: one.decode(latent("image"))
        owner, name = model.first_stage_model, "decode"
    else:
        model, run = guard_clip(comfy, in_half), lambda one: encode(one)[0][0]
        owner, name = in_half.cond_stage_model, "encode_token_weights"
    own = getattr(owner, name)

    def once(*args, **kwargs):
        wide.append(1)
        if len(wide) == 2:
            raise raised
        return own(*args, **kwargs)

    monkeypatch.setattr(owner, name, once)
    if error == "an interrupt":
        with pytest.raises(type(raised)):
            run(model)
    else:
        assert not is_finite(run(model))
    log = getattr(model, ATTRIBUTE).log
    assert log.verdict == ("clean" if error == "an interrupt" else "stopped")
    assert [str(raised) in event.evidence or "memory" in log.advice for event in log.events] == [True] * len(log.events)
    assert is_finite(run(model)), "the next call is repaired"


@pytest.mark.parametrize("on_nan", ["retry_higher", "report"])
def test_nan_in_one_latent_is_not_blamed_for_the_overflow_of_the_others(comfy, files, on_nan):
    batch = torch.cat([latent("image"), latent("image")])
    expected = load(comfy, files["image"], "fp32").decode(batch)
    batch[1] = math.nan
    vae = guard(comfy, load(comfy, files["image"]), on_nan)
    result = vae.decode(batch)
    events = getattr(vae, ATTRIBUTE).log.events
    assert (events[0].kind, events[0].batch_rows) == ("input", [1])
    if on_nan == "retry_higher":
        assert relative_error(expected[0], result[0]) < 0.02 and not is_finite(result[1])
        assert events[1].recovered and len(events) == 2
