"""Files whose dtype the device cannot hold: fp8 on Apple before torch 2.15, fp8 and bf16 under DirectML. Each is loaded in one that it can."""

import re
from dataclasses import replace

import pytest
import torch
from comfy import model_management
from comfy.cli_args import args
from halfsafe.nodes.host.run.compute import compute_of
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.errors import StorageNotHeld
from halfsafe.precision.plan.choice import ATTACHMENT
from safetensors.torch import load_file, save_file
from support import families, metal_rules, tiny_models
from support.families import load
from support.measures import relative_error
from support.probing import forget_probes

FP8 = torch.float8_e4m3fn


def in_fp8(path, name, chosen=lambda name: True):
    """A copy of a file with matrices in fp8 without a scale, those that ``chosen`` names."""
    tensors = load_file(str(path))
    made = {key: tensor.to(FP8) if tensor.dim() > 1 and chosen(key) else tensor for key, tensor in tensors.items()}
    save_file(made, str(path.with_name(name)))
    return path.with_name(name)


def dtypes(model) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters()}


def record_of(patcher):
    return patcher.attachments[ATTACHMENT]


@pytest.fixture
def encoder_on(on, monkeypatch):
    """A machine whose text encoders are on the GPU: a Mac's are on the CPU, but for ``--gpu-only``."""

    def enter(kind):
        monkeypatch.setattr(args, "gpu_only", kind == "mps")
        device = on(kind)
        assert model_management.text_encoder_device().type == kind
        return device

    return enter


def encoder(comfy, path, storage):
    return comfy.run("HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage=storage, compute="auto")[0]


def encoded(clip):
    return clip.encode_from_tokens_scheduled(clip.tokenize("a black image"))[0][0].cpu()


def test_fp8_weights_are_refused_where_the_device_cannot_hold_them(comfy, wan, on):
    """Without it the first step raises what torch says there."""
    on("mps")
    with pytest.raises(StorageNotHeld, match="storage=fp8_e4m3fn: not on Apple M1, M2: .*2.15.*storage=auto"):
        load(comfy, wan, "fp8_e4m3fn", "auto")


def test_fp8_text_encoders_are_refused_too(clip_file, comfy, on):
    on("privateuseone")
    with pytest.raises(StorageNotHeld, match="storage=fp8_e4m3fn: not on DirectML: DirectML has no fp8 .* Use storage=auto"):
        encoder(comfy, clip_file, "fp8_e4m3fn")


@pytest.mark.parametrize("storage", ["as_file", "auto"])
def test_a_file_of_fp8_is_unpacked_where_the_device_cannot_hold_it(comfy, wan, on, storage):
    path = wan.with_name("second_device_fp8.safetensors")
    save_file({name: tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor for name, tensor in load_file(str(wan)).items()}, str(path))
    on("mps")
    model = load(comfy, path, storage, "auto")
    assert bool(torch.isfinite(families.sample(model, "wan", steps=1)).all())
    choice = model.attachments[ATTACHMENT].storage
    assert (choice.used, choice.requested) == ("fp16", storage) and "torch 2.15" in choice.reason


@pytest.fixture
def newer_mac(on, monkeypatch):
    """A Mac with torch 2.15, which holds e4m3 and no other fp8."""
    monkeypatch.setattr("halfsafe.precision.devices.profiles.torch_version", lambda: (2, 15))
    monkeypatch.setattr(metal_rules, "FP8", tuple(each for each in metal_rules.FP8 if each is not FP8))
    return on("mps")


@pytest.mark.parametrize(("dtype", "used"), [(FP8, "as_file"), (torch.float8_e5m2, "fp16")])
def test_a_file_in_an_fp8_that_the_device_cannot_hold_is_unpacked_though_it_holds_another(comfy, wan, newer_mac, dtype, used):
    path = wan.with_name("second_device_one_fp8.safetensors")
    save_file({name: tensor.to(dtype) if tensor.dim() == 2 else tensor for name, tensor in load_file(str(wan)).items()}, str(path))
    model = load(comfy, path, "as_file", "auto")
    choice = record_of(model).storage
    assert choice.used == used and ("cannot hold float8_e5m2 (TypeError: " in choice.reason) == (used == "fp16")
    stored = {getattr(weight, "_qdata", weight).dtype for weight in model.model.diffusion_model.parameters()}
    assert (dtype in stored) == (used == "as_file") and "float8" not in str(stored - {dtype})
    if used == "fp16":
        assert bool(torch.isfinite(families.sample(model, "wan", steps=1)).all())
        with pytest.raises(StorageNotHeld, match="storage=fp8_e5m2: not on Apple M1, M2: It cannot hold float8_e5m2"):
            load(comfy, wan, "fp8_e5m2", "auto")


@pytest.mark.parametrize(("storage", "compute", "held", "bound"), [
    ("as_file", "auto", "fp16", 2e-3), ("auto", "auto", "fp16", 2e-3), ("auto", "fp32", "fp32", 1e-4),
    ("as_file", "fp32", "fp32", 1e-4), ("as_file", "fp16_safe", "fp16", 2e-3), ("int8", "fp32", "fp32", 1e-2),
])  # fmt: skip
def test_a_file_of_bf16_is_right_where_the_device_cannot_hold_it(comfy, wan, clean, on, storage, compute, held, bound):
    on("privateuseone")
    model = load(comfy, wan, storage, compute)
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < bound
    assert torch.bfloat16 not in {weight.dtype for weight in model.model.diffusion_model.parameters()}
    told = [note for note in model.attachments[ATTACHMENT].notes if "cannot hold bf16" in note]
    assert all(f"Weights in bf16 were loaded in {held}" in note for note in told) and (told or storage == "auto")


@pytest.fixture(scope="module")
def fp8_clip(clip_file):
    return in_fp8(clip_file, "second_device_fp8.safetensors")


@pytest.fixture(scope="module")
def expected_text(comfy, fp8_clip):
    """What the file's fp8 numbers give on the CPU, in fp16."""
    tensors = {name: tensor.to(torch.float16) for name, tensor in load_file(str(fp8_clip)).items()}
    save_file(tensors, str(fp8_clip.with_name("second_device_widened.safetensors")))
    return encoded(encoder(comfy, fp8_clip.with_name("second_device_widened.safetensors"), "as_file"))


@pytest.mark.parametrize("kind", ["mps", "privateuseone"])
@pytest.mark.parametrize("storage", ["as_file", "auto"])
def test_a_text_encoder_in_fp8_is_unpacked_where_the_device_cannot_hold_it(comfy, fp8_clip, expected_text, encoder_on, kind, storage):
    encoder_on(kind)
    clip = encoder(comfy, fp8_clip, storage)
    assert relative_error(expected_text, encoded(clip)) < 2e-2
    assert not dtypes(clip.cond_stage_model) & {FP8, torch.bfloat16}
    choice = record_of(clip.patcher).storage
    assert (choice.requested, choice.used) == (storage, "fp16") and choice.reason.startswith("The file is fp8_e4m3fn.")


def in_half(left, right):
    """A product whose sums are in fp16: these overflow where the result does not."""
    return (left.float() @ right.float()).to(left.dtype) * (float("nan") if (left.abs().float() @ right.abs().float()).max() > 65504 else 1)


@pytest.mark.parametrize("kind", ["mps", "privateuseone"])
def test_nothing_is_computed_in_fp16_where_sums_are_in_fp16_too(comfy, wan, on, kind):
    device = on(kind)
    assert detect(device.device()).capabilities["fp16"]
    forget_probes()
    device.book = replace(device.book, answers={torch.ops.aten.mm.default: in_half})
    found = detect(device.device())
    assert not found.capabilities["fp16"] and "adds in fp16 here" in found.reason("fp16")
    assert load(comfy, wan, "as_file", "auto").attachments[ATTACHMENT].storage.used == "as_file"
    assert compute_of(load(comfy, wan, "as_file", "auto")).plan.choice.used == "fp32"


def test_a_text_encoder_on_the_cpu_keeps_its_fp8(comfy, fp8_clip, expected_text, on):
    """A Mac's text encoders are there."""
    on("mps")
    clip = encoder(comfy, fp8_clip, "as_file")
    assert relative_error(expected_text, encoded(clip)) < 2e-2
    assert record_of(clip.patcher).storage.used == "as_file"


@pytest.fixture(scope="module")
def mixed(models_dir):
    """A checkpoint in fp16 of which some layers of each part are in fp8."""
    path = tiny_models.sd15_checkpoint(models_dir / "checkpoints" / "second_device_whole.safetensors")
    return in_fp8(path, "second_device_mixed.safetensors", re.compile(r"attn1\.to_q|layers\.0\.|^first_stage_model").search)


@pytest.fixture(scope="module")
def widened(mixed):
    tensors = {name: tensor.to(torch.float16) for name, tensor in load_file(str(mixed)).items()}
    save_file(tensors, str(mixed.with_name("second_device_mixed_widened.safetensors")))
    return mixed.with_name("second_device_mixed_widened.safetensors")


def parts(comfy, path):
    options = {"storage": "as_file", "compute": "auto", "clip_storage": "as_file", "vae_dtype": "auto"}
    return comfy.run("HalfsafeLoadCheckpoint", ckpt_name=path.name, **options)


@pytest.mark.parametrize("kind", ["mps", "privateuseone"])
def test_each_part_of_a_checkpoint_of_which_some_layers_are_in_fp8(comfy, mixed, widened, encoder_on, kind):
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    _, clip, vae = parts(comfy, widened)
    text, decoded = encoded(clip), vae.decode(latent)
    encoder_on(kind)
    model, clip, vae = parts(comfy, mixed)
    assert bool(torch.isfinite(families.sample(model, "sd15", steps=1, cond=[[text, {}]]).cpu()).all())
    assert relative_error(text, encoded(clip)) < 2e-2 and relative_error(decoded, vae.decode(latent).cpu()) < 2e-2
    for part, patcher in ((model.model, model), (clip.cond_stage_model, clip.patcher)):
        assert not dtypes(part) & {FP8, torch.bfloat16}
        (note,) = [note for note in record_of(patcher).notes if "fp8_e4m3fn" in note]
        assert "weights in fp8_e4m3fn were loaded in fp16: not on" in note
    assert FP8 not in dtypes(vae.first_stage_model)


@pytest.mark.parametrize("dtype", ["auto", "fp16"])
@pytest.mark.parametrize("kind", ["mps", "privateuseone"])
def test_a_vae_in_fp8_is_right(comfy, models_dir, on, kind, dtype):
    path = tiny_models.sd_vae(models_dir / "vae" / "second_device_held.safetensors", dtype=torch.float32)
    path = in_fp8(path, "second_device_held_fp8.safetensors")
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    exact = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype="fp32")[0].decode(latent)
    on(kind)
    vae = comfy.run("HalfsafeLoadVAE", vae_name=path.name, dtype=dtype)[0]
    assert relative_error(exact, vae.decode(latent)) < 2e-2 and FP8 not in dtypes(vae.first_stage_model)
