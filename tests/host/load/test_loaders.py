"""The loader and saver nodes in a real ComfyUI: what they load, what it computes, what stock nodes make of it."""

import logging

import pytest
import torch
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.plan.rules import rules_from
from support import dialects, model_files, tiny_models
from support.families import denoise
from support.measures import functions_run, relative_error
from support.rows import the_rest_before_a_release


@pytest.fixture(scope="module")
def reference(comfy, wan):
    (model,) = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="fp32", compute="fp32")
    return denoise(model)


@pytest.mark.parametrize(
    ("storage", "compute", "bound"),
    [
        ("fp32", "fp32", 1e-6),
        ("auto", "auto", 0.02),
        ("as_file", "bf16", 0.02),
        ("fp16", "fp16", 0.005),
        ("fp8_e4m3fn", "fp32", 0.06),
        ("fp8_e4m3fn", "bf16", 0.06),
        ("fp8_e5m2", "bf16", 0.12),
    ],
)
def test_every_storage_gives_the_picture(comfy, wan, reference, storage, compute, bound):
    (model,) = comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage=storage, compute=compute)
    assert relative_error(reference, denoise(model)) < bound


def test_what_comfyui_says_of_a_model_is_said_once(comfy, wan, caplog):
    caplog.set_level(logging.INFO)
    comfy.run("HalfsafeLoadDiffusionModel", model_name=wan.name, storage="as_file", compute="bf16")
    assert sum("model weight dtype" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(
    ("held", "storage", "most"),
    the_rest_before_a_release(
        [("int8", "as_file", 3.7), ("bf16", "fp8_e4m3fn", 4.2)],
        [("fp8_e4m3fn", "as_file", 3.6), ("bf16", "int8", 4.3)],
    ),
)
def test_a_load_runs_at_most_so_many_functions_for_one_of_comfyuis(comfy, models_dir, held, storage, most):
    """With these a model of 1,300 tensors takes 0.1 to 0.3 s of Python, by CPU, more than ComfyUI takes for the file."""
    path = tiny_models.wan(
        models_dir / "diffusion_models" / "functions.safetensors", dim=128, ffn=256, blocks=12, text_dim=256
    )
    if held != "bf16":
        convert_file(path, path := path.with_stem(f"functions_{held}"), held, rules_from())
    ours = functions_run(
        lambda: comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, storage=storage, compute="bf16")
    )["call"]
    assert (
        ours
        <= most
        * functions_run(
            lambda: comfy.core["UNETLoader"]().load_unet(path.name, storage if storage == "fp8_e4m3fn" else "default")
        )["call"]
    )


@pytest.fixture(scope="module")
def checkpoint(models_dir):
    return tiny_models.sd15_checkpoint(models_dir / "checkpoints" / "sd15.safetensors", layers=2)


def picture(model, clip, vae):
    """A picture made by stock nodes, and the latent it was decoded from."""
    import nodes

    (positive,) = nodes.CLIPTextEncode().encode(clip, "a lighthouse in a storm")
    (empty,) = nodes.EmptyLatentImage().generate(64, 64, 1)
    settings = {"seed": 1, "steps": 2, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    (latent,) = nodes.KSampler().sample(model, positive=positive, negative=positive, latent_image=empty, **settings)
    return nodes.VAEDecode().decode(vae, latent)[0], latent["samples"]


@pytest.fixture(scope="module")
def stock_picture(comfy, checkpoint):
    model, clip, vae = comfy.core["CheckpointLoaderSimple"]().load_checkpoint(checkpoint.name)[:3]
    model.set_model_compute_dtype(torch.float32)
    return picture(model, clip, vae)


@pytest.mark.parametrize(
    ("storage", "clip_storage", "vae_dtype", "bound"),
    [
        ("as_file", "as_file", "fp32", 1e-3),
        ("fp8_e4m3fn", "auto", "fp32", 0.05),
        ("fp8_e4m3fn", "fp8_e4m3fn", "bf16", 0.05),
    ],
)
def test_full_checkpoint_makes_the_picture(comfy, checkpoint, stock_picture, storage, clip_storage, vae_dtype, bound):
    settings = {"storage": storage, "compute": "fp32", "clip_storage": clip_storage, "vae_dtype": vae_dtype}
    model, clip, vae = comfy.run("HalfsafeLoadCheckpoint", ckpt_name=checkpoint.name, **settings)
    image, latent = picture(model, clip, vae)
    assert relative_error(stock_picture[1], latent) < bound
    assert relative_error(stock_picture[0], image) < bound
    assert {"fp8_e4m3fn": "fp8_e4m3fn", "as_file": "fp16", "auto": "fp16"}[clip_storage] in storages(clip.patcher.model)
    assert vae.vae_dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[vae_dtype]


def storages(model):
    from halfsafe.nodes.host.comfyui.model_facts import storage_of

    return {storage_of(parameter) for parameter in model.parameters()}


def test_checkpoint_without_encoder_and_vae_gives_what_comfyui_gives(comfy, checkpoint, models_dir):
    def only_the_unet(tensors):
        for name in [name for name in tensors if not name.startswith("model.diffusion_model.")]:
            del tensors[name]

    path = model_files.changed(checkpoint, models_dir / "checkpoints" / "unet-only.safetensors", only_the_unet)
    settings = {"storage": "auto", "compute": "auto", "clip_storage": "auto", "vae_dtype": "auto"}
    model, clip, vae = comfy.run("HalfsafeLoadCheckpoint", ckpt_name=path.name, **settings)
    assert model is not None
    assert clip is None and vae.first_stage_model is None


@pytest.fixture(scope="module")
def clip_file(models_dir):
    return tiny_models.clip_l(models_dir / "text_encoders" / "clip_l.safetensors")


def conditioning(clip):
    return clip.encode_from_tokens(clip.tokenize("a lighthouse in a storm"), return_pooled=True)


@pytest.fixture(scope="module")
def stock_conditioning(comfy, clip_file):
    return conditioning(comfy.core["CLIPLoader"]().load_clip(clip_file.name, "stable_diffusion")[0])


def load_clip(comfy, path, storage):
    settings = {"type": "stable_diffusion", "storage": storage, "compute": "auto"}
    return comfy.run("HalfsafeLoadCLIP", clip_name1=path.name, **settings)[0]


@pytest.mark.parametrize(("storage", "held"), [("auto", "fp16"), ("as_file", "fp16"), ("fp32", "fp32")])
def test_text_encoder_gives_the_conditioning(comfy, clip_file, stock_conditioning, storage, held):
    clip = load_clip(comfy, clip_file, storage)
    for wanted, got in zip(stock_conditioning, conditioning(clip), strict=True):
        assert relative_error(wanted, got) < 1e-6
    assert held in storages(clip.patcher.model)


def test_text_encoder_in_fp8_is_at_the_format_s_floor(comfy, clip_file, stock_conditioning):
    def quantize(tensors):
        for name in [name for name in tensors if "layers." in name and tensors[name].dim() == 2]:
            data, scale = dialects.per_tensor(tensors[name])
            tensors[name] = (data.float() * scale).half()

    rounded = model_files.changed(clip_file, clip_file.with_name("rounded.safetensors"), quantize)
    floor = conditioning(comfy.core["CLIPLoader"]().load_clip(rounded.name, "stable_diffusion")[0])
    clip = load_clip(comfy, clip_file, "fp8_e4m3fn")
    for wanted, lowest, got in zip(stock_conditioning, floor, conditioning(clip), strict=True):
        assert relative_error(wanted, got) < 1.1 * relative_error(wanted, lowest)
    assert "fp8_e4m3fn" in storages(clip.patcher.model)
    assert "fp8_e4m3fn" not in storages(clip.patcher.model.clip_l.transformer.text_model.embeddings)


@pytest.mark.parametrize(("name", "shape"), [("sd_vae", (1, 4, 4, 4)), ("wan_vae", (1, 16, 1, 4, 4))])
@pytest.mark.parametrize(("dtype", "bound"), [("auto", 1e-6), ("fp32", 1e-6), ("bf16", 0.05)])
def test_vae_decodes_the_picture(comfy, models_dir, name, shape, dtype, bound):
    path = getattr(tiny_models, name)(models_dir / "vae" / f"{name}.safetensors")
    latent = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = comfy.core["VAELoader"]().load_vae(path.name)[0].decode(latent)
    (vae,) = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype=dtype)
    error = relative_error(wanted, vae.decode(latent))
    assert error < bound
    assert dtype != "bf16" or error > 1e-4, "bf16 changed nothing"


@pytest.mark.parametrize(("storage", "compute"), [("fp16", "fp32"), ("auto", "fp16_safe")])
def test_a_weight_beyond_fp16_is_not_held_in_fp16(comfy, models_dir, storage, compute):
    path = tiny_models.wan(models_dir / "diffusion_models" / "large.safetensors", scale={"blocks.0.ffn.2.weight": 3e6})
    reference = denoise(
        comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, storage="as_file", compute="fp32")[0]
    )
    (model,) = comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, storage=storage, compute=compute)
    assert relative_error(reference, denoise(model)) < 0.005
