"""A weight that is NaN or Inf in memory is told with what its file holds; one whose copy on the device alone is bad is the device's fault."""

import contextlib
import math

import pytest
import torch
from halfsafe.precision.base.message import messages_in
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, model_files
from support.dynamic_vram import WAYS, dynamic_vram
from support.families import load
from support.guarding import guarded, report_of
from support.rows import all_of, rotated

LAYER = "blocks.1.self_attn.k"
NAME = f"{LAYER}.weight"


def stopped(model) -> NonFinite:
    with pytest.raises(NonFinite) as error:
        families.sample(model, "wan")
    return error.value


def spoiled(model, value: float = math.nan, own: str = "weight"):
    """A patcher whose weight has a bad value in memory, as of a copy that failed."""
    weight = getattr(model.model.diffusion_model.get_submodule(LAYER), own)
    data = weight._qdata if hasattr(weight, "_qdata") else weight.data
    data.view(torch.uint8).reshape(-1)[: data.element_size()] = torch.tensor([value], dtype=data.dtype).view(
        torch.uint8
    )
    return model


def by_core(comfy, path, dtype="default"):
    return comfy.core["UNETLoader"]().load_unet(path.name, dtype)[0]


LOADS = {
    "UNETLoader": by_core,
    "fp16": lambda comfy, path: load(comfy, path, "fp16", "fp16"),
    "fp8": lambda comfy, path: load(comfy, path, "fp8_e4m3fn", "fp16"),
}


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop"])
@pytest.mark.parametrize("loaded", LOADS)
def test_a_bad_weight_that_is_finite_in_its_file_is_told_so(comfy, wan, loaded, on_nan):
    error = stopped(guarded(comfy, spoiled(LOADS[loaded](comfy, wan)), on_nan))
    assert error.verdict == "bad_weights" and NAME in str(error) and f"is finite in {wan.name}" in str(error)
    told = messages_in(error.problem)[error.problem]
    assert told["values"].keys() == {"culprit", "cure"}, "the page reads them by these names"


def test_infinity_is_told_too(comfy, wan):
    assert "is finite in" in str(stopped(guarded(comfy, spoiled(by_core(comfy, wan), math.inf))))


@pytest.mark.parametrize(
    ("way", "storage", "own"),
    rotated(["static", *WAYS], all_of(["fp16", "fp8_e5m2"], ["weight", "bias"]), whole=["static"]),
)
def test_infinity_is_told_however_the_weights_reach_the_device(comfy, wan, storage, way, own):
    """Dynamic VRAM multiplies by copies, also by those that lie in its pages since an earlier call."""
    model = guarded(comfy, spoiled(load(comfy, wan, storage, "bf16"), math.inf, own))
    with contextlib.nullcontext() if way == "static" else dynamic_vram(model, way):
        error = stopped(model)
    assert error.verdict == "bad_weights" and f"{LAYER}.{own}" in str(error)


def test_a_file_that_is_gone_is_not_said_to_be_finite(comfy, wan, models_dir):
    path = model_files.changed(wan, models_dir / "diffusion_models" / "gone.safetensors", lambda tensors: None)
    model = guarded(comfy, spoiled(load(comfy, path, "as_file", "bf16")))
    path.unlink()
    error = stopped(model)
    assert error.verdict == "bad_weights" and "is finite in" not in str(error)


@pytest.mark.parametrize("way", ["resident", "transferred"])
def test_a_copy_in_dynamic_vram_that_differs_from_host_memory_is_the_devices_fault(comfy, wan, monkeypatch, way):
    model = guarded(comfy, load(comfy, wan, "as_file", "bf16"))
    module = model.model.diffusion_model.get_submodule(LAYER)
    with dynamic_vram(model, way) as lender:
        own = lender._transfer

        def transfer(layer, buffer):
            fresh = layer._v_signature is None
            own(layer, buffer)
            if layer is module and fresh:
                layer._prefetch["xfer_dest"][:2] = 255

        monkeypatch.setattr(lender, "_transfer", transfer)
        error = stopped(model)
    assert (
        error.verdict == "device_fault"
        and NAME in str(error)
        and "finite in host memory" in str(error)
        and torch.isfinite(module.weight).all()
    )


def test_an_overflow_in_dynamic_vram_is_no_fault_of_the_device(comfy, overflowing):
    model = guarded(comfy, load(comfy, overflowing, "fp16", "fp16"))
    with dynamic_vram(model, "transferred"):
        families.sample(model, "wan")
    assert report_of(model).verdict == "recovered"
