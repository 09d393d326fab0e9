"""The pack in ComfyUI on a Mac, an Intel GPU, DirectML and an NVIDIA card, emulated with values: each by ComfyUI's own branch for it."""

import re
from dataclasses import replace

import pytest
import torch
from comfy import model_management
from comfy.cli_args import args
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.precision.base.errors import StorageNotHeld
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.choice import ATTACHMENT
from safetensors.torch import load_file, save_file
from support import families, tiny_models
from support.families import load
from support.guarding import guarded, plain_fp16, report_of
from support.measures import relative_error
from support.probing import forget_probes

MIB = 1024**2
FP8 = torch.float8_e4m3fn
BOUNDS = {("fp16", "fp16_safe"): 2e-3, ("fp8_e4m3fn", "fp8"): 3e-2, ("int8", "int8"): 1e-2}
KINDS = ("mps", "cuda", "xpu", "privateuseone")


def modes(comfy, model) -> set[str]:
    return {layer["mode"] for layer in families.report(comfy, model)["layers"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_overflows_is_right_in_fp16_safe(comfy, overflowing, cured, on, kind):
    device = on(kind)
    model = load(comfy, overflowing, "fp16", "fp16_safe")
    assert relative_error(cured, families.sample(model, "wan", steps=2)) < 2e-3
    assert ("aten::mm.dtype" in device.operations) is (kind == "cuda"), "a wide result is CUDA's alone"
    assert device.used(device.device()) > 5e6, "the weights are in the device's memory"


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_the_guard_cures_and_the_check_finds_the_cure_right(comfy, overflowing, cured, on, kind):
    on(kind)
    model = guarded(comfy, plain_fp16(comfy, overflowing), check="first step")
    assert relative_error(cured, families.sample(model, "wan", steps=2)) < 2e-3
    report = report_of(model)
    assert report.verdict == "recovered" and report.escalations["blocks.0.ffn.2"] == "fp16_wide"


def test_an_nvidia_card_has_what_is_expected_of_it(on, monkeypatch):
    """Each probe of the device is one that CUDA takes, on the device's tensors too; the rate of fp16 sums alone is not emulated."""
    on("cuda")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = detect()
    expected = found.profile.capabilities | {"fp16_accumulation": False}
    assert found.capabilities == expected, found.reasons


WAYS = [
    ("mps", "int8", "fp16_safe", 6e-3), ("cuda", "int8", "int8", 1e-2), ("cuda", "fp8_e4m3fn", "fp8", 3e-2),
    ("xpu", "fp8_e4m3fn", "auto", 3e-2), ("privateuseone", "int8", "fp16_safe", 6e-3),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "storage", "compute", "bound"), WAYS)
def test_eight_bit_weights_are_right(comfy, wan, clean, on, kind, storage, compute, bound):
    device = on(kind)
    model = load(comfy, wan, storage, compute)
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < bound
    if kind == "cuda":
        assert compute in modes(comfy, model)
        assert {"int8": "aten::_int_mm", "fp8": "aten::_scaled_mm"}[compute] in device.operations


def encoded(clip):
    return clip.encode_from_tokens_scheduled(clip.tokenize("a black image"))[0][0].cpu()


def in_fp8(path, name, chosen=lambda name: True):
    """A copy of a file with matrices in fp8 without a scale, those that ``chosen`` names."""
    tensors = load_file(str(path))
    made = {key: tensor.to(FP8) if tensor.dim() > 1 and chosen(key) else tensor for key, tensor in tensors.items()}
    save_file(made, str(path.with_name(name)))
    return path.with_name(name)


@pytest.fixture
def encoder_on(on, monkeypatch):
    """A machine whose text encoders are on the GPU: a Mac's are on the CPU, but for ``--gpu-only``."""

    def enter(kind):
        monkeypatch.setattr(args, "gpu_only", kind == "mps")
        device = on(kind)
        assert model_management.text_encoder_device().type == kind
        return device

    return enter


def test_fp8_weights_are_refused_where_the_device_cannot_hold_them(comfy, wan, on):
    """Without it the first step raises what the device says."""
    on("privateuseone")
    with pytest.raises(StorageNotHeld, match="storage=fp8_e4m3fn: not on DirectML: .*storage=auto"):
        load(comfy, wan, "fp8_e4m3fn", "auto")


def test_a_file_of_fp8_is_unpacked_where_the_device_cannot_hold_it(comfy, wan, on):
    path = in_fp8(wan, "second_device_fp8.safetensors", lambda name: not name.endswith("patch_embedding.weight"))
    on("privateuseone")
    model = load(comfy, path, "auto", "auto")
    assert bool(torch.isfinite(families.sample(model, "wan", steps=1)).all())
    choice = model.attachments[ATTACHMENT].storage
    assert (choice.used, choice.requested) == ("fp16", "auto") and "not on DirectML" in choice.reason


@pytest.mark.parametrize(("storage", "compute", "held", "bound"), [
    ("as_file", "auto", "fp16", 2e-3), ("auto", "fp32", "fp32", 1e-4), ("int8", "fp32", "fp32", 1e-2),
])  # fmt: skip
def test_a_file_of_bf16_is_right_where_the_device_cannot_hold_it(comfy, wan, clean, on, storage, compute, held, bound):
    on("privateuseone")
    model = load(comfy, wan, storage, compute)
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < bound
    assert torch.bfloat16 not in {weight.dtype for weight in model.model.diffusion_model.parameters()}
    told = [note for note in model.attachments[ATTACHMENT].notes if "cannot hold bf16" in note]
    assert all(f"Weights in bf16 were loaded in {held}" in note for note in told) and (told or storage == "auto")


def dtypes(model) -> set[torch.dtype]:
    return {weight.dtype for weight in model.parameters()}


def in_half(left, right):
    """A product whose sums are in fp16: these overflow where the result does not."""
    return (left.float() @ right.float()).to(left.dtype) * (
        float("nan") if (left.abs().float() @ right.abs().float()).max() > 65504 else 1
    )


@pytest.mark.parametrize("kind", ["mps", "privateuseone"])
def test_nothing_is_computed_in_fp16_where_sums_are_in_fp16_too(comfy, wan, on, kind):
    device = on(kind)
    assert detect(device.device()).capabilities["fp16"]
    forget_probes()
    device.book = replace(device.book, answers={torch.ops.aten.mm.default: in_half})
    found = detect(device.device())
    assert not found.capabilities["fp16"] and "accumulates in fp16 here" in found.reason("fp16")
    assert load(comfy, wan, "as_file", "auto").attachments[ATTACHMENT].storage.used == "as_file"
    assert compute_of(load(comfy, wan, "as_file", "auto")).plan.choice.used == "fp32"


@pytest.fixture(scope="module")
def mixed(models_dir):
    """A checkpoint in fp16 of which some layers of each part are in fp8."""
    path = tiny_models.sd15_checkpoint(models_dir / "checkpoints" / "second_device_whole.safetensors", layers=2)
    return in_fp8(
        path, "second_device_mixed.safetensors", re.compile(r"attn1\.to_q|layers\.0\.|^first_stage_model").search
    )


@pytest.fixture(scope="module")
def widened(mixed):
    tensors = {name: tensor.to(torch.float16) for name, tensor in load_file(str(mixed)).items()}
    save_file(tensors, str(mixed.with_name("second_device_mixed_widened.safetensors")))
    return mixed.with_name("second_device_mixed_widened.safetensors")


def parts(comfy, path):
    options = {"storage": "as_file", "compute": "auto", "clip_storage": "as_file", "vae_dtype": "auto"}
    return comfy.run("HalfsafeLoadCheckpoint", ckpt_name=path.name, **options)


@pytest.fixture(scope="module")
def of_widened(comfy, widened):
    """A latent, and what the checkpoint without fp8 makes of a text and of the latent, on the CPU."""
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    _, clip, vae = parts(comfy, widened)
    with torch.inference_mode():
        return latent, encoded(clip), vae.decode(latent)


@pytest.mark.parametrize("kind", ["mps", pytest.param("privateuseone", marks=pytest.mark.release)])
def test_each_part_of_a_checkpoint_of_which_some_layers_are_in_fp8(comfy, mixed, of_widened, encoder_on, kind):
    latent, text, decoded = of_widened
    encoder_on(kind)
    model, clip, vae = parts(comfy, mixed)
    assert bool(torch.isfinite(families.sample(model, "sd15", steps=1, cond=[[text, {}]]).cpu()).all())
    assert relative_error(text, encoded(clip)) < 2e-2 and relative_error(decoded, vae.decode(latent).cpu()) < 2e-2
    for part, patcher in ((model.model, model), (clip.cond_stage_model, clip.patcher)):
        if kind == "mps":  # whose layers are unpacked by a table
            assert FP8 in {getattr(weight, "storage_dtype", weight.dtype) for weight in part.parameters()}
            continue
        assert not dtypes(part) & {FP8, torch.bfloat16}
        (note,) = [note for note in patcher.attachments[ATTACHMENT].notes if "fp8_e4m3fn" in note]
        assert "weights in fp8_e4m3fn were loaded in fp16: not on" in note
    assert FP8 not in dtypes(vae.first_stage_model)


@pytest.fixture
def room_for_weights_alone(monkeypatch):
    """ComfyUI leaves a GiB and more for activations, which these models do not need."""
    monkeypatch.setattr(model_management, "minimum_inference_memory", lambda: 0)
    monkeypatch.setattr(model_management, "EXTRA_RESERVED_VRAM", 0)


def on_the_host(model) -> int:
    """Bytes of the weights that are in the host's memory."""
    return sum(weight.nbytes for weight in model.model.diffusion_model.parameters() if weight.device.type == "cpu")


@pytest.mark.parametrize(("storage", "compute"), BOUNDS)
def test_weights_in_part_on_the_host_are_right(comfy, wan, clean, on, room_for_weights_alone, storage, compute):
    on("cuda", memory=4 * MIB)
    model = load(comfy, wan, storage, compute)
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < BOUNDS[storage, compute]
    assert on_the_host(model) > MIB


def test_each_card_runs_its_half_of_the_guidance(comfy, overflowing, on):
    """ComfyUI's MultiGPU CFG Split: a thread and a clone for the second card, an overflow on each."""
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    cond = families.conditioning("wan")

    def sampled(model):
        import comfy.sample

        start = families.noise(model)
        return comfy.sample.sample(
            model, start, 2, 3.0, "euler", "simple", cond, uncond, torch.zeros_like(start), seed=1
        )

    uncond = families.conditioning("wan")
    uncond[0][0] = uncond[0][0] * 0.5
    exact = sampled(load(comfy, overflowing, "fp32", "fp32"))
    device = on("cuda", count=2)
    both = MultiGPUCFGSplitNode.execute(guarded(comfy, plain_fp16(comfy, overflowing)), 2).args[0]
    assert relative_error(exact, sampled(both)) < 5e-3
    assert report_of(both).verdict == "recovered" and report_of(both).calls == 4
    assert min(device.used(device.device(index)) for index in (0, 1)) > 5e6, "each card has the weights"
