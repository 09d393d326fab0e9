"""The report against a spy on the products for every family, and the guard for those whose published sizes ComfyUI fixes."""

import pytest
import torch
from support import families, rare_families, tiny_models
from support.families import load, with_compute
from support.guarding import guarded, is_finite, plain_fp16, report_of
from support.matmul_spy import MatmulSpy, differences
from support.measures import relative_error
from support.rows import rotated, the_rest_before_a_release

COMMON = {**tiny_models.FAMILIES, "sdxl": tiny_models.narrow_sdxl}
FAMILIES = (*COMMON, *rare_families.FAMILIES, "cogvideox")
BEFORE_A_RELEASE = ("ace15", "omnigen2", "pixart", "mochi", "stable_audio", "cogvideox")
STORED = rotated(FAMILIES, ["as_file", "int8"], whole=["wan", "sdxl"])


@pytest.fixture(scope="module")
def files(models_dir):
    """family -> its file."""
    made = {}

    def get(family):
        if family not in made:
            path = models_dir / "diffusion_models" / f"ran_{family}.safetensors"
            made[family] = COMMON[family](path) if family in COMMON else rare_families.write(family, path)
        return made[family]

    return get


def disagreements(comfy, model, family):
    sample = families.sample if family in COMMON else rare_families.sample
    sample(model, family, 1)
    with MatmulSpy(model.model.diffusion_model) as spy:
        sample(model, family, 1)
    assert len(spy.seen) > 10
    return differences(families.report(comfy, model)["layers"], spy)


@pytest.mark.parametrize(
    ("family", "storage"),
    the_rest_before_a_release([row for row in STORED if row[0] not in BEFORE_A_RELEASE], STORED),
)
def test_the_report_is_what_ran(comfy, files, ampere, family, storage):
    stored = load(comfy, files(family), storage, "bf16")
    computes = ("fp16", "fp16_safe", "bf16") if storage == "as_file" else ("fp16", "fp16_safe")
    found = {compute: disagreements(comfy, with_compute(comfy, stored, compute), family) for compute in computes}
    assert found == {compute: [] for compute in computes}


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.release) if family in BEFORE_A_RELEASE else family
        for family in rare_families.FAMILIES
    ],
)
def test_an_overflow_is_cured_and_its_layer_named(comfy, files, family):
    source = files(family)
    ((pattern, factor),) = rare_families.LOUD[family].items()
    path = families.write_scaled(source, source.with_name(f"loud_{source.name}"), {pattern: factor})
    reference = rare_families.sample(load(comfy, path, "fp32", "fp32"), family)
    plain = plain_fp16(comfy, path)
    assert is_finite(reference) and not is_finite(rare_families.sample(plain, family, steps=1))
    model = guarded(comfy, plain)
    assert relative_error(reference, rare_families.sample(model, family)) < 0.005
    report = report_of(model)
    assert report.verdict == "recovered" and {event.kind for event in report.events} == {"overflow"}
    assert report.events[0].layer == pattern.replace("\\", "").removeprefix("^").removesuffix(".weight")


def test_an_expert_that_no_token_is_routed_to(comfy, files, monkeypatch):
    """A HiDream of one token, of whose four experts two are given nothing."""
    monkeypatch.setattr(rare_families, "latent", lambda family, model, batch=1: families.noise(model, batch, size=2))
    expected = rare_families.sample(load(comfy, files("hidream"), "fp32", "fp32"), "hidream", steps=1)
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    for storage, compute, bound in (
        ("as_file", "fp16_safe", 1e-3),
        ("int8", "fp16_safe", 0.05),
        ("fp8_e4m3fn", "fp8", 0.1),
    ):
        result = rare_families.sample(load(comfy, files("hidream"), storage, compute), "hidream", steps=1)
        assert relative_error(expected, result) < bound
    assert torch.isfinite(expected).all()
