"""Whole models on a real device: the plans, the guard, memory, and that nothing is left behind."""

import gc
import importlib
import warnings

import pytest
import torch
from halfsafe.nodes.host.run.compute import compute_of
from support import families, tiny_models
from support.families import load
from support.guarding import guarded, is_finite, plain_fp16, report_of
from support.measures import relative_error
from support.summing import accumulation, states


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "gpu_overflowing.safetensors")


@pytest.fixture(scope="module")
def reference(comfy, overflowing):
    return families.sample(load(comfy, overflowing, "fp32", "fp32"), "wan").cpu()


@pytest.mark.parametrize("storage", ["as_file", "fp16", "fp8_e4m3fn"])
def test_fp16_safe_is_finite_and_right(comfy, overflowing, reference, storage):
    model = load(comfy, overflowing, storage, "fp16_safe")
    expected = reference if storage != "fp8_e4m3fn" else families.sample(load(comfy, overflowing, storage, "fp32"), "wan").cpu()
    for _ in range(2):
        assert relative_error(expected, families.sample(model, "wan").cpu()) < 0.01
    assert compute_of(model).runs.last(model.model).fp16_share() > 0.9


def test_the_guard_recovers_and_does_not_repeat_afterwards(comfy, overflowing, reference):
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    assert relative_error(reference, families.sample(model, "wan").cpu()) < 0.02
    assert report_of(model).verdict == "recovered"
    assert relative_error(reference, families.sample(model, "wan").cpu()) < 0.02
    assert report_of(model).extra_calls == 0


@pytest.mark.parametrize("family", ["flux", "sd3", "sdxl"])
def test_families_under_the_guard(comfy, models_dir, family):
    clean = families.write(family, models_dir / "diffusion_models")
    target = models_dir / "diffusion_models" / f"gpu_{family}.safetensors"
    path = families.write_scaled(clean, target, families.OVERFLOWS[family]["ffn"])
    expected = families.sample(load(comfy, path, "fp32", "fp32"), family).cpu()
    model = guarded(comfy, plain_fp16(comfy, path))
    assert relative_error(expected, families.sample(model, family).cpu()) < 0.02


def test_fp16_sums_are_scoped_and_right(comfy, overflowing, gaining):
    before = states()
    clean = tiny_models.wan(overflowing.with_name("gpu_clean.safetensors"))
    plain = plain_fp16(comfy, clean)
    expected = families.sample(load(comfy, clean, "fp32", "fp32"), "wan").cpu()
    model = accumulation(comfy, plain, fp16_accumulation="auto")
    assert relative_error(expected, families.sample(model, "wan").cpu()) < 0.02
    assert states() == before


def test_fp8_products_are_right(comfy, overflowing, capabilities):
    if not capabilities["fp8_matmul"]:
        pytest.skip("no fp8 products here")
    clean = tiny_models.wan(overflowing.with_name("gpu_fp8.safetensors"))
    expected = families.sample(load(comfy, clean, "fp8_e4m3fn", "fp32"), "wan").cpu()
    assert relative_error(expected, families.sample(load(comfy, clean, "fp8_e4m3fn", "fp8"), "wan").cpu()) < 0.1


def test_device_memory_is_flat_over_runs(comfy, overflowing, device):
    if device.type != "cuda":
        pytest.skip("counts CUDA memory")
    model, taken = guarded(comfy, plain_fp16(comfy, overflowing)), []
    for _ in range(6):
        families.sample(model, "wan")
        gc.collect()
        torch.cuda.synchronize()
        taken.append(torch.cuda.memory_allocated())
    assert taken[-1] <= taken[1]


def waits(model) -> int:
    """How often a clean call makes the host wait, whoever asks for it."""
    call = families.capture(model, "wan")
    families.replay(model, call)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            families.replay(model, call)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("compute", ["fp16", "fp16_safe"])
@pytest.mark.parametrize("with_guard", [False, True])
def test_a_clean_call_reads_back_once(comfy, models_dir, device, compute, with_guard):
    if device.type != "cuda":
        pytest.skip("counts CUDA synchronisations")
    path = tiny_models.wan(models_dir / "diffusion_models" / "gpu_sync.safetensors")
    model = load(comfy, path, "fp16", compute)
    reads = (compute == "fp16_safe") + with_guard
    assert waits(guarded(comfy, model) if with_guard else model) <= waits(plain_fp16(comfy, path)) + reads


def test_a_checkpoint_is_right_after_offloading(comfy, overflowing, reference):
    model = guarded(comfy, load(comfy, overflowing, "as_file", "fp16_safe"))
    families.sample(model, "wan")
    importlib.import_module("comfy.model_management").unload_all_models()
    result = families.sample(model, "wan").cpu()
    assert is_finite(result) and relative_error(reference, result) < 0.01
