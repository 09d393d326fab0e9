"""Encoders that others break: text that is generated, a device that goes bad, quantized weights, parts a checkpoint lacks."""

import inspect
import math
import types

import comfy.model_management
import comfy.ops
import pytest
import torch
from comfy.sd import CLIP, VAE
from halfsafe.nodes.host.guard import encoders
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE, CLIP_METHODS, VAE_METHODS, guard_clip, guard_vae
from halfsafe.precision.guard.verdicts import NonFinite
from support import tiny_models, tiny_vaes
from support.measures import relative_error
from support.model_files import changed
from support.rows import rotated


def test_every_method_that_computes_is_guarded():
    """Those of ComfyUI's classes that call their module, but for what a guarded method calls itself."""
    calls = ("first_stage_model.", "cond_stage_model.generate", "cond_stage_model.encode_token_weights")
    for kind, guarded in ((VAE, VAE_METHODS), (CLIP, CLIP_METHODS)):
        found = {
            name
            for name, method in vars(kind).items()
            if inspect.isfunction(method) and any(call in inspect.getsource(method) for call in calls)
        }
        assert found - {"__init__", "get_sd", "_decode_tiled_owned", "_encode_tiled_owned"} <= set(guarded), kind


@pytest.fixture(scope="module")
def clip(comfy, models_dir):
    tiny_models.narrow_clip_l(models_dir / "text_encoders" / "others_clip.safetensors")
    return comfy.run(
        "HalfsafeLoadCLIP",
        clip_name1="others_clip.safetensors",
        type="stable_diffusion",
        storage="auto",
        compute="auto",
    )[0]


class Language(torch.nn.Module):
    """A language model as ComfyUI's are called: it chooses tokens by its numbers, in the dtype that the device is asked for."""

    bad_in = (torch.bfloat16,)

    def generate(self, tokens, do_sample=True, max_length=4, top_k=50, **settings):
        from comfy.text_encoders.llama import BaseGenerate

        dtype = torch.bfloat16 if comfy.model_management.should_use_bf16(torch.device("cpu")) else torch.float32
        chosen = []
        for _ in range(max_length):
            logits = torch.linspace(0, 1, 100, dtype=dtype)[None] * (math.nan if dtype in self.bad_in else 1.0)
            chosen.append(
                int(BaseGenerate.sample_token(self, logits, 1.0, top_k, 0.9, 0.0, 1.0, [], None, do_sample=do_sample))
            )
        return chosen


@pytest.fixture
def generating(clip, monkeypatch):
    """The text encoder with a language model that is NaN in bf16, which its device prefers."""
    language = Language()
    monkeypatch.setattr(clip.cond_stage_model, "generate", language.generate, raising=False)
    monkeypatch.setattr(comfy.model_management, "should_use_bf16", lambda *args, **kwargs: True)
    return language


CHOICES = {"top k": {"top_k": 50}, "all": {"top_k": 0}, "no sampling": {"do_sample": False}}


@pytest.mark.parametrize("how", CHOICES)
def test_text_is_generated_again_in_fp32(clip, generating, how):
    guarded = guard_clip(clip, "retry_higher")
    tokens = guarded.generate(clip.tokenize("a"), max_length=4, seed=1, **CHOICES[how])
    log = getattr(guarded, ATTRIBUTE).log
    assert len(tokens) == 4 and log.verdict == "recovered" and log.events[0].to_mode == "fp32"
    if how == "no sampling":
        assert tokens == [99] * 4


@pytest.mark.parametrize(("how", "on_nan"), rotated(CHOICES, ["retry_higher", "stop"], whole=["no sampling"]))
def test_what_no_dtype_generates_is_a_verdict_and_no_error_of_torchs(clip, generating, monkeypatch, on_nan, how):
    monkeypatch.setattr(generating, "bad_in", (torch.bfloat16, torch.float32), raising=False)
    with pytest.raises(NonFinite) as error:
        guard_clip(clip, on_nan).generate(clip.tokenize("a"), seed=1, **CHOICES[how])
    assert error.value.verdict == ("not_precision" if on_nan == "retry_higher" else "stopped")


def test_a_guard_that_reports_lets_text_end_as_without_it(clip, generating):
    guarded = guard_clip(clip, "report")
    assert guarded.generate(clip.tokenize("a"), do_sample=False) == clip.generate(clip.tokenize("a"), do_sample=False)
    assert getattr(guarded, ATTRIBUTE).log.verdict == "stopped"
    with pytest.raises(RuntimeError, match="probability"):
        guarded.generate(clip.tokenize("a"), top_k=0, seed=1)


def test_quantized_weights_are_dequantized_before_anything_is_wider(comfy, monkeypatch):
    """As of an int8 VAE on a device whose product of 8 bits is wrong, in fp32 already."""
    vae = tiny_vaes.build("minimax", torch.float32)
    module = vae.first_stage_model.decoder.x_embedder
    expected = vae.decode(tiny_vaes.latent("minimax"))
    module.quant_format, forward = "int8_tensorwise", type(module).forward
    monkeypatch.setattr(encoders, "is_quantized", lambda one: one is module)
    monkeypatch.setattr(
        encoders,
        "ask_for_plain_products",
        lambda patcher: patcher.add_object_patch("decoder.x_embedder.unpacked", True),
    )
    module.unpacked = False
    module.forward = types.MethodType(lambda self, x: forward(self, x) * (1.0 if self.unpacked else math.nan), module)
    guarded = guard_vae(vae, "retry_higher")
    assert torch.equal(guarded.decode(tiny_vaes.latent("minimax")), expected)
    (event,) = getattr(guarded, ATTRIBUTE).log.events
    assert event.recovered and "dequantized" in event.evidence and (event.from_mode, event.to_mode) == ("fp32", "fp32")
    assert module.unpacked is False or not math.isnan(float(expected.abs().max()))


def test_so_are_those_of_a_text_encoder(comfy, models_dir, monkeypatch):
    tiny_models.narrow_clip_l(models_dir / "text_encoders" / "others_int8.safetensors")
    clip = comfy.run(
        "HalfsafeLoadCLIP",
        clip_name1="others_int8.safetensors",
        type="stable_diffusion",
        storage="int8",
        compute="auto",
    )[0]
    module = clip.cond_stage_model.clip_l.transformer.text_model.encoder.layers[2].mlp.fc1
    expected, forward = clip.encode_from_tokens(clip.tokenize("a")), type(module).forward
    monkeypatch.setattr(module, "_full_precision_mm", False)
    broken = types.MethodType(lambda self, x: forward(self, x) * (1.0 if self._full_precision_mm else math.nan), module)
    monkeypatch.setattr(module, "forward", broken, raising=False)
    guarded = guard_clip(clip, "retry_higher")
    assert relative_error(expected, guarded.encode_from_tokens(guarded.tokenize("a"))) < 0.01
    (event,) = getattr(guarded, ATTRIBUTE).log.events
    assert event.recovered and "dequantized" in event.evidence


def no_vae():
    return VAE(sd={"unknown": torch.zeros(1)})


@pytest.mark.parametrize("goal", ["balanced", "quality"])
@pytest.mark.parametrize("on_nan", ["retry_higher", "off"])
def test_parts_that_a_checkpoint_lacks_are_passed_on_and_the_rest_is_guarded(comfy, wan, clip, caplog, goal, on_nan):
    model, vae = comfy.core["UNETLoader"]().load_unet(wan.name, "default")[0], no_vae()
    settings = {"model": model, "goal": goal, "guard": on_nan}
    _, passed_clip, passed_vae, why = comfy.run("HalfsafeAutoPrecision", clip=None, vae=vae, **settings)
    assert (
        passed_clip is None
        and passed_vae is vae
        and "VAE: The loaded file contains no VAE" in why
        and "contains no text encoder" in why
    )
    _, guarded, none, why = comfy.run("HalfsafeAutoPrecision", clip=clip, **settings)
    assert none is None and "holds no" not in why and hasattr(guarded, ATTRIBUTE) == (on_nan != "off")
    assert (
        comfy.run("HalfsafeGuardVAE", vae=vae, on_nan="stop")[0] is vae
        and comfy.run("HalfsafeGuardVAE", vae=None, on_nan="stop")[0] is None
    )
    assert comfy.run("HalfsafeGuardCLIP", clip=None, on_nan="stop")[0] is None and "none is guarded" in caplog.text


USES = {
    "VAEDecode": lambda node, vae: node.decode(vae, {"samples": torch.zeros(1, 4, 8, 8)}),
    "VAEDecodeTiled": lambda node, vae: node.decode(vae, {"samples": torch.zeros(1, 4, 8, 8)}, 512),
    "VAEEncode": lambda node, vae: node.encode(vae, torch.zeros(1, 64, 64, 3)),
    "VAEEncodeTiled": lambda node, vae: node.encode(vae, torch.zeros(1, 64, 64, 3), 512, 64),
    "VAEEncodeForInpaint": lambda node, vae: node.encode(vae, torch.zeros(1, 64, 64, 3), torch.zeros(1, 64, 64)),
}


@pytest.fixture(scope="module")
def without_encoders(models_dir, wan):
    def inside(tensors: dict) -> None:
        for name in list(tensors):
            tensors[f"model.diffusion_model.{name}"] = tensors.pop(name)

    return changed(wan, models_dir / "checkpoints" / "no_encoders.safetensors", inside)


@pytest.mark.parametrize("use", USES)
def test_a_checkpoint_without_a_vae_is_told_in_comfyuis_words(comfy, without_encoders, use):
    def words(vae) -> str:
        with pytest.raises(Exception) as error:
            USES[use](comfy.core[use](), vae)
        return str(error.value)

    model, _, stock = comfy.core["CheckpointLoaderSimple"]().load_checkpoint(without_encoders.name)
    options = {"storage": "auto", "compute": "auto", "clip_storage": "auto", "vae_dtype": "auto"}
    given = {
        "Load Checkpoint": comfy.run("HalfsafeLoadCheckpoint", ckpt_name=without_encoders.name, **options)[2],
        "Halfsafe": comfy.run("HalfsafeAutoPrecision", model=model, goal="quality", vae=stock)[2],
        "Guard VAE": comfy.run("HalfsafeGuardVAE", vae=stock, on_nan="retry_higher")[0],
    }
    assert "VAE is invalid" in words(stock) or use not in ("VAEDecode", "VAEEncode")
    assert {name: words(vae) for name, vae in given.items()} == dict.fromkeys(given, words(stock))


def test_a_checkpoint_without_a_text_encoder_is_told_in_comfyuis_words(comfy, without_encoders):
    _, clip, _ = comfy.run(
        "HalfsafeLoadCheckpoint",
        ckpt_name=without_encoders.name,
        storage="auto",
        compute="auto",
        clip_storage="auto",
        vae_dtype="auto",
    )
    for given in (clip, comfy.run("HalfsafeGuardCLIP", clip=None, on_nan="stop")[0]):
        with pytest.raises(RuntimeError, match="clip input is invalid: None"):
            comfy.core["CLIPTextEncode"]().encode(given, "a cat")
