"""Weights of another shape than the model's: refused at load by file, tensor and both shapes, in every format and by every loader."""

import contextlib

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from support import control_files, dialects, model_files, tiny_models
from support.mapped_loading import mapped_loading

E4M3 = dialects.E4M3


def fp8(weight):
    data, scale = dialects.per_tensor(weight)
    return {
        "weight": data,
        "weight_scale": scale,
        "comfy_quant": dialects.comfy_quant_bytes({"format": "float8_e4m3fn"}),
    }


WRITERS = {**dialects.NATIVE, "fp8": fp8, "plain": lambda weight: {"weight": weight.bfloat16()}}
WAN = ("HalfsafeLoadDiffusionModel", "diffusion_models", "blocks.1.self_attn.q", tiny_models.wan, {"model_name": None})
CLIP = (
    "HalfsafeLoadCLIP", "text_encoders", "text_model.encoder.layers.1.self_attn.q_proj", tiny_models.narrow_clip_l,
    {"clip_name1": None, "type": "stable_diffusion"},
)  # fmt: skip
CONTROL = (
    "HalfsafeLoadControlNet", "controlnet", "middle_block.1.transformer_blocks.0.attn1.to_q", control_files.sd15,
    {"control_net_name": None},
)  # fmt: skip


@pytest.fixture(params=[contextlib.nullcontext, mapped_loading], ids=["copied", "dynamic VRAM"])
def loading(request):
    return request.param()


def misfitting(models_dir, kind, format, cut, beside):
    """A file of a kind, one of whose layers has fewer rows or columns, and ``beside`` it a sound quantized one."""
    _, folder, layer, write, _ = kind

    def change(tensors):
        weight = tensors.pop(f"{layer}.weight").float()
        weight = torch.randn(weight.shape[0], weight.shape[1]) * 0.02
        if beside:
            other = next(n for n, t in tensors.items() if n.endswith("weight") and t.shape == weight.shape)
            tensors |= {f"{other[:-7]}.{leaf}": it for leaf, it in fp8(tensors.pop(other).float()).items()}
        short = weight[:-32] if cut == "rows" else weight[:, :-32]
        tensors |= {f"{layer}.{leaf}": it for leaf, it in WRITERS[format](short.contiguous()).items()}
        shapes[:] = ["x".join(map(str, each.shape)) for each in (short, weight)]

    shapes = []
    source = write(models_dir / folder / "whole_for_shapes.safetensors")
    path = model_files.changed(source, models_dir / folder / "shapes.safetensors", change)
    return path, *shapes


def refused(comfy, path, kind, short, whole):
    node, _, layer, _, inputs = kind
    message = rf"{path.name}: tensor '\S*{layer}.weight': of shape {short}, but the model has {whole}"
    with pytest.raises(CheckpointError, match=message):
        named = {key: path.name if value is None else value for key, value in inputs.items()}
        comfy.run(node, **named, storage="as_file", compute="auto")


@pytest.mark.parametrize("cut", ["rows", "columns"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "int8", "int4", "fp8"])
def test_a_quantized_weight_of_a_model(comfy, models_dir, loading, format, cut):
    path, short, whole = misfitting(models_dir, WAN, format, cut, beside=False)
    with loading:
        refused(comfy, path, WAN, short, whole)


@pytest.mark.parametrize("kind", [WAN, CLIP], ids=["model", "text encoder"])
def test_a_16_bit_weight_beside_quantized_ones(comfy, models_dir, loading, kind):
    path, short, whole = misfitting(models_dir, kind, "plain", "rows", beside=True)
    with loading:
        refused(comfy, path, kind, short, whole)


@pytest.mark.parametrize("kind", [CLIP, CONTROL], ids=["text encoder", "ControlNet"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp8", "int8"])
def test_a_quantized_weight_of_another_kind_of_file(comfy, models_dir, format, kind):
    path, short, whole = misfitting(models_dir, kind, format, "rows", beside=False)
    refused(comfy, path, kind, short, whole)
