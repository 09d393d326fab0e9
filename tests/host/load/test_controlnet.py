"""Load ControlNet in a real ComfyUI: what it loads of each kind of control file, and what that computes."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

import pytest
import torch
from comfy.controlnet import ControlNet
from comfy.ops import disable_weight_init
from comfy.quant_ops import QuantizedTensor
from halfsafe.nodes.host.comfyui.execution import switches_by_layer
from halfsafe.nodes.host.comfyui.layers import is_quantized
from halfsafe.nodes.host.load.controlnet import LoadedControl
from halfsafe.nodes.host.reporting.report import control_report
from halfsafe.precision.base.errors import CheckpointError, MemoryShortage
from halfsafe.precision.base.layers import kind_of
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import control_files, families, tiny_models
from support.bound_layers import note_bound
from support.control_files import KINDS, give
from support.matmul_spy import MatmulSpy, Products
from support.measures import relative_error, summed_alike


@pytest.fixture(scope="module")
def control_file(models_dir):
    made = {}

    def file(kind):
        if kind not in made:
            made[kind] = KINDS[kind](models_dir / "controlnet" / f"{kind}.safetensors")
        return made[kind].name

    return file


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    control_files.narrow(monkeypatch)


def load(comfy, name, storage="as_file", compute="fp32", **more):
    return comfy.run("HalfsafeLoadControlNet", control_net_name=name, storage=storage, compute=compute, **more)[0]


def stock(comfy, name):
    return comfy.core["ControlNetLoader"]().load_controlnet(name)[0]


def planned_control(control):
    return control.control_model.forward


def in_fp32(control):
    control.control_model.dtype = control.manual_cast_dtype = torch.float32
    control.control_model.float()
    return control


@pytest.mark.parametrize("kind", KINDS)
def test_as_file_gives_what_comfyui_s_loader_gives(comfy, control_file, kind):
    ours, core = load(comfy, control_file(kind)), in_fp32(stock(comfy, control_file(kind)))
    assert type(ours) is type(core) and type(ours.control_model) is type(core.control_model)
    weights, expected = ours.control_model.state_dict(), core.control_model.state_dict()
    assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in expected)
    assert summed_alike(give(core, kind), give(ours, kind))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_as_file_keeps_the_file_s_dtype(comfy, models_dir, dtype):
    path = control_files.sd15(models_dir / "controlnet" / "of_a_dtype.safetensors", dtype)
    assert {parameter.dtype for parameter in load(comfy, path.name).control_model.parameters()} == {dtype}


@pytest.mark.parametrize(
    ("kind", "storage", "compute", "bound"),
    [
        *((kind, "fp8_e4m3fn", "fp32", 0.06) for kind in KINDS),
        *((kind, "int8", "fp32", 0.02) for kind in KINDS),
        ("flux", "fp16", "fp16_safe", 0.001),
        ("qwen", "fp8_e5m2", "fp16_safe", 0.12),
    ],
)
def test_error_is_that_of_a_model(comfy, control_file, kind, storage, compute, bound):
    expected = give(in_fp32(stock(comfy, control_file(kind))), kind)
    found = give(load(comfy, control_file(kind), storage, compute), kind)
    assert 0 < relative_error(expected, found) < bound


def reported(control):
    """The report of a control net, and its layers by name."""
    report = control_report(LoadedControl.of(control))
    return report, {layer.name: layer for layer in report.layers}


@pytest.mark.parametrize(
    ("storage", "compute", "modes"),
    [
        ("fp8_e4m3fn", "fp32", {"fp32"}),
        ("as_file", "bf16", {"bf16"}),
        ("fp8_e4m3fn", "fp16_safe", {"fp16", "fp16_wide"}),
        ("int8", "int8", {"int8"}),
    ],
)
@pytest.mark.parametrize("kind", ["sd15", "flux", "qwen"])
def test_layers_multiply_in_the_modes_that_the_report_says(comfy, control_file, kind, storage, compute, modes):
    control = load(comfy, control_file(kind), storage, compute)
    linear = {name: part for name, part in control.control_model.named_modules() if kind_of(part) == "linear"}
    with Products(linear) as products:
        give(control, kind)
    report, layers = reported(control)
    held = {name for name in linear if storage in (layers[name].storage, "as_file") and products.made[name]}
    assert len(held) >= 4 and report.calls == 1
    assert {name: {layers[name].mode} for name in held} == {name: {*products.made[name]} for name in held}
    assert {layers[name].mode for name in held} <= modes


def test_rules_act_on_layers(comfy, control_file):
    (rules, _) = comfy.run(
        "HalfsafeLayerRules",
        rules="controlnet_blocks.* storage=as_file  # zero at first",
        preset="keep sensitive layers",
    )
    report, layers = reported(load(comfy, control_file("flux"), "fp8_e4m3fn", "fp16_safe", rules=rules))
    assert layers["controlnet_blocks.0"].storage != "fp8_e4m3fn" == layers["double_blocks.0.img_mlp.0"].storage
    assert "zero at first" in {kept.reason for kept in report.kept_high}


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_quantized_files_are_read(comfy, control_file, models_dir, storage):
    path = models_dir / "controlnet" / f"quantized_{storage}.safetensors"
    convert_file(models_dir / "controlnet" / control_file("sd15"), path, storage, rules_from())
    control = load(comfy, path.name)
    expected = give(load(comfy, control_file("sd15"), "fp32"), "sd15")
    assert 0 < relative_error(expected, give(control, "sd15")) < 0.06
    _, layers = reported(control)
    assert sum(layer.storage == storage for layer in layers.values()) >= 8


@pytest.mark.parametrize(
    ("kind", "storage", "layer", "held"),
    [
        ("flux_diffusers", "int8", "double_blocks.0.img_attn.qkv", "int8"),
        ("flux_diffusers", "nvfp4", "double_blocks.0.img_attn.qkv", "bf16"),
        ("flux_diffusers", "nvfp4", "double_blocks.0.img_attn.proj", "nvfp4"),
        ("sd15_diffusers", "int8", "middle_block.1.transformer_blocks.0.attn1.to_q", "int8"),
    ],
)
def test_quantized_weights_with_diffusers_names_keep_a_storage_that_holds_them(
    comfy, control_file, models_dir, kind, storage, layer, held
):
    path = models_dir / "controlnet" / f"{kind}_{storage}.safetensors"
    convert_file(models_dir / "controlnet" / control_file(kind), path, storage, rules_from())
    control, expected = load(comfy, path.name), give(load(comfy, control_file(kind), "fp32"), kind)
    report, layers = reported(control)
    assert 0 < relative_error(expected, give(control, kind)) < (0.4 if storage == "nvfp4" else 0.08)
    assert layers[layer].storage == held and any("diffusers" in note for note in report.notes)
    assert any("Unpacked" in note and "img_attn.qkv" in note for note in report.notes) == (storage == "nvfp4")


def operands_of_attention(control, kind):
    """Module that attends -> the dtypes its attention multiplied."""
    with MatmulSpy(control.control_model) as spy:
        give(control, kind)
    found = {}
    for product in spy.seen:
        if product.op not in ("mm", "addmm", "convolution"):
            found.setdefault(product.layer, set()).update(product.operands)
    return found


@pytest.mark.parametrize(
    ("kind", "block"),
    [
        ("flux", "double_blocks.0"),
        ("qwen", "transformer_blocks.0"),
        ("sd15", "middle_block.1.transformer_blocks.0.attn1"),
        ("sd15", "middle_block.1"),
    ],
)
def test_a_rule_runs_the_attention_of_its_block_alone_in_fp32(comfy, control_file, kind, block):
    (rules, _) = comfy.run("HalfsafeLayerRules", rules=f"{block} attention=fp32", preset="none")
    control = load(comfy, control_file(kind), "bf16", "bf16", rules=rules)
    found = operands_of_attention(control, kind)
    assert found and all(
        dtypes == {"fp32" if f"{name}.".startswith(f"{block}.") else "bf16"} for name, dtypes in found.items()
    )
    report, _ = reported(control)
    assert report.decisions["attention by rule"] == f"fp32 in {block}" and report.without_effect == []


@pytest.mark.parametrize(("kind", "block"), [("sd15", "middle_block.0"), ("sd35", "transformer_blocks.0")])
def test_a_rule_without_an_attention_to_exchange_is_told(comfy, models_dir, kind, block):
    """A ResBlock has none; ComfyUI's code of SD3.5's ControlNet hands its attention no options."""
    path = getattr(control_files, kind)(models_dir / "controlnet" / f"{kind}_without.safetensors")
    (rules, _) = comfy.run("HalfsafeLayerRules", rules=f"{block} attention=fp32", preset="none")
    control = load(comfy, path.name, "bf16", "bf16", rules=rules)
    found = operands_of_attention(control, kind)
    assert found and all(dtypes == {"bf16"} for dtypes in found.values())
    (told,) = reported(control)[0].without_effect
    assert (
        told.setting == f"{block} attention=fp32"
        and told.reason == f"no attention that ComfyUI allows to be replaced ran in a forward of {block}"
    )


def damaged(source, path, change):
    tensors = load_file(source)
    change(tensors)
    save_file(tensors, path)
    return path.name


def change_to_nan(tensors):
    tensors["middle_block.1.transformer_blocks.0.attn1.to_q.weight"][3, 5] = torch.nan


def change_shape(tensors):
    tensors["middle_block.1.transformer_blocks.0.attn1.to_q.weight"] = torch.zeros(64, 320)


def add_scale(tensors):
    tensors["middle_block.1.transformer_blocks.0.attn1.to_q.scale_weight"] = torch.full((320, 2), 2.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_to_nan, "NaN"),
        (change_shape, "of shape 64x320, but the model has 320x320"),
        (add_scale, "scale"),
        (
            lambda tensors: tensors.pop("input_hint_block.0.weight"),
            "lacks input_hint_block.0.weight, which ComfyUI needs to recognise the architecture",
        ),
        (lambda tensors: tensors.update(difference=torch.zeros(1)), "DiffControlNetLoader"),
    ],
)
def test_bad_files_are_refused_by_name(comfy, control_file, models_dir, change, words):
    name = damaged(
        models_dir / "controlnet" / control_file("sd15"), models_dir / "controlnet" / "bad.safetensors", change
    )
    with pytest.raises(CheckpointError, match=f"bad.safetensors.*{words}"):
        load(comfy, name, "fp8_e4m3fn")


def test_other_files_are_refused_by_name(comfy, control_file, models_dir, wan):
    folder = models_dir / "controlnet"
    (folder / "cut.safetensors").write_bytes((folder / control_file("sd15")).read_bytes()[:-1000])
    (folder / "model.safetensors").write_bytes(wan.read_bytes())
    for name in ("cut.safetensors", "model.safetensors"):
        with pytest.raises(CheckpointError, match=name):
            load(comfy, name)


def test_a_file_that_does_not_fit_is_refused_before_it_is_read(comfy, control_file, monkeypatch):
    from halfsafe.nodes.host.load import controlnet

    monkeypatch.setattr(controlnet, "free_host_memory", lambda: 1000)
    with pytest.raises(MemoryShortage, match="sd15.safetensors"):
        load(comfy, control_file("sd15"))


def test_a_copy_for_another_device_keeps_the_plan(comfy, control_file):
    control = load(comfy, control_file("flux"), "fp16", "fp16_safe")
    expected = give(control, "flux")
    with torch.inference_mode(False):
        clone = control.deepclone_multigpu(torch.device("cpu"))
    clone.control_model_wrapped.attachments.clear()
    planned = planned_control(control)
    calls = planned.calls[0]
    assert not any(switches_by_layer(one.current_patcher) for one in (planned, planned_control(clone))), (
        "their threads share torch's flags"
    )
    assert torch.equal(expected, give(clone, "flux"))
    assert planned.calls[0] == calls + 1
    assert planned_control(clone) is not planned and planned_control(clone).diffusion_model is clone.control_model


def test_layers_of_the_model_beside_cast_while_the_control_net_calls_them(comfy, control_file, monkeypatch):
    """As Qwen-Image Fun's does; layers made for one dtype take no activations in another."""
    control = load(comfy, control_file("flux"), "fp16", "fp16_safe")
    base, seen = torch.nn.Sequential(disable_weight_init.Linear(4, 4)), []
    base.register_forward_hook(lambda *args: seen.append(base[0].comfy_cast_weights))
    planned = planned_control(control)
    monkeypatch.setattr(type(planned.diffusion_model), "forward", lambda self, base_model: base_model(torch.ones(1, 4)))
    planned(base_model=base)
    assert seen == [True] and base[0].comfy_cast_weights is False


def test_a_dropped_control_net_is_freed(comfy, control_file):
    control = load(comfy, control_file("sd15"), "fp8_e4m3fn", "fp16_safe")
    give(control, "sd15")
    module, loaded = weakref.ref(control.control_model), weakref.ref(LoadedControl.of(control))
    families.unload_models()
    del control
    gc.collect()
    assert module() is None and loaded() is None


def sample(comfy, model, control, seed=1):
    """A latent of a whole run with the stock nodes."""
    image = torch.rand(1, 64, 64, 3, generator=torch.Generator().manual_seed(seed))
    cond = [[torch.randn(1, 16, 768, generator=torch.Generator().manual_seed(2)), {}]]
    positive, negative = comfy.core["ControlNetApplyAdvanced"]().apply_controlnet(
        cond, cond, control, image, 0.8, 0.0, 1.0
    )
    latent = {"samples": torch.zeros(1, 4, 8, 8)}
    return comfy.core["KSampler"]().sample(model, seed, 2, 2.0, "euler", "simple", positive, negative, latent)[0][
        "samples"
    ]


def test_whole_run_with_a_control_net_and_its_report(comfy, control_file, models_dir):
    checkpoint = tiny_models.sd15_checkpoint(models_dir / "checkpoints" / "sd15_controlled.safetensors", layers=2)
    model = comfy.run(
        "HalfsafeLoadCheckpoint",
        ckpt_name=checkpoint.name,
        storage="as_file",
        compute="fp32",
        clip_storage="auto",
        vae_dtype="auto",
    )[0]
    expected = sample(comfy, model, in_fp32(stock(comfy, control_file("sd15"))))
    assert relative_error(expected, sample(comfy, model, load(comfy, control_file("sd15")))) < 1e-5
    control = load(comfy, control_file("sd15"), "fp8_e4m3fn", "fp16_safe")
    assert 0 < relative_error(expected, sample(comfy, model, control)) < 0.05
    text, data, _ = comfy.run("HalfsafeReport", model=model)
    found = next(entry for entry in json.loads(data)["control_nets"] if entry["decisions"]["storage"] == "fp8_e4m3fn")
    assert found["calls"] == 2 and {"fp16_wide"} <= {layer["mode"] for layer in found["layers"]} and found["kept_high"]
    assert "ControlNet sd15.safetensors: ControlNet, ran 2 times" in text


def test_a_report_lists_the_control_nets_that_ran_with_its_model_alone(comfy, control_file, models_dir):
    path = tiny_models.sd15_checkpoint(models_dir / "checkpoints" / "sd15_controlled.safetensors", layers=2)
    settings = {"storage": "as_file", "clip_storage": "auto", "vae_dtype": "auto"}
    one, other = (
        comfy.run("HalfsafeLoadCheckpoint", ckpt_name=path.name, compute=name, **settings)[0]
        for name in ("fp32", "bf16")
    )
    first, second, idle = (load(comfy, control_file("sd15"), storage) for storage in ("fp8_e4m3fn", "bf16", "int8"))
    sample(comfy, one, first)
    sample(comfy, one.clone(), first.copy().copy())
    second.copy().set_previous_controlnet(first.copy()).pre_run(other.model, lambda percent: percent)
    assert LoadedControl.used_with(one.model) == [LoadedControl.of(first)] and LoadedControl.of(
        idle
    ) not in LoadedControl.used_with(other.model)
    assert {*LoadedControl.used_with(other.model)} == {LoadedControl.of(first), LoadedControl.of(second)}
    assert type(first.copy()) is type(first) is ControlNet
    listed = json.loads(comfy.run("HalfsafeReport", model=one)[1])["control_nets"]
    assert [entry["decisions"]["storage"] for entry in listed] == ["fp8_e4m3fn"] and listed[0]["calls"] == 4


def write_adapter(path):
    from comfy.t2i_adapter.adapter import Adapter

    shapes = tiny_models.shapes_of(
        Adapter(cin=192, channels=[32, 64, 128, 128], nums_rb=2, ksize=1, sk=True, use_conv=False)
    )
    return tiny_models.write_shapes(path, shapes, torch.float16, 0)


def write_lora(path):
    shapes = {
        "lora_controlnet": (1,),
        "input_hint_block.0.weight": (16, 3, 3, 3),
        "input_blocks.0.0.weight": (32, 4, 3, 3),
    }
    return tiny_models.write_shapes(path, shapes, torch.float16, 0)


@pytest.mark.parametrize(("write", "kind"), [(write_adapter, "T2IAdapter"), (write_lora, "ControlLora")])
def test_kinds_that_are_not_quantized_are_loaded_as_comfyui_does_and_say_so(comfy, models_dir, caplog, write, kind):
    path = write(models_dir / "controlnet" / f"{kind}.safetensors")
    control = load(comfy, path.name, "fp8_e4m3fn", "fp16")
    weights, core = (state_of(c) for c in (control, stock(comfy, path.name)))
    assert type(control).__name__ == kind and weights.keys() == core.keys()
    assert all(torch.equal(weights[name], core[name]) for name in core)
    report, _ = reported(control)
    assert [entry.setting for entry in report.without_effect] == ["storage=fp8_e4m3fn", "compute=fp16"]
    assert "storage=fp8_e4m3fn has no effect" in caplog.text


def state_of(control):
    return control.control_weights if hasattr(control, "control_weights") else control.t2i_model.state_dict()


@pytest.mark.parametrize(("storage", "compute"), [("as_file", "fp32"), ("fp8_e4m3fn", "fp16_safe")])
def test_an_sd35_control_net_takes_the_model_s_embedder(comfy, models_dir, storage, compute):
    from comfy.ldm.modules.diffusionmodules.mmdit import VectorEmbedder

    path = control_files.sd35(models_dir / "controlnet" / "sd35.safetensors")
    embedder = VectorEmbedder(2048, 256, torch.float16, torch.device("cpu"), disable_weight_init)
    embedder.load_state_dict(
        {
            name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) / 50
            for name, tensor in embedder.state_dict().items()
        }
    )
    model, outputs = torch.nn.Module(), []
    model.diffusion_model, model.model_sampling = SimpleNamespace(y_embedder=embedder), None
    for control in (in_fp32(stock(comfy, path.name)), load(comfy, path.name, storage, compute)):
        control.pre_run(model, lambda percent: percent)
        outputs.append(give(control, "sd35"))
    assert storage == "as_file" or sum(layer.storage == "fp8_e4m3fn" for layer in reported(control)[1].values()) >= 4
    assert relative_error(*outputs) < (1e-6 if storage == "as_file" else 0.06)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2", "int8"])
@pytest.mark.parametrize("kind", ["sd15", "flux", "qwen"])
@torch.inference_mode()
def test_quantized_layers_are_bound_in_the_runs_of_a_control_net_whose_plan_changes_nothing(
    comfy, control_file, monkeypatch, kind, storage
):
    control = load(comfy, control_file(kind), storage, "bf16")
    give(control, kind)
    quantized = {part for part in control.control_model.modules() if is_quantized(part)}
    bound, asked = note_bound(monkeypatch), []
    own = QuantizedTensor.__torch_dispatch__.__func__
    monkeypatch.setattr(
        QuantizedTensor,
        "__torch_dispatch__",
        classmethod(lambda cls, func, *args: asked.append(func.name()) or own(cls, func, *args)),
    )
    give(control, kind)
    assert {*bound} == quantized and not asked
