"""The report against a spy on the products, for every family at its smallest and those that Halfsafe has no rules for."""

import pytest
from support import families, held_out, tiny_models
from support.families import load, with_compute
from support.matmul_spy import MatmulSpy, differences

COMPUTES = ("fp16", "fp16_safe", "bf16", "fp32")
STORAGES = ("as_file", "fp8_e4m3fn", "int8")


@pytest.fixture(scope="module")
def made(comfy, models_dir):
    """family -> its file and a call of it."""
    known = {}

    def get(family):
        if family not in known:
            path = models_dir / "diffusion_models" / f"ran_{family}.safetensors"
            known[family] = path, held_out.file_and_call(comfy, family, path)
        return known[family]

    return get


def disagreements(comfy, model, call):
    families.replay(model, call)
    with MatmulSpy(model.model.diffusion_model) as spy:
        families.replay(model, call)
    return differences(families.report(comfy, model)["layers"], spy)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("family", [*tiny_models.FAMILIES, *held_out.FAMILIES])
def test_the_report_is_what_ran(comfy, made, monkeypatch, family, storage):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    path, call = made(family)
    stored, found = load(comfy, path, storage, "bf16"), {}
    for compute in COMPUTES:
        found[compute] = disagreements(comfy, with_compute(comfy, stored, compute), call)
    assert found == {compute: [] for compute in COMPUTES}
