"""Static models that are loaded while dynamic VRAM is on, as TorchCompileModel, MultiGPU and hooks of LoRAs ask for: each is the model that a ComfyUI
without dynamic VRAM loads, whatever its file holds.

Under dynamic VRAM ComfyUI makes each Linear and Embedding without a weight, and gives it the file's tensor in the file's dtype.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.load import encoders, models
from halfsafe.nodes.host.load.encoders import load_checkpoint_text_encoder, load_text_encoder, load_vae
from halfsafe.nodes.host.load.models import load_diffusion_model
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.rules import Rules
from safetensors.torch import load_file, save_file
from support import control_files, families, model_files, saved_models, tiny_models, tiny_vaes
from support.guarding import guarded
from support.mapped_loading import mapped_loading, tensors_of
from support.measures import relative_error
from support.rows import rotated, the_rest_before_a_release
from support.summing import accumulation

HELD = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORAGES = ("as_file", "fp16", "bf16", "fp32", "fp8_e4m3fn", "int8")
COMPUTES = ("auto", "fp16", "fp16_safe", "bf16", "fp32", "int8")
LAYERS = {"blocks.0.ffn.0": (256, 128), "blocks.1.ffn.2": (128, 256)}


@pytest.fixture(scope="module")
def in_dtype(models_dir):
    """Name of a dtype -> a file of it, of the same model."""
    folder, made = models_dir / "diffusion_models", {}

    def file(held):
        if held not in made:
            made[held] = tiny_models.wan(folder / f"static_{held}.safetensors", dtype=HELD[held], dim=128, ffn=256)
        return made[held]

    return file


def load(path, storage, compute, mapped):
    with mapped_loading() if mapped else contextlib.nullcontext():
        return load_diffusion_model(str(path), storage, compute, Rules(), disable_dynamic=True)


def parts_of(tensor):
    if isinstance(tensor, QuantizedTensor):
        return [tensor.dtype, *parts_of(tensor._qdata), *parts_of(tensor._params.scale)]
    return [tensor.dtype, tensor.contiguous().flatten().view(torch.uint8)]


def of_module(module):
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_same(one, other):
    """Whether two state dicts have the same names, dtypes and bits."""
    one, other = ({name: parts_of(tensor) for name, tensor in each.items()} for each in (one, other))
    alike = all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for name in one
        for a, b in zip(one[name], other[name], strict=True)
    )
    return one.keys() == other.keys() and alike


EACH_HELD = the_rest_before_a_release(
    [("as_file", "fp16"), ("fp16", "bf16"), ("bf16", "fp16"), ("fp8_e4m3fn", "bf16"), ("int8", "fp16")],
    rotated(STORAGES, HELD, whole=["as_file"]),
)


@pytest.mark.parametrize(("storage", "held"), EACH_HELD)
def test_a_model_is_that_of_a_comfyui_without_it(comfy, in_dtype, held, storage):
    for compute in COMPUTES:
        plain, static = (load(in_dtype(held), storage, compute, mapped) for mapped in (False, True))
        assert is_same(of_module(plain.model.diffusion_model), of_module(static.model.diffusion_model)), compute
        assert families.report(comfy, plain)["model"] == families.report(comfy, static)["model"], compute
        assert torch.equal(families.denoise(plain), families.denoise(static)), compute


def test_weights_of_half_the_size_take_half_of_the_memory(in_dtype):
    sizes = [
        sum(
            one.nbytes for one in tensors_of(load(in_dtype("fp32"), storage, "fp32", mapped=True).model.diffusion_model)
        )
        for storage in ("bf16", "as_file")
    ]
    assert sizes[0] < 0.55 * sizes[1]


def with_lora(model):
    return load_lora_for_models(model, None, model_files.lora(LAYERS, size=0.3), 1.0, 0.0)[0]


NODES = {
    "guard": guarded,
    "compute": lambda comfy, model: families.with_compute(comfy, model, "fp16_safe"),
    "accumulation": lambda comfy, model: accumulation(comfy, model, fp16_accumulation="auto", attention="auto"),
    "LoRA": lambda comfy, model: with_lora(model),
    "LoRA under the guard": lambda comfy, model: guarded(comfy, with_lora(model)),
}


@pytest.mark.parametrize("storage", ["fp16", "fp32", "int8"])
@pytest.mark.parametrize("node", NODES)
def test_a_clone_runs_with_the_nodes_of_the_dynamic_model(comfy, in_dtype, node, storage):
    path, compute = in_dtype("bf16"), storage if storage in HELD else "auto"
    expected = families.denoise(NODES[node](comfy, families.load(comfy, path, storage, compute)))
    with mapped_loading():
        model = NODES[node](comfy, families.load(comfy, path, storage, compute))
        assert model.is_dynamic()
        static = model.clone(disable_dynamic=True)
    assert static.model is not model.model and torch.equal(families.denoise(static), expected)


@pytest.mark.parametrize("storage", ["as_file", "fp8_e4m3fn"])
def test_a_clone_is_saved_as_the_model(comfy, in_dtype, saved_folder, storage):
    def saved(model):
        return load_file(saved_models.save(comfy, with_lora(model), saved_folder, storage))

    expected = saved(families.load(comfy, in_dtype("bf16"), "fp16", "fp16"))
    with mapped_loading():
        static = families.load(comfy, in_dtype("bf16"), "fp16", "fp16").clone(disable_dynamic=True)
    assert is_same(expected, saved(static))


def test_a_clone_is_stored_as_the_report_of_the_dynamic_model_says(comfy, in_dtype, monkeypatch):
    """``auto`` leaves weights in 16 bit that dynamic VRAM streams, and would quantize those of a static model."""
    monkeypatch.setattr(models, "current_device", lambda: replace(detect(profile="sm_86"), simulated=False))
    monkeypatch.setattr(models, "free_device_memory", lambda: 2 << 30)
    monkeypatch.setattr(models, "free_host_memory", lambda: 64 << 30)
    with mapped_loading():
        model = families.load(comfy, in_dtype("bf16"), "auto", "auto")
        static = model.clone(disable_dynamic=True)
    assert (
        not any(isinstance(one, QuantizedTensor) for one in model.model.parameters())
        and "streams" in families.report(comfy, static)["decisions"]["storage"]
    )
    assert not any(isinstance(one, QuantizedTensor) for one in static.model.parameters())


@pytest.mark.parametrize("storage", ["as_file", "fp16", "fp32", "int8"])
def test_a_text_encoder_is_that_of_a_comfyui_without_it(comfy, models_dir, storage):
    clip_l = tiny_models.narrow_clip_l(models_dir / "text_encoders" / "static_clip_l.safetensors")
    path = model_files.changed(
        clip_l,
        clip_l.with_stem("static_bf16"),
        lambda tensors: tensors.update({name: it.bfloat16() for name, it in tensors.items()}),
    )
    plain = load_text_encoder([str(path)], "stable_diffusion", storage, "auto", disable_dynamic=True)
    with mapped_loading():
        static = load_text_encoder([str(path)], "stable_diffusion", storage, "auto", disable_dynamic=True)
    assert is_same(of_module(plain.cond_stage_model), of_module(static.cond_stage_model))
    assert torch.equal(*(clip.encode_from_tokens(clip.tokenize("a cat")) for clip in (plain, static)))


def test_the_parts_of_a_checkpoint_are_those_of_a_comfyui_without_it(comfy, models_dir):
    path = str(tiny_models.narrow_sd15_checkpoint(models_dir / "checkpoints" / "static_sd15.safetensors"))

    def parts():
        model = load_diffusion_model(path, "bf16", "bf16", Rules(), whole=True, disable_dynamic=True)
        return of_module(model.model.diffusion_model), of_module(
            load_checkpoint_text_encoder(path, "bf16", disable_dynamic=True).cond_stage_model
        )

    plain = parts()
    with mapped_loading():
        static = parts()
    assert all(map(is_same, plain, static))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["ace", "seedvr2"])
def test_a_vae_that_comfyui_never_streams_decodes_in_another_dtype_than_its_file(
    comfy, models_dir, monkeypatch, name, dtype
):
    """Its own loader raises here: "expected scalar type Float but found BFloat16"."""
    exact, path, tiny = (
        tiny_vaes.build(name, torch.float32),
        models_dir / "vae" / f"static_{name}.safetensors",
        tiny_vaes.VAES[name],
    )
    missing = {key: torch.zeros(shape) for key, shape in tiny.names.items()}
    save_file(
        {key: one.contiguous() for key, one in (missing | exact.first_stage_model.state_dict()).items()}, str(path)
    )
    own = torch.nn.Module.load_state_dict
    with mapped_loading(), tiny_vaes._narrowed(tiny):
        monkeypatch.setattr(torch.nn.Module, "load_state_dict", own)
        vae = load_vae(str(path), dtype)
        monkeypatch.undo()
    vae.process_output = exact.process_output
    assert not vae.patcher.is_dynamic() and {one.dtype for one in vae.first_stage_model.parameters()} == {
        encoders.dtype_named(dtype)
    }
    results = []
    for each in (exact, vae):
        torch.manual_seed(3)
        results.append(each.decode(tiny_vaes.latent(name)))
    assert relative_error(*results) < (0.05 if dtype == "bf16" else 1e-5)


@pytest.mark.parametrize("storage", ["bf16", "fp32"])
def test_dynamic_vram_casts_a_control_net_to_its_storage(comfy, models_dir, storage):
    path = control_files.sd15(models_dir / "controlnet" / "static_fp16.safetensors", torch.float16)
    with mapped_loading():
        control = comfy.run("HalfsafeLoadControlNet", control_net_name=path.name, storage=storage, compute="fp32")[0]
    made_for = {
        getattr(layer, f"{name}_comfy_model_dtype")
        for layer in control.control_model.modules()
        for name, _ in layer.named_parameters(recurse=False)
    }
    assert made_for == {HELD[storage]} == {parameter.dtype for parameter in control.control_model.parameters()}
