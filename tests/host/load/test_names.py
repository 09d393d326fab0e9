"""Names of files that no file can have: a clear error, from every node and command that takes one."""

import pytest
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.plan.rules import rules_from
from support import families

NUL = "wan\0.safetensors"
LOADERS = {
    "HalfsafeLoadDiffusionModel": {"model_name": NUL, "storage": "auto", "compute": "auto"},
    "HalfsafeLoadCheckpoint": {"ckpt_name": NUL, "storage": "auto", "compute": "auto", "clip_storage": "auto", "vae_dtype": "auto"},
    "HalfsafeLoadCLIP": {"clip_name1": NUL, "type": "wan", "storage": "auto", "compute": "auto"},
    "HalfsafeLoadVAE": {"vae_name": NUL, "dtype": "auto"},
}


@pytest.mark.parametrize("node", LOADERS)
def test_a_nul_in_a_file_s_name_is_told_by_loaders(comfy, node):
    with pytest.raises(HalfsafeError, match="(?i)null|no such file"):
        comfy.run(node, **LOADERS[node])


@pytest.mark.parametrize("prefix", ["diffusion_models/a\0b", "a\0/b"])
def test_a_nul_in_a_prefix_is_told_by_the_saver(comfy, wan, prefix):
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    with pytest.raises(HalfsafeError, match="(?i)null"):
        node.execute(families.load(comfy, wan), prefix, "as_file", None)


def test_a_nul_is_told_by_convert_on_either_side(wan, tmp_path):
    for source, target in ((tmp_path / NUL, tmp_path / "a.safetensors"), (wan, tmp_path / NUL)):
        with pytest.raises(HalfsafeError, match="(?i)null"):
            convert_file(source, target, "bf16", rules_from())
    assert list(tmp_path.iterdir()) == []


def test_a_product_that_cannot_run_in_fp8_is_told_once(comfy, wan, call, monkeypatch, caplog):
    import comfy_kitchen.tensor.fp8 as kitchen
    from halfsafe.nodes.host.comfyui.kernels import _once
    from halfsafe.nodes.host.compute import fp8_product

    def refused(*args, **options):
        raise RuntimeError("no such product on this device")

    _once.seen.clear()
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(kitchen, "_fp8_scaled_mm", refused)
    monkeypatch.setattr(fp8_product, "scaled_mm_v2", refused)
    model = families.load(comfy, wan, "fp8_e4m3fn", "fp8")
    for _ in range(2):
        families.replay(model, call)
    assert sum("no such product" in record.getMessage() for record in caplog.records) == 1
