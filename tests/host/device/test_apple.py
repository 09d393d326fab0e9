"""8-bit weights on an emulated Mac, whose torch casts no fp8 and has no int8 product: by each loader, beside LoRAs, in text encoders, saved."""

from __future__ import annotations

import contextlib

import pytest
import torch
from comfy.cli_args import args
from comfy.quant_ops import QuantizedTensor
from halfsafe.nodes.host.load.halving import halving
from halfsafe.precision.base.errors import HalfsafeError, StorageNotHeld
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.plan.choice import ATTACHMENT
from halfsafe.precision.study.candidates import Candidate
from safetensors.torch import load_file, save_file
from support import compose, composing, control_files, families, tiny_models
from support.composing import Composer
from support.families import load
from support.guarding import report_of
from support.measures import relative_error
from support.rows import all_of, rotated, the_rest_before_a_release

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BOUND = {"fp8_e4m3fn": 5e-2, "fp8_e5m2": 9e-2, "int8": 1e-2}


def held(model) -> set[torch.dtype]:
    """The dtypes of the data of a model's matrices."""
    weights = [weight for weight in model.model.diffusion_model.parameters() if weight.dim() == 2]
    return {getattr(weight, "storage_dtype", weight.dtype) for weight in weights}


@pytest.fixture(scope="module")
def plain(wan):
    """Files of fp8 without a scale, convolutions, biases and norms too, by storage."""
    made = {}
    for storage, dtype in (("fp8_e4m3fn", E4M3), ("fp8_e5m2", E5M2)):
        made[storage] = wan.with_name(f"apple_{storage}.safetensors")
        save_file({name: tensor.to(dtype) for name, tensor in load_file(str(wan)).items()}, str(made[storage]))
    return made


@pytest.mark.parametrize("fp8", [E4M3, E5M2, torch.float8_e4m3fnuz])
def test_the_emulated_mac_moves_and_views_fp8_and_casts_none(on, fp8):
    there = on("mps").device()
    numbers = torch.arange(64, dtype=torch.uint8).view(8, 8).view(fp8)
    moved = numbers.to(there)
    assert torch.equal(moved.view(torch.uint8).cpu(), numbers.view(torch.uint8))
    assert torch.equal(moved.clone().cpu().float(), numbers.float())
    assert numbers.to(there, torch.float16).device.type == "mps", "cast on the CPU, then moved"
    refused = {
        "Trying to convert": [lambda: moved.half(), lambda: moved.to("cpu", torch.float32), lambda: moved.mul(2)],
        "Undefined type": [lambda: moved.t().contiguous()],
        "Expected dtype int32": [lambda: torch.ones(256, device=there).index_select(0, moved.view(torch.uint8).view(-1))],
    }  # fmt: skip
    for words, operations in refused.items():
        for operation in operations:
            with pytest.raises((TypeError, RuntimeError), match=words):
                operation()


@pytest.mark.parametrize("storage", BOUND)
def test_a_model_stays_in_8_bits_in_the_memory_of_the_device(comfy, wan, clean, on, storage):
    device = on("mps")
    model = load(comfy, wan, storage, "auto")
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < BOUND[storage]
    sizes = {weight.nbytes if isinstance(weight, QuantizedTensor) else 0 for weight in model.model.parameters()}
    (dtype,) = held(model) - {torch.float16}
    assert dtype.itemsize == 1 and max(sizes) > 0
    assert device.used(device.device()) < 1.1 * sum(weight.nbytes for weight in model.model.parameters())


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
def test_a_file_of_fp8_stays_as_it_is(comfy, plain, clean, on, storage):
    on("mps")
    model = load(comfy, plain[storage], "auto", "auto")
    assert relative_error(clean, families.sample(model, "wan", steps=2)) < 2 * BOUND[storage]
    assert held(model) <= {E4M3, E5M2, torch.float16} and len(held(model) - {torch.float16}) == 1
    assert model.attachments[ATTACHMENT].storage.used == "as_file"


@pytest.mark.parametrize("name", ["fp8_e4m3fn", "fp8_e5m2"])
def test_weights_are_rounded_to_fp8_for_studies_and_calibrations_as_on_a_cpu(on, name):
    weight, row = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)), FORMAT_OF_STORAGE[name]
    scale, candidate = {"weight_scale": torch.tensor(2.0**-6)}, Candidate(name)
    roundings = (
        lambda weight: row.nearest(weight, scale), lambda weight: row.codes(weight, scale).view(torch.uint8),
        lambda weight: candidate.rounded(weight, weight.abs().max().item()),
    )  # fmt: skip
    expected, there = [each(weight) for each in roundings], on("mps").device()
    for each, right in zip(roundings, expected, strict=True):
        assert torch.equal(each(weight.to(there)).cpu(), right)


@pytest.mark.parametrize("storage", BOUND)
def test_a_check_compares_the_first_step_in_fp32(comfy, wan, on, storage):
    on("mps")
    inputs = {"on_nan": "retry_higher", "max_retries": 8, "check": "first step"}
    model = comfy.run("HalfsafeNaNGuard", model=load(comfy, wan, storage, "auto"), **inputs)[0]
    families.sample(model, "wan", steps=1)
    (check,) = report_of(model).checks
    assert check.left_out == "" and check.snr_db > 20


def by_comfyui(comfy, path, dtype="default"):
    return comfy.core["UNETLoader"]().load_unet(path.name, dtype)[0]


NODES, CASTS = ("HalfsafeAutoPrecision", "HalfsafeComputeDtype"), ("fp8_e4m3fn", "fp8_e5m2")


@pytest.mark.parametrize(("node", "cast"), the_rest_before_a_release(rotated(NODES, CASTS), all_of(NODES, CASTS)))
def test_what_comfyuis_own_loader_casts_to_fp8_is_multiplied_behind_a_node(comfy, wan, clean, on, node, cast):
    on("mps")
    model = by_comfyui(comfy, wan, cast)
    with pytest.raises(TypeError, match="to the MPS backend"):
        families.sample(model, "wan", steps=1)
    options = {"goal": "balanced"} if node == "HalfsafeAutoPrecision" else {"compute": "auto"}
    behind = comfy.run(node, model=model, **options)[0]
    assert relative_error(clean, families.sample(behind, "wan", steps=2)) < 2 * BOUND[cast]
    assert {E4M3, E5M2} & held(behind), "it is not widened"
    assert behind.model is not model.model and held(model) == held(by_comfyui(comfy, wan, cast))


def test_halving_the_memory_exchanges_the_loader_that_fails_there(wan, on):
    """ComfyUI's own with ``weight_dtype`` in fp8: it has 8 bits already, and no layer of it runs."""
    loaders = [{"folder": "diffusion_models", "names": [wan.name], "in_8_bits": True}]
    (before,) = halving(loaders)["loaders"]
    assert before["reason"].endswith("in 8 bits or fewer already")
    on("mps")
    (found,) = halving(loaders)["loaders"]
    assert (found["reason"], found["storage"]) == ("", "int8")


def test_code_that_holds_the_modules_of_such_a_model_is_named(comfy, wan, on):
    on("mps")
    model = by_comfyui(comfy, wan, "fp8_e4m3fn")
    model.add_object_patch("diffusion_model.blocks.0.ffn.0.forward", lambda x: x)
    with pytest.raises(HalfsafeError, match="diffusion_model.blocks.0.ffn.0.forward holds its modules"):
        comfy.run("HalfsafeAutoPrecision", model=model, goal="balanced")


@pytest.fixture(scope="module")
def composer(comfy, models_dir):
    return Composer(comfy, models_dir)


ROWS = [
    f"family=wan source={source} storage={storage} stored_by=file {rest}"
    for storage in ("fp8_e4m3fn", "int8")
    for source, rest in (
        ("core", "nodes=H lora=behind end=unload"), ("core", "nodes=C lora=before compute=bf16"),
        ("core", "nodes=G lora=before"), ("ours", "nodes=G lora=both end=save"), ("ours", "nodes=H lora=hook"),
    )
]  # fmt: skip
ROWS += [
    "family=wan source=core storage=fp8_e5m2 stored_by=file nodes=G lora=before",
    "family=flux source=core storage=fp8_e4m3fn stored_by=file nodes=H weights=overflowing merge=whole",
]


@pytest.mark.parametrize("row", ROWS)
def test_quantized_files_are_right_beside_loras_guards_and_savers(composer, row, on, monkeypatch):
    """The judge is ComfyUI alone on a CPU, whose answers are made before the machine is a Mac."""
    case, real = compose.case_of(row), composing.on_card
    composer.bound(case, {**case, **composing.PLAIN}), composer.bound(case, case)
    monkeypatch.setattr(composing, "on_card", lambda profile: contextlib.nullcontext() if profile else real(profile))
    monkeypatch.setattr(composing, "differences", lambda *found: [])  # the spy knows a wide product by CUDA's operation
    on("mps")
    found = composer.judge(case)
    assert found.kind == "right", f"{found.text}\n{row}"


def encoded(clip) -> torch.Tensor:
    return clip.encode_from_tokens_scheduled(clip.tokenize("a black image"))[0][0].cpu()


@pytest.fixture(scope="module")
def encoder(models_dir):
    """A text encoder in fp16, and in fp8 whole: embeddings, norms and biases too."""
    path = tiny_models.narrow_clip_l(models_dir / "text_encoders" / "apple_clip_l.safetensors")
    fp8 = {
        name: tensor.to(E4M3) if tensor.is_floating_point() else tensor for name, tensor in load_file(str(path)).items()
    }
    save_file(fp8, str(path.with_name("apple_clip_l_fp8.safetensors")))
    return path


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8", "as_file"])
def test_a_text_encoder_on_the_gpu_of_a_mac(comfy, encoder, on, monkeypatch, storage):
    """As ``--gpu-only`` has it: without it a Mac's encoders are on the CPU."""
    name = {"as_file": "apple_clip_l_fp8.safetensors"}.get(storage, encoder.name)
    inputs = {"type": "stable_diffusion", "compute": "auto"}
    right = encoded(comfy.run("HalfsafeLoadCLIP", clip_name1=encoder.name, storage="fp16", **inputs)[0])
    monkeypatch.setattr(args, "gpu_only", True)
    on("mps")
    clip = comfy.run("HalfsafeLoadCLIP", clip_name1=name, storage=storage, **inputs)[0]
    assert relative_error(right, encoded(clip)) < 0.1 and clip.patcher.load_device.type == "mps"
    dtypes = {getattr(weight, "storage_dtype", weight.dtype) for weight in clip.cond_stage_model.parameters()}
    assert {E4M3, torch.int8} & dtypes


@pytest.mark.parametrize(("storage", "bound"), [("fp8_e4m3fn", 0.06), ("int8", 0.02)])
def test_a_controlnet(comfy, models_dir, on, monkeypatch, storage, bound):
    path = control_files.sd15(models_dir / "controlnet" / "apple_control.safetensors")

    def given(storage, compute="fp16_safe"):
        options = {"control_net_name": path.name, "storage": storage, "compute": compute}
        return control_files.give(comfy.run("HalfsafeLoadControlNet", **options)[0], "sd15").cpu()

    right, inputs = given("fp32", "fp32"), control_files._inputs
    there = on("mps").device()
    on_device = lambda *which: {name: value.to(there) for name, value in inputs(*which).items()}  # noqa: E731
    monkeypatch.setattr(control_files, "_inputs", on_device)
    assert 0 < relative_error(right, given(storage)) < bound


@pytest.mark.parametrize("storage", ["nvfp4", "mxfp8"])
def test_weights_whose_scales_are_fp8_are_unpacked_by_our_loader_and_refused_behind_another(
    comfy, composer, on, storage
):
    path = composer.file("wan", "in_range", storage)
    right = composer.alone(compose.case_of("family=wan"), torch.float32)
    on("mps")
    ours = load(comfy, path, "as_file", "auto")
    assert held(ours) <= {torch.float16, torch.bfloat16}
    assert relative_error(right, composer.sample(compose.case_of("family=wan"), ours)) < 0.15
    assert [note for note in ours.attachments[ATTACHMENT].notes if f"weights in {storage} were loaded in" in note]
    with pytest.raises(
        StorageNotHeld, match=f"{storage} weights: not on Apple M1, M2: torch does not cast .*which unpacks"
    ):
        comfy.run("HalfsafeAutoPrecision", model=by_comfyui(comfy, path), goal="balanced")
