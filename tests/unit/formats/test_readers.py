"""The table of who reads quantized layers: kinds by their tensors' names, and what is said and refused of them."""

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.card import card_in
from halfsafe.precision.formats.readers import (
    ADAPTER,
    CLIP,
    CONTROL,
    DIFFUSERS,
    FOREIGN_NAMES,
    IMAGE_ENCODER,
    LANGUAGE_MODEL,
    LORA,
    MODEL,
    NOT_KNOWN,
    SMALL_ENCODER,
    T5_XXL,
    UPSCALER,
    VAE,
    first_comfyui,
    kind_of_file,
)
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import save_file

NO_RULES = rules_from("", "none")
FLUX = "double_blocks.0.img_attn.qkv.weight", "single_blocks.0.linear1.weight"
KINDS = [
    (MODEL, *FLUX),
    (MODEL, "head.modulation", "blocks.0.ffn.0.weight"),
    (T5_XXL, "encoder.block.23.layer.1.DenseReluDense.wi.weight"),
    (SMALL_ENCODER, "encoder.block.11.layer.1.DenseReluDense.wi_1.weight"),
    (SMALL_ENCODER, "model.encoder.layers.0.mixer.Wqkv.weight"),
    (CLIP, "text_model.encoder.layers.0.mlp.fc1.weight"),
    (CLIP, "transformer.resblocks.0.mlp.c_fc.weight"),
    (LANGUAGE_MODEL, "model.layers.0.self_attn.q_proj.weight"),
    (LANGUAGE_MODEL, "model.language_model.layers.0.linear_attn.in_proj_a.weight"),
    (IMAGE_ENCODER, "vision_model.encoder.layers.0.mlp.fc1.weight"),
    (IMAGE_ENCODER, "visual.transformer.resblocks.0.mlp.c_fc.weight"),
    (IMAGE_ENCODER, "encoder.layer.23.layer_scale2.lambda1"),
    (VAE, "decoder.mid.attn_1.q.weight"),
    (VAE, "taesd_decoder.1.weight"),
    (CONTROL, "control_model.input_blocks.1.1.proj_in.weight"),
    (CONTROL, "controlnet_blocks.0.weight", *FLUX),
    (ADAPTER, "ip_adapter.1.to_k_ip.weight"),
    (LORA, "transformer.blocks.0.attn.to_q.lora_A.weight"),
    (LORA, "lora_unet_blocks_0_attn.hada_w1_a"),
    (LORA, "lycoris_blocks_0_attn.lokr_w1"),
    (LORA, "diffusion_model.blocks.0.attn.q.diff"),
    (UPSCALER, "conv_first.weight"),
    (DIFFUSERS, "x_embedder.weight", "time_text_embed.text_embedder.linear_1.weight"),
    (DIFFUSERS, "down_blocks.0.resnets.0.conv1.weight"),
    (FOREIGN_NAMES, "condition_embedder.time_proj.weight", "blocks.0.attn1.to_q.weight"),
    (FOREIGN_NAMES, "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"),
    (NOT_KNOWN, "something.else.weight"),
]


@pytest.mark.parametrize(("kind", "names"), [(kind, names) for kind, *names in KINDS])
def test_a_kind_is_told_by_names(kind, names):
    assert kind_of_file(dict.fromkeys(names, (64, 64))) == kind


def written(folder, *names, dtype=torch.float16):
    """A file with a matrix under each name."""
    tensors = {name: torch.randn(64, 64, generator=torch.Generator().manual_seed(1)).to(dtype) for name in names}
    save_file(tensors, folder / "in.safetensors")
    return folder / "in.safetensors"


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("vision_model.encoder.layers.0.mlp.fc1.weight",), "an image or audio encoder"),
        (("ip_adapter.1.to_k_ip.weight",), "an adapter"),
        (("conv_first.weight",), "an upscaler"),
        (("condition_embedder.time_proj.weight",), "names that ComfyUI does not know"),
    ],
)
def test_kinds_that_nothing_reads_quantized_are_refused_and_in_16_bit_written(tmp_path, names, words):
    source = written(tmp_path, *names)
    with pytest.raises(CheckpointError, match=f"in.safetensors: .*{words}.*storage=fp16 or bf16"):
        convert_file(source, tmp_path / "out.safetensors", "int8", NO_RULES)
    assert not (tmp_path / "out.safetensors").exists()
    summary = convert_file(source, tmp_path / "out.safetensors", "bf16", NO_RULES)
    assert summary.readers == [] and summary.weights == {"bf16": 1}


@pytest.mark.parametrize("name", [names[0] for kind, *names in KINDS if kind == LORA])
@pytest.mark.parametrize("storage", ["int8", "bf16"])
def test_adapters_in_low_rank_form_are_refused(tmp_path, name, storage):
    with pytest.raises(CheckpointError, match="a LoRA, which is applied in 16 bit"):
        convert_file(written(tmp_path, name), tmp_path / "out.safetensors", storage, NO_RULES)


@pytest.mark.parametrize(
    ("names", "last", "needs"),
    [
        (FLUX, "2 int8_tensorwise layers of a diffusion model: ComfyUI 0.27.0 or later reads them.", "0.27.0"),
        (("decoder.mid.attn_1.q.weight",), "a VAE: only Halfsafe reads them, with Load VAE (Halfsafe)", None),
        (("text_model.encoder.layers.0.mlp.fc1.weight",), "only Halfsafe reads them, with Load CLIP (Halfsafe)", None),
        (("something.else.weight",), "ComfyUI 0.27.0 or later reads them if it is a diffusion model", "0.27.0"),
    ],
)
def test_convert_its_card_and_inspect_say_who_reads_the_file(tmp_path, names, last, needs):
    target = tmp_path / "out.safetensors"
    summary = convert_file(written(tmp_path, *names), target, "int8", NO_RULES)
    (told,) = summary.readers
    shown = " ".join(summary.text().partition("read by:")[2].split())
    assert last in told and shown == told
    assert [line for line in inspect_file(target).in_comfyui if "layers of" in line] == [told]
    card = card_in(open_checkpoint(target).metadata)
    assert card["needs_comfyui"] == needs and card.get("not_read_by_comfyui", [told]) == [told]


def test_each_part_of_a_checkpoint_has_readers_of_its_own(tmp_path):
    """ComfyUI reads the quantized model of a checkpoint, and no quantized CLIP beside it."""
    source = written(tmp_path, *(f"model.diffusion_model.{name}" for name in FLUX))
    convert_file(source, tmp_path / "model.safetensors", "int8", NO_RULES)
    clip = "text_model.encoder.layers.0.mlp.fc1"
    convert_file(written(tmp_path, f"{clip}.weight"), tmp_path / "clip.safetensors", "int8", NO_RULES)
    tensors = dict(open_checkpoint(tmp_path / "model.safetensors").items())
    tensors |= {
        f"cond_stage_model.transformer.{name}": it
        for name, it in open_checkpoint(tmp_path / "clip.safetensors").items()
    }
    save_file(tensors, tmp_path / "whole.safetensors")
    told = [line for line in inspect_file(tmp_path / "whole.safetensors").in_comfyui if "layers of" in line]
    assert len(told) == 2
    assert any("a diffusion model: ComfyUI 0.27.0 or later" in line for line in told)
    assert any("a CLIP text encoder: only Halfsafe" in line for line in told)


@pytest.mark.parametrize("prefix", ["diffusion_model.", "transformer."])
def test_a_prefix_that_comfyui_does_not_know_is_dropped(tmp_path, prefix):
    source = written(tmp_path, *(prefix + name for name in FLUX))
    summary = convert_file(source, tmp_path / "out.safetensors", "int8", NO_RULES)
    assert {*FLUX} <= {*open_checkpoint(tmp_path / "out.safetensors")}
    assert "ComfyUI 0.27.0 or later" in summary.readers[0] and any(prefix in note for note in summary.notes)


def test_a_file_that_is_not_quantized_needs_no_comfyui():
    assert first_comfyui([]) is None
