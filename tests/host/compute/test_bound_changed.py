"""A weight that other code changes after a plan was bound to it: the next call multiplies by what it is now.

Each way changes one layer of a model that has run, in inference mode, where tensors count no changes; the result is
compared with that of ComfyUI alone in fp32 on the same weights.
"""

from __future__ import annotations

import contextlib

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_lora_for_models
from comfy_extras.nodes_model_merging import ModelMergeSimple
from halfsafe.nodes.host.comfyui import kernels
from halfsafe.nodes.host.comfyui.layers import modules_of
from halfsafe.nodes.host.comfyui.weights import Bound
from halfsafe.nodes.host.compute.per_model import patches_of
from halfsafe.nodes.host.replay.interceptor import STAGES, take_stages
from support import families, model_files, tiny_models
from support.families import load
from support.measures import relative_error

LAYER = "blocks.0.ffn.0"
CELLS = [
    ("fp8_e4m3fn", "bf16"),
    ("fp8_e4m3fn", "fp32"),
    ("fp8_e4m3fn", "fp16"),
    ("fp8_e4m3fn", "fp16_safe"),
    ("fp8_e4m3fn", "fp8"),
    ("fp8_e5m2", "bf16"),
    ("int8", "int8"),
    ("int8", "bf16"),
    ("int8", "fp16_safe"),
    ("mxfp8", "bf16"),
    ("nvfp4", "fp16_safe"),
]


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def one_block(comfy, models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "changed.safetensors", dim=128, blocks=1, ffn=256)


@pytest.fixture(scope="module")
def captured(one_block):
    return families.capture(families.stock(one_block, torch.float32), "wan")


def another(layer: torch.nn.Module) -> torch.nn.Parameter:
    """A weight of the same format and other numbers, and another scale."""
    numbers = layer.weight.dequantize()
    other = layer.weight.requantize_from_float(3 * numbers.roll(1, 0), scale="recalculate")
    return torch.nn.Parameter(other, requires_grad=False)


def other_params(layer: torch.nn.Module):
    params = layer.weight.params
    return type(params)(**{**vars(params), "scale": changed(params.scale)})


def changed(scale: torch.Tensor) -> torch.Tensor:
    """Other scales: three times as large, or of other blocks where they are stored in 8 bits."""
    if scale.dtype.itemsize > 1:
        return 3 * scale
    return scale.view(torch.uint8).roll(1, 0).view(scale.dtype)


WAYS = {
    "the weight, copied over": lambda layer: layer.weight.copy_(another(layer)),
    "the scale, in place": lambda layer: layer.weight._params.scale.copy_(changed(layer.weight._params.scale)),
    "the data, in place": lambda layer: layer.weight._qdata.copy_(layer.weight._qdata.roll(1, 0)),
    "other data": lambda layer: setattr(layer.weight, "_qdata", layer.weight._qdata.roll(1, 0)),
    "other parameters": lambda layer: setattr(layer.weight, "_params", other_params(layer)),
    "another scale in the parameters": lambda layer: object.__setattr__(
        layer.weight._params, "scale", other_params(layer).scale
    ),
    "the weight, swapped": lambda layer: torch.utils.swap_tensors(layer.weight, another(layer)),
    "the scale, swapped": lambda layer: torch.utils.swap_tensors(layer.weight._params.scale, other_params(layer).scale),
    "another weight": lambda layer: setattr(layer, "weight", another(layer)),
    "the bias, in place": lambda layer: layer.bias.add_(2),
    "the bias, swapped": lambda layer: torch.utils.swap_tensors(
        layer.bias, torch.nn.Parameter(layer.bias + 2, requires_grad=False)
    ),
}
SCALED = {
    "a buffer": lambda layer, scale: layer.register_buffer("pre_quant_scale", scale),
    "a parameter": lambda layer, scale: setattr(
        layer, "pre_quant_scale", torch.nn.Parameter(scale, requires_grad=False)
    ),
    "an attribute": lambda layer, scale: layer.__dict__.update(pre_quant_scale=scale),
}


@contextlib.contextmanager
def put_back(layer: torch.nn.Module):
    """A layer has, after a change, its weight, its bias and no scale of columns again; the tensors are others, with the same numbers."""
    kept = {name: getattr(layer, name).detach().clone() for name in ("weight", "bias")}
    yield
    for held in (layer.__dict__, layer._buffers, layer._parameters):
        held.pop("pre_quant_scale", None)
    for name, tensor in kept.items():
        setattr(layer, name, torch.nn.Parameter(tensor, requires_grad=False))


def core_of(model):
    """ComfyUI's model alone, in fp32, on the same weights."""
    core = model.clone()
    take_stages(core, *STAGES)
    core.set_model_compute_dtype(torch.float32)
    return core


def judged(model, call, change, core, before) -> dict:
    """Error of a model's call after a change, and before it, and how far the change moves ComfyUI's result, which was ``before``; ``wrong``:
    the error is more than a tenth of that."""
    error = relative_error(before, families.replay(model, call))
    change(modules_of(model.model)[LAYER])
    ours, after = families.replay(model, call), families.replay(core, call)
    found = {"before": error, "after": relative_error(after, ours), "moved": relative_error(before, after)}
    assert found["moved"] > 2 * error, found
    return {**found, "wrong": found["after"] > error + 0.1 * found["moved"]}


def judged_alone(model, call, change) -> dict:
    core = core_of(model)
    return judged(model, call, change, core, families.replay(core, call))


@pytest.mark.parametrize(("storage", "compute"), CELLS)
@torch.inference_mode()
def test_a_change_is_seen_in_the_next_call(comfy, one_block, captured, storage, compute):
    model, wrong = load(comfy, one_block, storage, compute), {}
    layer, core = modules_of(model.model)[LAYER], core_of(model)
    before = families.replay(core, captured)
    for way, change in {**WAYS, **{name: scaled(put) for name, put in SCALED.items()}}.items():
        with put_back(layer):
            found = judged(model, captured, change, core, before)
        if found["wrong"]:
            wrong[way] = found
    assert not wrong


def scaled(put):
    return lambda layer: put(layer, torch.linspace(0.2, 6, layer.weight.shape[1]))


@torch.inference_mode()
def test_a_weight_of_another_rotation_is_seen_although_it_was_copied_over(comfy, one_block, captured):
    """``copy_`` of comfy-kitchen's tensors sets how columns are rotated in the parameters that are there."""

    def change(layer):
        plain = QuantizedTensor.from_float(layer.weight.dequantize().roll(1, 0), layer.weight._layout_cls)
        assert plain.params.convrot != layer.weight.params.convrot
        layer.weight.copy_(plain)

    for compute in ("int8", "bf16", "fp16_safe"):
        found = judged_alone(load(comfy, one_block, "int8", compute), captured, change)
        assert not found["wrong"], (compute, found)


@torch.inference_mode()
def test_a_kernel_is_chosen_anew_for_scales_of_another_dtype(comfy, one_block, monkeypatch):
    """comfy-kitchen's CUDA kernel reads a scale as fp32, and its registry chooses another one for other scales."""
    layer, asked = modules_of(load(comfy, one_block, "fp8_e4m3fn", "bf16").model)[LAYER], []
    bound, x = Bound(layer), torch.randn(4, 128).bfloat16()
    before, own = bound(x), kernels.registry.get_implementation
    monkeypatch.setattr(
        kernels.registry,
        "get_implementation",
        lambda name, kwargs: asked.append(kwargs["scale"].dtype) or own(name, kwargs=kwargs),
    )
    object.__setattr__(layer.weight._params, "scale", layer.weight._params.scale.bfloat16())
    assert relative_error(before, bound(x)) < 0.01 and asked == [torch.bfloat16]


@torch.inference_mode()
def test_a_models_tensors_and_those_of_its_lora_and_merge_can_be_swapped_after_a_run(comfy, one_block, captured):
    tensors = model_files.lora({LAYER: (256, 128)}, size=0.3)
    for storage in ("fp8_e4m3fn", "int8", "mxfp8", "bf16"):
        model, beside = (load(comfy, one_block, storage, "bf16") for _ in range(2))
        (merged,) = ModelMergeSimple().merge(model, beside, 0.5)
        model = load_lora_for_models(merged, None, dict(tensors), 1.0, 0.0)[0]
        families.replay(model, captured)
        patches_of(model)
        held = [*model.model.parameters(), *beside.model.parameters(), *tensors.values()]
        for tensor in held:
            torch.utils.swap_tensors(tensor, torch.nn.Parameter(tensor.clone(), requires_grad=False))
