"""A clean run of every family, in every arithmetic, is silent: each figure is a row of docs/drift.md."""

import pytest
from halfsafe.precision.guard.drift import THRESHOLDS
from support import families, narrow, tiny_models
from support.guarding import guarded, report_of
from support.summing import accumulation

ARITHMETICS = {
    "fp32": ("fp32", "fp32", "cpu"),
    "fp16_safe": ("fp16", "fp16_safe", "cpu"),
    "fp16": ("fp16", "fp16", "cpu"),
    "fp16 sums": ("fp16", "fp16", "sm_86"),
    "bf16": ("bf16", "bf16", "cpu"),
    "fp8 storage": ("fp8_e4m3fn", "bf16", "cpu"),
    "int8": ("int8", "int8", "cpu"),
    "fp8": ("fp8_e4m3fn", "fp8", "sm_89"),
}


@pytest.mark.parametrize("family", families.OVERFLOWS)
def test_a_clean_run_is_silent(comfy, models_dir, monkeypatch, family):
    folder = models_dir / "diffusion_models"
    deep = family == "sdxl"  # of many blocks, whose roundings add up
    path = narrow.sdxl(folder / "drift_sdxl.safetensors", shallow=False) if deep else families.write_narrow(family, folder)
    clean_in(comfy, monkeypatch, family, path, ARITHMETICS)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "arithmetics"), [("qwen_image", ["bf16", "fp8 storage", "int8"])])
def test_a_clean_run_at_the_width_of_the_published_model_is_silent(comfy, models_dir, monkeypatch, family, arithmetics):
    path = families.write(family, models_dir / "diffusion_models")
    clean_in(comfy, monkeypatch, family, path, arithmetics)
    path.unlink()


def clean_in(comfy, monkeypatch, family, path, arithmetics):
    for arithmetic in arithmetics:
        storage, compute, profile = ARITHMETICS[arithmetic]
        monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
        plain = families.load(comfy, path, storage, compute)
        plain = accumulation(comfy, plain, fp16_accumulation="on") if arithmetic == "fp16 sums" else plain
        model = guarded(comfy, plain, check="first step")
        families.sample(model, family, steps=1)
        (check,) = report_of(model).checks
        print(f"\nclean {family} | {arithmetic} | {check.arithmetic} | {check.snr_db:.1f} | {check.threshold_db}")
        assert report_of(model).events == [] and report_of(model).verdict == "clean"
        assert check.arithmetic in (arithmetic, "bf16") and check.arithmetic in THRESHOLDS
        assert check.snr_db >= check.threshold_db and (check.repeats, check.left_out) == (1, "")
        assert len(check.blocks) == 3


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", ["bf16", "fp16", "int8"])
def test_a_clean_run_of_many_blocks_is_silent(comfy, models_dir, arithmetic):
    """Roundings add up from block to block, so thresholds fall with their number."""
    path = tiny_models.wan(models_dir / "diffusion_models" / "drift_deep.safetensors", dim=128, ffn=256, blocks=24)
    model = guarded(comfy, families.load(comfy, path, *ARITHMETICS[arithmetic][:2]), check="first step")
    families.sample(model, "wan", steps=1)
    (check,) = report_of(model).checks
    print(f"\nclean wan of 24 blocks | {arithmetic} | {check.arithmetic} | {check.snr_db:.1f} | {check.threshold_db}")
    assert report_of(model).events == [] and check.threshold_db < THRESHOLDS[check.arithmetic] - 5
