"""A weight that went bad between its file and the device is told from one that is bad in the file, and from what a cast or a LoRA makes bad."""

import math

import pytest
import torch
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import load_file, save_file
from support import families, model_files
from support.dynamic_vram import dynamic_vram
from support.families import load
from support.guarding import guarded, report_of

LAYER = "blocks.1.self_attn.k"
NAME = f"{LAYER}.weight"


def stopped(model) -> NonFinite:
    with pytest.raises(NonFinite) as error:
        families.sample(model, "wan")
    return error.value


def spoiled(model, value: float = math.nan):
    """A patcher whose weight has a bad value in memory, as of a copy that failed."""
    weight = model.model.diffusion_model.get_submodule(LAYER).weight
    data = weight._qdata if hasattr(weight, "_qdata") else weight.data
    data.view(torch.uint8).reshape(-1)[: data.element_size()] = torch.tensor([value], dtype=data.dtype).view(torch.uint8)
    return model


def by_core(comfy, path, dtype="default"):
    return comfy.core["UNETLoader"]().load_unet(path.name, dtype)[0]


LOADS = {
    "UNETLoader": by_core,
    "as_file": lambda comfy, path: load(comfy, path, "as_file", "bf16"),
    "fp16": lambda comfy, path: load(comfy, path, "fp16", "fp16"),
    "fp8": lambda comfy, path: load(comfy, path, "fp8_e4m3fn", "fp16"),
}


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop"])
@pytest.mark.parametrize("loaded", LOADS)
def test_a_weight_that_is_fine_in_its_file_is_not_blamed_on_the_file(comfy, wan, loaded, on_nan):
    error = stopped(guarded(comfy, spoiled(LOADS[loaded](comfy, wan)), on_nan))
    assert error.verdict == "transfer" and NAME in str(error) and wan.name in str(error) and "--disable-dynamic-vram" in str(error)


def test_infinity_is_compared_too(comfy, wan):
    assert stopped(guarded(comfy, spoiled(by_core(comfy, wan), math.inf))).verdict == "transfer"


def test_a_file_may_hold_another_tensor_whose_name_ends_alike(comfy, wan, models_dir):
    def add(tensors):
        tensors[f"extra.{NAME}"] = torch.zeros(2, 2)

    path = model_files.changed(wan, models_dir / "diffusion_models" / "alike.safetensors", add)
    assert stopped(guarded(comfy, spoiled(by_core(comfy, path)))).verdict == "transfer"


def test_a_report_names_it(comfy, wan):
    model = guarded(comfy, spoiled(by_core(comfy, wan)), "report")
    families.sample(model, "wan")
    report = report_of(model)
    assert report.verdict == "transfer" and report.events[0].layer == LAYER and "The file is fine" in report.advice


@pytest.mark.parametrize("way", ["resident", "prefetched", "transferred"])
def test_a_copy_in_dynamic_vram_that_differs_from_host_memory(comfy, wan, monkeypatch, way):
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
    assert error.verdict == "transfer" and NAME in str(error) and "host memory" in str(error) and torch.isfinite(module.weight).all()


def bad_file(wan, models_dir, value=math.nan):
    path = models_dir / "diffusion_models" / "really_bad.safetensors"
    tensors = load_file(str(wan))
    tensors[NAME][3, 5] = value
    save_file(tensors, str(path))
    return path


def test_a_bad_file_is_still_blamed(comfy, wan, models_dir):
    error = stopped(guarded(comfy, by_core(comfy, bad_file(wan, models_dir))))
    assert error.verdict == "bad_weights" and "really_bad.safetensors" in str(error)


def test_a_bad_file_that_was_replaced_by_a_good_one_is_to_be_loaded_again(comfy, wan, models_dir):
    path = bad_file(wan, models_dir)
    model = guarded(comfy, by_core(comfy, path))
    path.unlink()
    path.write_bytes(wan.read_bytes())
    error = stopped(model)
    assert error.verdict == "transfer" and "replaced since" in str(error) and "Free the model and node cache" in str(error)


def test_a_bad_file_is_still_blamed_in_dynamic_vram(comfy, wan, models_dir):
    model = guarded(comfy, by_core(comfy, bad_file(wan, models_dir)))
    with dynamic_vram(model, "resident"):
        assert stopped(model).verdict == "bad_weights"


def test_a_cast_to_fp8_without_a_scale_is_no_transfer(comfy, wan, models_dir):
    assert stopped(guarded(comfy, by_core(comfy, bad_file(wan, models_dir, 1000.0), "fp8_e4m3fn"))).verdict == "bad_weights"


def test_a_lora_that_makes_a_weight_bad_is_no_transfer(comfy, wan):
    model = by_core(comfy, wan).clone()
    model.add_patches({f"diffusion_model.{NAME}": ("diff", (torch.full((256, 256), math.nan),))}, 1.0)
    assert stopped(guarded(comfy, model)).verdict == "bad_weights"


def test_an_overflow_is_no_transfer(comfy, overflowing):
    model = guarded(comfy, load(comfy, overflowing, "fp16", "fp16"))
    with dynamic_vram(model, "transferred"):
        families.sample(model, "wan")
    assert report_of(model).verdict == "recovered"


def test_a_file_that_is_gone_is_blamed_as_before(comfy, wan, models_dir):
    path = model_files.changed(wan, models_dir / "diffusion_models" / "gone.safetensors", lambda tensors: None)
    model = guarded(comfy, spoiled(load(comfy, path, "as_file", "bf16")))
    path.unlink()
    assert stopped(model).verdict == "bad_weights"
