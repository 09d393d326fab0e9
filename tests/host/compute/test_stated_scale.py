"""fp8 products of a file that states the scales of its layers' inputs: which reductions are gone, and what becomes of inputs that do not fit."""

from __future__ import annotations

import math

import pytest
import torch
from halfsafe.nodes.host.compute.bound import Fp8Linear
from halfsafe.precision.arithmetic.calibration import RECHECKED, Calibration
from halfsafe.precision.arithmetic.stated_scale import HIDES_INF, PASSED, USED, StatedScale
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import load_file, save_file
from support import families
from support.dynamic_vram import WAYS, dynamic_vram
from support.leaf_operations import LeafOperations
from support.matmul_spy import Products
from support.measures import relative_error
from support.model_files import WAN_LINEARS

LAYER = "blocks.1.ffn.2"
BEFORE = "blocks.1.ffn.0"
IN_FP8 = "blocks.* compute=fp8"


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


def linears(model) -> dict[str, torch.nn.Module]:
    return {name: model.model.diffusion_model.get_submodule(name) for name in WAN_LINEARS}


def inputs_of(model, call) -> dict[str, float]:
    """Layer -> amax of its input."""
    found: dict[str, float] = {}
    handles = [
        layer.register_forward_pre_hook(
            lambda module, args, name=name: found.update({name: max(found.get(name, 0.0), args[0].abs().max().item())})
        )
        for name, layer in linears(model).items()
    ]
    families.replay(model, call)
    for handle in handles:
        handle.remove()
    return found


@pytest.fixture(scope="module")
def stating(comfy, wan, call, models_dir):
    """Write an fp8 file that states ``factors`` times the scale of the call's own inputs."""
    plain = models_dir / "diffusion_models" / "states_nothing.safetensors"
    convert_file(wan, plain, "fp8_e4m3fn", rules_from(preset="none"))
    with torch.inference_mode():
        amax = inputs_of(families.load(comfy, wan, "as_file", "fp32"), call)

    def write(factors: dict[str, float] | None = None):
        path = models_dir / "diffusion_models" / "states_scales.safetensors"
        scales = {
            f"{name}.input_scale": torch.tensor(1.3 * amax[name] / 448 * (factors or {}).get(name, 1.0))
            for name in WAN_LINEARS
        }
        save_file(load_file(plain) | scales, path)
        return path

    write.plain = plain
    return write


def load(comfy, path, compute="bf16"):
    return families.load(comfy, path, "as_file", compute, rules_from(IN_FP8))


class Measured(LeafOperations):
    """Counts the reductions of matrices to their largest magnitude."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def leaf(self, func, args, kwargs):
        self.count += (
            func.name().startswith(("aten::linalg_vector_norm", "aten::amax", "aten::max")) and args[0].dim() > 1
        )
        return func(*args, **kwargs)


def reductions(model, call) -> int:
    with Measured() as spy:
        families.replay(model, call)
    return spy.count


def reasons(comfy, model) -> dict[str, str]:
    layers = {layer["name"]: layer["reason"] for layer in families.report(comfy, model)["layers"]}
    return {
        name: next((each for each in (USED, PASSED, HIDES_INF) if each in layers[name]), "") for name in WAN_LINEARS
    }


@torch.inference_mode()
def test_no_input_is_measured_for_a_scale_that_the_file_states(comfy, stating, call):
    exact = families.replay(families.load(comfy, stating.plain, "as_file", "fp32"), call)
    own, model = load(comfy, stating.plain), load(comfy, stating())
    assert reasons(comfy, model) == dict.fromkeys(WAN_LINEARS, "")
    expected, first = families.replay(own, call), families.replay(model, call)
    assert torch.equal(expected, first), "the calibrating call computes every scale"
    with Products(linears(model)) as products:
        result = families.replay(model, call)
    assert products.modes() == dict.fromkeys(WAN_LINEARS, "fp8")
    assert (reductions(own, call), reductions(model, call)) == (len(WAN_LINEARS), 0)
    assert reasons(comfy, model) == dict.fromkeys(WAN_LINEARS, USED) and not any(reasons(comfy, own).values())
    assert not torch.equal(result, first) and relative_error(exact, result) < 1.1 * relative_error(exact, first)


@pytest.mark.parametrize("factor", [1 / 4, 64])
@torch.inference_mode()
def test_a_scale_that_the_first_input_does_not_fit_is_not_used_and_told(comfy, stating, call, factor):
    """Smaller, it clips the input; much larger, the input becomes subnormal numbers."""
    model = load(comfy, stating({LAYER: factor}))
    expected = families.replay(load(comfy, stating()), call)
    assert torch.equal(families.replay(model, call), expected)
    assert reductions(model, call) == 1
    assert reasons(comfy, model) == {**dict.fromkeys(WAN_LINEARS, USED), LAYER: PASSED}


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
@torch.inference_mode()
def test_a_scale_that_brings_nothing_into_range_is_none(comfy, stating, call, scale):
    """The pack's loaders refuse the file, ComfyUI's does not."""
    model = load(comfy, stating())
    linears(model)[LAYER].input_scale.fill_(scale)
    expected = families.replay(load(comfy, stating()), call)
    assert torch.equal(families.replay(model, call), expected)
    assert reductions(model, call) == 1 and reasons(comfy, model)[LAYER] == ""


@pytest.mark.parametrize(("compute", "reason"), [("fp16", HIDES_INF), ("fp16_safe", USED)])
@torch.inference_mode()
def test_fp16_inputs_are_measured_because_clipping_would_hide_their_overflow(comfy, stating, call, compute, reason):
    model = load(comfy, stating(), compute)
    families.replay(model, call)
    assert reasons(comfy, model) == dict.fromkeys(WAN_LINEARS, reason)
    own = load(comfy, stating.plain, compute)
    families.replay(own, call)
    assert reductions(own, call) - reductions(model, call) == (0 if reason == HIDES_INF else len(WAN_LINEARS))


@torch.inference_mode()
def test_an_input_that_outgrows_the_scale_is_met_by_the_next_check(comfy, stating, call):
    model = load(comfy, stating())
    families.replay(model, call)
    linears(model)[BEFORE].bias.add_(1000.0)
    exact = families.load(comfy, stating.plain, "as_file", "fp32")
    linears(exact)[BEFORE].bias.add_(1000.0)
    expected = families.replay(exact, call)
    errors = [relative_error(expected, families.replay(model, call)) for _ in range(2, RECHECKED + 2)]
    assert all(map(math.isfinite, errors)) and min(errors[:-2]) > 2 * max(errors[-2:]), (
        "clipped until the check, measured from there on"
    )
    assert reasons(comfy, model)[LAYER] == PASSED and USED in reasons(comfy, model).values()


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_the_scale_is_used_under_dynamic_vram(comfy, stating, call, way):
    model = load(comfy, stating())
    expected = [families.replay(model, call) for _ in range(2)][-1]
    with dynamic_vram(model, way):
        assert torch.equal(families.replay(model, call), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.inference_mode()
def test_an_input_beyond_the_scale_is_clipped_and_nan_stays(comfy, stating, dtype):
    module = linears(load(comfy, stating()))[LAYER]
    calibration = Calibration()
    calibration.calibrating = False
    stated = StatedScale(LAYER, 1.0, calibration)
    stated.measure(1.0)
    stated.scale = torch.tensor(2.0)
    x = torch.randn(4, 1024).to(dtype)
    x[0, 0], x[1, 0], x[2, 0] = 1e6, -1e6, math.nan
    result, expected = Fp8Linear(module, stated)(x), Fp8Linear(module)(x.clamp(-896, 896).nan_to_num())
    assert result[2].isnan().all()
    assert relative_error(expected[[0, 1, 3]].float(), result[[0, 1, 3]].float()) < 0.05


@pytest.mark.parametrize("steps", [1, 4])
@torch.inference_mode()
def test_the_same_seed_gives_the_same_picture_in_a_later_run(comfy, stating, steps):
    """Another run between leaves the counted calls, and a layer whose inputs had left the scale's range."""
    model = load(comfy, stating())
    first = families.sample(model, "wan", steps=steps)
    bias = linears(model)[BEFORE].bias
    own = bias.clone()
    bias.add_(1000.0)
    families.sample(model, "wan", steps=1)
    bias.copy_(own)
    assert torch.equal(families.sample(model, "wan", steps=steps), first)


@torch.inference_mode()
def test_a_layer_that_the_first_call_of_a_run_passes_by_has_no_scale_of_the_run_before(comfy):
    calibration, x = Calibration(), torch.ones(2, 16, dtype=torch.bfloat16)
    stated = calibration.add(StatedScale(LAYER, 1 / 448, calibration))
    stated.of(x)
    calibration.calibrating = False
    assert stated.of(x) is not None
    calibration.recalibrate()
    calibration.calibrating = False
    assert stated.of(x) is None
