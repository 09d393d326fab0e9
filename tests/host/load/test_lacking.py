"""Files that lack a tensor: refused by name by every loader, or told where the model does without; nothing computes on what was in memory."""

import contextlib

import pytest
import torch
from halfsafe.nodes.host.load.lacking import named_if_lacking
from halfsafe.nodes.host.reporting.report import report_of
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.plan.choice import ATTACHMENT
from safetensors import safe_open
from safetensors.torch import save_file
from support import control_files, families, model_files, rare_families, tiny_models
from support.mapped_loading import mapped_loading

SETTINGS = {"compute": "auto"}
OF_WAN = [
    ("blocks.0.ffn.0.weight", "fp8_e4m3fn"), ("blocks.0.ffn.0.bias", "as_file"), ("blocks.0.modulation", "int8"),
    ("blocks.1.norm3.weight", "bf16"), ("head.head.weight", "fp16"), ("patch_embedding.bias", "fp32"), ("time_embedding.0.weight", "int8"),
]  # fmt: skip


@pytest.fixture(params=[contextlib.nullcontext, mapped_loading], ids=["copied", "dynamic VRAM"])
def loading(request):
    """ComfyUI loads as it does without dynamic VRAM, and as with it: a Linear is made without weights then, and one that stays without gets zeros."""
    return request.param()


def without(source, path, name):
    path.parent.mkdir(parents=True, exist_ok=True)
    return model_files.changed(source, path, lambda tensors: tensors.pop(name)).name


def refused(path, name):
    return pytest.raises(CheckpointError, match=rf"{path}.* lacks .*{name.split('.')[-2]}.*Download it again")


@pytest.mark.parametrize(("name", "storage"), OF_WAN)
def test_a_diffusion_model(comfy, wan, models_dir, loading, name, storage):
    path = without(wan, models_dir / "diffusion_models" / "lacking.safetensors", name)
    with loading, refused(path, name) as refusal:
        families.load(comfy, models_dir / "diffusion_models" / path, storage, "auto")
    assert refusal.match(f"lacks '?{name}'?, (without which|which ComfyUI)"), "and nothing that the file has"


@pytest.fixture(scope="module")
def checkpoint(models_dir):
    return tiny_models.sd15_checkpoint(models_dir / "checkpoints" / "whole_for_lacking.safetensors", layers=2)


@pytest.mark.parametrize(
    ("name", "storage", "clip_storage"),
    [
        ("model.diffusion_model.time_embed.0.bias", "as_file", "as_file"), ("model.diffusion_model.out.0.weight", "fp8_e4m3fn", "as_file"),
        ("cond_stage_model.transformer.text_model.encoder.layers.0.mlp.fc1.bias", "as_file", "fp8_e4m3fn"),
        ("first_stage_model.decoder.conv_out.bias", "int8", "as_file"),
    ],
)  # fmt: skip
def test_a_checkpoint(comfy, checkpoint, models_dir, loading, name, storage, clip_storage):
    path = without(checkpoint, models_dir / "checkpoints" / "lacking.safetensors", name)
    with loading, refused(path, name):
        comfy.run(
            "HalfsafeLoadCheckpoint",
            ckpt_name=path,
            storage=storage,
            clip_storage=clip_storage,
            vae_dtype="auto",
            **SETTINGS,
        )


@pytest.fixture(scope="module")
def clip_l(models_dir):
    return tiny_models.narrow_clip_l(models_dir / "text_encoders" / "whole_for_lacking.safetensors")


@pytest.mark.parametrize(
    ("name", "storage"),
    [
        ("text_model.encoder.layers.0.mlp.fc2.weight", "fp8_e4m3fn"), ("text_model.encoder.layers.1.mlp.fc1.weight", "as_file"), ("text_model.encoder.layers.1.layer_norm1.weight", "as_file"),
        ("text_model.encoder.layers.0.self_attn.q_proj.bias", "int8"), ("text_model.final_layer_norm.bias", "fp16"),
    ],
)  # fmt: skip
def test_a_text_encoder(comfy, clip_l, models_dir, loading, name, storage):
    path = without(clip_l, models_dir / "text_encoders" / "lacking.safetensors", name)
    with loading, refused(path, name):
        comfy.run("HalfsafeLoadCLIP", clip_name1=path, type="stable_diffusion", storage=storage, **SETTINGS)


def vae_without(models_dir, name):
    whole = tiny_models.sd_vae(models_dir / "vae" / "whole_for_lacking.safetensors", dtype=torch.float32)
    return without(whole, models_dir / "vae" / "lacking.safetensors", name)


def test_a_vae_that_cannot_decode(comfy, models_dir):
    path = vae_without(models_dir, "decoder.conv_out.weight")
    with refused(path, "decoder.conv_out.weight"):
        comfy.run("HalfsafeLoadVAE", vae_name=path, dtype="fp32")


def test_a_vae_that_cannot_encode_decodes_and_says_so(comfy, models_dir, caplog):
    path = vae_without(models_dir, "encoder.conv_in.bias")
    vae = comfy.run("HalfsafeLoadVAE", vae_name=path, dtype="fp32")[0]
    assert "lacks 1 tensors (first: encoder.conv_in.bias): encoding gives NaN" in caplog.text
    assert torch.isfinite(vae.decode(torch.randn(1, 4, 4, 4))).all()
    assert torch.isnan(vae.encode(torch.rand(1, 32, 32, 3))).all()


@pytest.mark.parametrize("storage", ["as_file", "int8"])
@pytest.mark.parametrize(
    "name",
    ["middle_block.1.transformer_blocks.0.norm1.weight", "middle_block.1.transformer_blocks.0.attn1.to_q.weight"],
)
def test_a_control_net(comfy, models_dir, loading, name, storage):
    whole = control_files.sd15(models_dir / "controlnet" / "whole_for_lacking.safetensors")
    path = without(whole, models_dir / "controlnet" / "lacking.safetensors", name)
    with loading, refused(path, name):
        comfy.run("HalfsafeLoadControlNet", control_net_name=path, storage=storage, **SETTINGS)


def test_a_tensor_that_comfyui_makes_itself_is_not_lacking(comfy, clip_l, models_dir):
    """The text projection of a CLIP is the identity where a file has none."""
    clip = comfy.run(
        "HalfsafeLoadCLIP", clip_name1=clip_l.name, type="stable_diffusion", storage="fp8_e4m3fn", **SETTINGS
    )[0]
    assert not any("lacks" in note for note in clip.patcher.attachments[ATTACHMENT].notes)
    assert torch.isfinite(clip.encode_from_tokens(clip.tokenize("a cat"))).all()


@pytest.mark.parametrize("storage", ["as_file", "int8"])
def test_connectors_that_a_text_encoder_of_ltx_2_brings_are_not_lacking(comfy, models_dir, loading, caplog, storage):
    """Published files of the transformer alone have none: ComfyUI loads them into the text encoder."""
    whole = rare_families.write("ltxav", models_dir / "diffusion_models" / "ltxav_whole.safetensors")
    path = whole.with_name("ltxav_alone.safetensors")
    with safe_open(str(whole), "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys() if "_connector." not in name}  # noqa: SIM118
        save_file(kept, str(path), file.metadata())
    with loading:
        model = families.load(comfy, path, storage, "auto")
    assert "audio_embeddings_connector" in caplog.text and "a text encoder without them gives NaN" in caplog.text
    processed = [[torch.randn(1, 8, 2 * model.model.diffusion_model.caption_channels), {}]]
    assert rare_families.sample(model, "ltxav", cond=processed).isfinite().all()
    assert rare_families.sample(model, "ltxav").isnan().all()
    assert report_of(model).layers


@pytest.mark.parametrize(
    "error", [KeyError("blocks"), KeyError(3), KeyError(), UnboundLocalError("local variable 'x'")]
)
def test_an_error_of_another_kind_is_not_called_a_lacking_tensor(error):
    with pytest.raises(type(error)) as raised, named_if_lacking("wan.safetensors"):
        raise error
    assert raised.value is error
