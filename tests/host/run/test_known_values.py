"""What `fp16_safe` need not measure in a real model, and norms that need no cast."""

import pytest
import torch
from halfsafe.nodes.host.run.compute import compute_of
from halfsafe.precision.arithmetic.amax_buffer import Entry, Recorder
from halfsafe.precision.arithmetic.bounds import followed
from halfsafe.precision.arithmetic.bounds.known_values import KnownValues
from support import families
from support.families import load
from support.measures import relative_error

NORM = "diffusion_model.blocks.0.norm3.weight"


@pytest.fixture
def measured(monkeypatch):
    """The sizes of what is measured, in order."""
    sizes = []
    for owner, name in ((Entry, "write_amax"), (Entry, "write_row_norm"), (Recorder, "record")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda self, x, own=own: (sizes.append(x.numel()), own(self, x))[1])
    return sizes


def norms(model) -> list[torch.nn.Module]:
    modules = model.model.diffusion_model.modules()
    return [module for module in modules if isinstance(module, torch.nn.LayerNorm | torch.nn.GroupNorm) and module.weight is not None]


def test_a_later_call_measures_fewer_operands_with_the_same_result(comfy, wan, call, measured, monkeypatch):
    model = load(comfy, wan, "as_file", "fp16_safe")
    families.replay(model, call)
    del measured[:]
    known, few = families.replay(model, call), len(measured)
    monkeypatch.setattr(KnownValues, "covers", lambda self, scale, x: False)
    monkeypatch.setattr(KnownValues, "of", lambda self, x: None)
    del measured[:]
    assert torch.equal(known, families.replay(model, call)) and few <= len(measured) - 8
    assert compute_of(model).runs.of(model.model).calibration.repeats == 0


@pytest.mark.parametrize("family", ["wan", "flux", "qwen_image", "sd3"])
def test_modulated_norms_are_made_in_fp16_with_the_same_result(comfy, models_dir, family, monkeypatch):
    path = families.write_narrow(family, models_dir / "diffusion_models")
    call = families.capture(load(comfy, path, "fp32"), family)
    model = load(comfy, path, "as_file", "fp16_safe")
    families.replay(model, call)
    calibration = compute_of(model).runs.of(model.model).calibration
    modulations = calibration.values.modulations()
    assert sum(modulation.narrows for modulation in modulations) >= 4
    narrow = families.replay(model, call)
    monkeypatch.setattr(followed, "_modulated", lambda *_: None)
    assert torch.equal(narrow, families.replay(model, call)) and calibration.repeats == 0


def test_norms_over_an_fp32_stream_are_held_in_fp32(comfy, wan, call):
    safe, bf16 = load(comfy, wan, "as_file", "fp16_safe"), load(comfy, wan, "as_file", "bf16")
    assert norms(safe) and {norm.weight.dtype for norm in norms(safe)} == {torch.float32}
    assert torch.float32 not in {norm.weight.dtype for norm in norms(bf16)}
    for ours, theirs in zip(norms(safe), norms(bf16), strict=True):
        assert torch.equal(ours.weight, theirs.weight.float())


@pytest.mark.parametrize("size", [1.0, 300.0])
def test_a_lora_of_a_norm_acts_and_is_in_the_bound(comfy, wan, call, size):
    def with_difference(model):
        clone = model.clone()
        width = model.model.diffusion_model.blocks[0].norm3.weight.shape
        clone.add_patches({NORM: ("diff", (torch.full(width, size),))})
        return clone

    model, fp32 = load(comfy, wan, "as_file", "fp16_safe"), load(comfy, wan, "as_file", "fp32")
    expected = families.replay(with_difference(fp32), call) - families.replay(fp32, call)
    plain = [families.replay(model, call) for _ in range(2)][1]
    patched = with_difference(model)
    for _ in range(2):
        assert relative_error(expected, families.replay(patched, call) - plain) < 0.3
    assert relative_error(plain, families.replay(model, call)) < 1e-3
    assert compute_of(model).runs.of(model.model).calibration.repeats == 0


@pytest.mark.parametrize("family", ["wan", "flux", "qwen_image", "hunyuan_video"])
def test_rotated_q_and_k_are_known_with_the_same_result(comfy, models_dir, family, measured, monkeypatch):
    path = families.write_narrow(family, models_dir / "diffusion_models")
    call = families.capture(load(comfy, path, "fp32"), family)
    model = load(comfy, path, "as_file", "fp16_safe")
    families.replay(model, call)
    calibration = compute_of(model).runs.of(model.model).calibration
    assert len(calibration.values.rotations) in (1, 2)
    del measured[:]
    known, few = families.replay(model, call), len(measured)
    monkeypatch.setattr(followed, "ROTATES", set())
    del measured[:]
    unknown = families.replay(model, call)
    blocks = sum(name.startswith("attention ") for name in calibration.proofs)
    assert torch.equal(known, unknown) and calibration.repeats == 0
    # q and k of most attentions, for the rows of each rotation
    assert few <= len(measured) - blocks + len(calibration.values.rotations)


def test_convolutions_behind_group_norms_are_known_with_the_same_result(comfy, models_dir, measured, monkeypatch):
    path = families.write_narrow("sdxl", models_dir / "diffusion_models")
    call = families.capture(load(comfy, path, "fp32"), "sdxl")
    model = load(comfy, path, "as_file", "fp16_safe")
    families.replay(model, call)
    run = compute_of(model).runs.of(model.model)
    covered = [name for name, operation in run.layers.operations.items() if operation.kind == "conv" and operation.scale.covered]
    behind_norms = [name for name in run.layers.operations if name.endswith(("in_layers.2", "out_layers.3"))]
    assert set(behind_norms) <= set(covered)
    del measured[:]
    known, few = families.replay(model, call), len(measured)
    monkeypatch.setattr(KnownValues, "covers", lambda self, scale, x: False)
    del measured[:]
    assert torch.equal(known, families.replay(model, call)) and few <= len(measured) - len(behind_norms)
    assert run.calibration.repeats == 0


@pytest.mark.parametrize("factor", [2.0, 1e4])
def test_a_rotation_that_also_scales_is_calibrated_for(comfy, models_dir, factor, monkeypatch):
    """As YaRN's does where a sampler's shift or another resolution changes it in the midst of a run."""
    from comfy.ldm.flux import layers

    path = families.write_narrow("flux", models_dir / "diffusion_models")
    call = families.capture(load(comfy, path, "fp32"), "flux")
    model = load(comfy, path, "as_file", "fp16_safe")
    families.replay(model, call)
    families.replay(model, call)
    calibration = compute_of(model).runs.of(model.model).calibration
    own = layers.EmbedND.forward
    monkeypatch.setattr(layers.EmbedND, "forward", lambda self, ids: factor * own(self, ids))
    first = families.replay(model, call)
    assert torch.isfinite(first).all() and calibration.repeats == 1
    expected = families.replay(load(comfy, path, "fp32"), call)
    assert relative_error(expected, first) < 2e-2
    assert torch.equal(first, families.replay(model, call)) and calibration.repeats == 1


def test_a_function_of_comfy_kitchen_that_is_no_operation_is_passed_over(comfy, monkeypatch):
    from comfy import quant_ops
    from halfsafe.nodes.host.run.rotary import know_rotations

    known = set(followed.ROTATES)
    monkeypatch.setattr(quant_ops.ck, "apply_rope_of_a_later_version", lambda x, matrices: x, raising=False)
    know_rotations()
    assert followed.ROTATES == known != set()
