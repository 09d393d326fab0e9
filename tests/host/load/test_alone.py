"""What a guarded model computes in beside ComfyUI alone, as *Guard this workflow* tells it before a run."""

import comfy.sd
import pytest
from halfsafe.nodes.host.load import alone
from halfsafe.precision.base.dtypes import name_of
from halfsafe.precision.devices.detect import detect
from support import tiny_models


@pytest.mark.parametrize(("profile", "differs"), [("sm_86", True), ("sm_61", False)])
def test_a_model_is_told_that_computes_in_another_dtype_with_comfyui_alone(
    comfy, models_dir, monkeypatch, profile, differs
):
    path = tiny_models.wan(models_dir / "diffusion_models" / "alone.safetensors")
    monkeypatch.setattr(alone, "current_device", lambda: detect(profile=profile))
    model = comfy_model(path)
    core = name_of(model.manual_cast_dtype or model.get_dtype())
    told = alone.computing([("diffusion_models", "alone.safetensors"), ("diffusion_models", "missing.safetensors")])[
        "files"
    ]
    assert told == ([{"file": "alone.safetensors", "guarded": "fp16", "alone": core}] if differs else [])


def comfy_model(path):
    return comfy.sd.load_diffusion_model(str(path)).model
