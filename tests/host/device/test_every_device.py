"""The pack in ComfyUI on a Mac, an Intel GPU, DirectML and an NVIDIA card, emulated with values: each by ComfyUI's own branch for it."""

import re
from dataclasses import replace

import pytest
import torch
from comfy import model_management
from comfy.cli_args import args
from comfy.sd import load_lora_for_models
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.nodes.host.guard.encoders import ATTRIBUTE
from halfsafe.nodes.host.study import analysis
from halfsafe.precision.base.errors import HalfsafeError, StorageNotHeld
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.choice import ATTACHMENT
from safetensors.torch import load_file, save_file
from support import families, model_files, tiny_models
from support.families import load
from support.guarding import guarded, plain_fp16, report_of
from support.held_tensors import is_held
from support.measures import relative_error
from support.probing import forget_probes

MIB = 1024**2
FP8 = torch.float8_e4m3fn
BOUNDS = {("fp16", "fp16_safe"): 2e-3, ("fp8_e4m3fn", "fp8"): 3e-2, ("int8", "int8"): 1e-2}
KINDS = ("mps", "cuda", "xpu", "privateuseone")
LORA = {"blocks.0.ffn.0": (1024, 256), "blocks.1.self_attn.q": (256, 256)}


def modes(comfy, model) -> set[str]:
    return {layer["mode"] for layer in families.report(comfy, model)["layers"]}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_overflows_is_right_in_fp16_safe(comfy, overflowing, cured, on, kind):
    device = on(kind)
    model = load(comfy, overflowing, "fp16", "fp16_safe")
    assert relative_error(cured, families.sample(model, "wan", steps=2)) < 2e-3
    assert ("aten::mm.dtype" in device.operations) is (kind == "cuda"), "a wide result is CUDA's alone"
    assert device.used(device.device()) > 7e6, "the weights are in the device's memory"


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_the_guard_cures_and_the_check_finds_the_cure_right(comfy, overflowing, cured, on, kind):
    on(kind)
    model = guarded(comfy, plain_fp16(comfy, overflowing), check="first step")
    assert relative_error(cured, families.sample(model, "wan", steps=2)) < 2e-3
    report = report_of(model)
    assert report.verdict == "recovered" and report.escalations["blocks.0.ffn.2"] == "fp16_wide"


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
        assert {"int8": "aten::_int_mm", "fp8": "aten::_scaled_mm_v2"}[compute] in device.operations


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_a_lora_beside_eight_bit_weights(comfy, wan, on, kind):
    lora = model_files.lora(LORA, rank=4)

    def sampled(storage, compute):
        return families.sample(load_lora_for_models(load(comfy, wan, storage, compute), None, dict(lora), 0.5, 0.0)[0], "wan", steps=2)

    exact = sampled("fp32", "fp32")
    on(kind)
    assert relative_error(exact, sampled("int8", "fp16_safe")) < 6e-3


@pytest.fixture(scope="module")
def vae_file(models_dir):
    path = tiny_models.sd_vae(models_dir / "vae" / "second_device.safetensors", dtype=torch.float32)
    tensors = load_file(str(path))
    tensors["decoder.mid.block_1.conv2.weight"] *= 2e5
    save_file(tensors, str(path))
    return path


@pytest.mark.parametrize("kind", ["mps", "cuda"])
def test_a_decode_that_overflows_is_made_again(comfy, vae_file, on, kind):
    latent = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(3))
    exact = comfy.run("HalfsafeLoadVAE", vae_name=vae_file.name, dtype="fp32")[0].decode(latent)
    on(kind)
    vae = comfy.run("HalfsafeGuardVAE", vae=comfy.run("HalfsafeLoadVAE", vae_name=vae_file.name, dtype="fp16")[0], on_nan="retry_higher")[0]
    assert relative_error(exact, vae.decode(latent)) < 0.02
    (event,) = getattr(vae, ATTRIBUTE).log.events
    assert (event.from_mode, event.recovered) == ("fp16", True)


def encoded(clip):
    return clip.encode_from_tokens_scheduled(clip.tokenize("a black image"))[0][0].cpu()


def test_analyze_layers_says_what_the_device_cannot_hold_and_measures_the_rest(comfy, models_dir, on, monkeypatch):
    monkeypatch.setattr(analysis, "STEPS", 1)
    path = tiny_models.wan(models_dir / "diffusion_models" / "second_device_small.safetensors", dim=128, blocks=1, ffn=256)
    on("mps")
    model = load(comfy, path, "as_file", "fp16")
    inputs = {
        "latent_image": {"samples": torch.zeros_like(families.noise(model, size=4))}, "positive": families.conditioning("wan"), "seed": 1,
        "target_snr_db": 20.0, "sensitive_layers": "keep high",
    }  # fmt: skip
    with pytest.raises(HalfsafeError, match="fp8_e4m3fn cannot be measured: not on Apple"):
        comfy.run("HalfsafeAnalyzeLayers", model=model, candidate="fp8_e4m3fn", **inputs)
    assert "int8" in comfy.run("HalfsafeAnalyzeLayers", model=model, candidate="int8", **inputs)[1]


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
    """Without it the first step raises what torch says there."""
    on("mps")
    with pytest.raises(StorageNotHeld, match="storage=fp8_e4m3fn: not on Apple M1, M2: .*2.15.*storage=auto"):
        load(comfy, wan, "fp8_e4m3fn", "auto")


def test_a_file_of_fp8_is_unpacked_where_the_device_cannot_hold_it(comfy, wan, on):
    storage = "auto"
    path = wan.with_name("second_device_fp8.safetensors")
    save_file({name: tensor.to(torch.float8_e4m3fn) if tensor.dim() == 2 else tensor for name, tensor in load_file(str(wan)).items()}, str(path))
    on("mps")
    model = load(comfy, path, storage, "auto")
    assert bool(torch.isfinite(families.sample(model, "wan", steps=1)).all())
    choice = model.attachments[ATTACHMENT].storage
    assert (choice.used, choice.requested) == ("fp16", storage) and "torch 2.15" in choice.reason


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
    on("cuda", memory=5 * MIB)
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
        return comfy.sample.sample(model, start, 2, 3.0, "euler", "simple", cond, uncond, torch.zeros_like(start), seed=1)

    uncond = families.conditioning("wan")
    uncond[0][0] = uncond[0][0] * 0.5
    exact = sampled(load(comfy, overflowing, "fp32", "fp32"))
    device = on("cuda", count=2)
    both = MultiGPUCFGSplitNode.execute(guarded(comfy, plain_fp16(comfy, overflowing)), 2).args[0]
    assert relative_error(exact, sampled(both)) < 5e-3
    assert report_of(both).verdict == "recovered" and report_of(both).calls == 4
    assert min(device.used(device.device(index)) for index in (0, 1)) > 7e6, "each card has the weights"


@pytest.mark.not_as_on_cuda("the device has rules of its own")
@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "privateuseone"])
def test_values_and_devices_at_once(on, kind):
    device = on(kind)
    where = device.device()
    x = torch.randn(3, 4)
    y = x.to(where)
    assert type(y) is torch.Tensor and y.device == where and y.is_cuda is (kind == "cuda")
    assert torch.equal((y @ y.t()).cpu(), x @ x.t()) and y.t().stride() == (1, 4)
    assert y[0].fill_(5.0).device == where and y.tolist()[0] == [5.0] * 4
    assert torch.tensor([1.0], device=where).device == torch.zeros(2, device=where).device == where
    assert f"{y.sum():.1f}" and y[[0, 1], [1, 2]].tolist()[0] == 5.0
    layer = torch.nn.Linear(4, 2).to(where)
    assert is_held(layer.weight) and type(layer.weight) is torch.nn.Parameter
    assert not is_held(layer.to("cpu").weight) and not is_held(y.cpu())


@pytest.mark.not_as_on_cuda("the device has rules of its own")
@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_tensors_of_two_devices_are_not_mixed(on, kind):
    device = on(kind, count=2) if kind == "cuda" else on(kind)
    x, y = torch.ones(2), torch.ones(2, device=device.device())
    assert (y + torch.tensor(2.0)).tolist() == [3.0, 3.0], "a number of the host is no tensor"
    with pytest.raises(RuntimeError, match="same device.*cpu and (cuda|mps):0"):
        y + x
    if kind == "cuda":
        with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
            y + torch.ones(2, device=device.device(1))


REFUSED = {
    "a product in another dtype": ("mps", RuntimeError, "Failed to create function", lambda d: torch.mul(torch.ones(2, device=d), 0.5, out=torch.ones(2, device=d).half())),
    "fp8 on Metal": ("mps", TypeError, "Trying to convert Float8_e4m3fn", lambda d: torch.ones(2, device=d).to(torch.float8_e4m3fn)),
    "int8 on Metal": ("mps", NotImplementedError, "_int_mm", lambda d: torch._int_mm(*[torch.ones(32, 32, device=d).to(torch.int8)] * 2)),
    "a wide product on XPU": ("xpu", NotImplementedError, "mm.dtype", lambda d: torch.mm(*[torch.ones(2, 2, device=d).half()] * 2, out_dtype=torch.float32)),
    "bf16 on DirectML": ("privateuseone", RuntimeError, "unsupported data type Bfloat16", lambda d: torch.ones(2).bfloat16().to(d)),
    "two dtypes on CUDA": ("cuda", RuntimeError, "same dtype", lambda d: torch.mm(torch.ones(2, 2, device=d), torch.ones(2, 2, device=d).half())),
}  # fmt: skip


@pytest.mark.not_as_on_cuda("the device has rules of its own")
@pytest.mark.parametrize("what", REFUSED)
def test_the_rule_book_refuses(on, what):
    kind, error, words, action = REFUSED[what]
    where = on(kind).device()
    with pytest.raises(error, match=words):
        action(where)
