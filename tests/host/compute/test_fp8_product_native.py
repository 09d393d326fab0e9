"""``auto`` of an fp8 file where the device has fp8 products: ComfyUI multiplies such a file in fp8 with a scale of 1, and so do we, with a scale of the input."""

import logging
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from comfy import model_management as comfy_management
from support import dialects, families, model_files, tiny_models
from support.families import load, with_compute
from support.matmul_spy import Products
from support.measures import functions_run, relative_error
from support.model_files import WAN_LINEARS

FP8_CARDS = ("sm_89", "sm_120")


@pytest.fixture(autouse=True)
def card(request, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", getattr(request, "param", "sm_89"))
    monkeypatch.setattr(comfy_management, "supports_fp8_compute", lambda device=None: True)
    monkeypatch.setattr(logging.getLogger("comfy_kitchen.tensor.fp8"), "disabled", True)


@pytest.fixture(scope="module")
def scaled(wan, models_dir):
    return model_files.in_dialect(
        wan, models_dir / "diffusion_models" / "native_scaled.safetensors", dialects.comfy_quant
    )


@pytest.fixture(scope="module")
def full_precision(wan, models_dir):
    target = models_dir / "diffusion_models" / "native_full.safetensors"
    return model_files.in_dialect(wan, target, dialects.comfy_quant, settings={"full_precision_matrix_mult": True})


def by_core(comfy, path):
    """As on such a card, where ComfyUI computes in bf16: on a CPU it would in fp32."""
    with mock.patch.object(comfy_management, "unet_manual_cast", lambda *given, **options: torch.bfloat16):
        return comfy.core["UNETLoader"]().load_unet(path.name, "default")[0]


def multiplied(model, call) -> dict[str, str]:
    """Layer -> what the operation itself multiplied, of the layers that the file has in fp8."""
    modules = dict(model.model.diffusion_model.named_modules())
    with Products({name: modules[name] for name in WAN_LINEARS}) as spy:
        families.replay(model, call)
    return spy.modes()


def says_so(comfy, model) -> None:
    report = families.report(comfy, model)
    assert {
        entry["name"]: entry["mode"] for entry in report["layers"] if entry["name"] in WAN_LINEARS
    } == dict.fromkeys(WAN_LINEARS, "fp8")
    assert (
        "multiply in fp8" in report["decisions"]["compute"] and "1.4 times the error" in report["decisions"]["compute"]
    )


@pytest.mark.parametrize("card", FP8_CARDS, indirect=True)
@pytest.mark.parametrize("write", [dialects.comfy_quant, dialects.quantization_metadata, dialects.scaled_fp8])
def test_a_scaled_fp8_file_multiplies_in_fp8_and_its_cost_is_told(comfy, wan, models_dir, call, card, write):
    path = model_files.in_dialect(wan, models_dir / "diffusion_models" / f"native_{write.__name__}.safetensors", write)
    model = load(comfy, path, "auto", "auto")
    assert set(multiplied(model, call).values()) == {"fp8"}
    says_so(comfy, model)


@pytest.mark.parametrize("card", ["sm_90"], indirect=True)
def test_on_hopper_a_narrow_layer_is_unpacked_unless_its_product_is_requested(comfy, scaled, call, card):
    unpacked, requested = (load(comfy, scaled, "auto", compute) for compute in ("auto", "fp8"))
    assert "fp8" not in multiplied(unpacked, call).values() and {*multiplied(requested, call).values()} == {"fp8"}
    reasons = {layer["name"]: layer["reason"] for layer in families.report(comfy, unpacked)["layers"]}
    assert all("from 3072 inputs and outputs on" in reasons[name] for name in WAN_LINEARS)


@pytest.mark.parametrize("goal", ["balanced", "speed", "memory"])
@pytest.mark.parametrize(
    "loaded", [by_core, lambda comfy, path: load(comfy, path, "auto", "bf16")], ids=["core", "ours"]
)
def test_so_does_the_one_node_with_any_loaders_model(comfy, scaled, call, loaded, goal):
    model, _, _, why = comfy.run("HalfsafeAutoPrecision", model=loaded(comfy, scaled), goal=goal, guard="off")
    assert set(multiplied(model, call).values()) == {"fp8"}
    if goal == "speed":  # asks for fp8
        assert "fp8 products. fp8 ran at 1.27 to 1.45 times" in why
    else:
        says_so(comfy, model)


def test_a_scale_of_the_input_keeps_what_a_scale_of_1_clips(comfy, scaled, call):
    """A channel a thousand times larger in the text: core's own loader clips it at 448."""
    loud = families.louder(call, 1000)
    exact = families.replay(load(comfy, scaled, "as_file", "fp32"), call, c_crossattn=loud)
    ours, core = (families.replay(model, call, c_crossattn=loud) for model in (
        load(comfy, scaled, "auto", "auto"), by_core(comfy, scaled),
    ))  # fmt: skip
    assert relative_error(exact, ours) < relative_error(exact, core) / 2


@pytest.mark.parametrize(
    "loaded", [by_core, lambda comfy, path: load(comfy, path, "auto", "auto")], ids=["core", "ours"]
)
def test_a_file_that_asks_for_full_precision_is_unpacked(comfy, full_precision, call, loaded):
    model = with_compute(comfy, loaded(comfy, full_precision), "auto")
    assert "fp8" not in multiplied(model, call).values()
    assert "compute=fp8 multiplies them as stored" in families.report(comfy, model)["decisions"]["compute"]


def test_the_goal_quality_and_a_dtype_that_is_asked_for_unpack(comfy, scaled, call):
    quality, *_ = comfy.run("HalfsafeAutoPrecision", model=by_core(comfy, scaled), goal="quality", guard="off")
    for model in (quality, load(comfy, scaled, "auto", "bf16"), load(comfy, scaled, "bf16", "auto")):
        assert "fp8" not in multiplied(model, call).values()


def test_fp8_made_here_and_files_without_scales_are_unpacked_as_in_comfyui(comfy, wan, models_dir, call):
    path = model_files.in_dialect(
        wan, models_dir / "diffusion_models" / "native_plain.safetensors", dialects.plain, dtype=torch.float8_e4m3fn
    )
    for model in (load(comfy, wan, "fp8_e4m3fn", "auto"), load(comfy, path, "auto", "auto"), by_core(comfy, path)):
        assert "fp8" not in multiplied(model, call).values()


def products_of_nothing(left, right, *scales, output_dtype=None, **options):
    """The host's part of an fp8 product: a CPU has no such kernel."""
    return left.new_empty(len(left), right.shape[1], dtype=output_dtype)


@pytest.mark.not_as_on_cuda("the rules' own functions would be counted")
@torch.inference_mode()
def test_a_later_call_runs_no_more_functions_than_with_cores_own_loader(comfy, models_dir, monkeypatch):
    """Of twelve blocks, the look at the result included: per layer there are fewer, per call more."""
    folder = models_dir / "diffusion_models"
    layers = [name.replace(".0.", f".{block}.", 1) for block in range(12) for name in WAN_LINEARS if ".0." in name[:9]]
    path = model_files.in_dialect(
        tiny_models.wan(folder / "native_twelve.safetensors", blocks=12), folder / "native_twelve_scaled.safetensors",
        dialects.comfy_quant, layers=layers,
    )  # fmt: skip
    monkeypatch.setattr(F, "scaled_mm", products_of_nothing)
    counts = []
    for model in (by_core(comfy, path), load(comfy, path, "auto", "auto")):
        call = families.capture(model, "wan")
        comfy_management.load_models_gpu([model])
        model.pre_run()
        counts.append(functions_run(lambda model=model, call=call: families.apply(model, call, call.args[0])).total())
        model.cleanup()
    core, ours = counts
    print(core, ours)
    assert ours <= core
