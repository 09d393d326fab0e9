"""What modulates a norm's result is measured in its place, and the result is made in fp16 where that is proven."""

import math

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.bounds import followed
from halfsafe.precision.arithmetic.bounds.known_values import KnownValues
from halfsafe.precision.arithmetic.bounds.value_bounds import ROUNDING, ValueBound, after_norm, modulated
from hypothesis import given, settings
from hypothesis import strategies as st
from support.modulated import TOKENS, WAYS, Modulated


@pytest.fixture
def block():
    made = Modulated()
    made.call()
    return made


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_modulated_norm_is_made_in_fp16_and_measured_by_what_is_small(way):
    block = Modulated(way)
    block.call()
    assert block.error(block.call()) < 2e-3 and block.calibration.repeats == 0
    assert block.met == [torch.float32, torch.float16]
    assert block.seen.casts == 1  # of the last operand, which is measured
    assert sorted(block.seen.reductions) == [1, 2]


def test_the_numbers_are_those_of_a_cast_of_the_fp32_result(block, monkeypatch):
    fp16 = block.call()
    monkeypatch.setattr(followed, "_modulated", lambda *_: None)
    assert torch.equal(fp16, block.call()) and block.met[-2:] == [torch.float16, torch.float32]


@pytest.mark.parametrize("name", ["scale", "shift"])
@pytest.mark.parametrize("growth", [1e2, 1e6, math.inf, math.nan])
def test_what_is_small_and_grows_has_the_call_repeated(block, name, growth):
    setattr(block, name, getattr(block, name) * growth)
    result = block.call()
    assert block.calibration.repeats == 1
    if math.isfinite(growth):
        assert torch.isfinite(result).all() and block.error(result) < 2e-2
        assert block.error(block.call()) < 2e-2 and block.calibration.repeats == 1


def test_what_is_written_to_what_is_small_afterwards_hides_nothing(block):
    def way(x, scale, shift):
        gain = 1e6 * (1 + scale)
        y = torch.addcmul(shift, x, gain)
        gain.zero_()
        return y

    block.way = way
    assert torch.isfinite(block.call()).all() and block.calibration.repeats == 1


def test_a_norm_that_runs_twice_in_a_call_is_measured_as_before():
    block = Modulated()
    own, block.way = block.way, lambda x, scale, shift: block.again(own(x, scale, shift), scale, shift)
    block.again = lambda y, scale, shift: y + 0 * torch.addcmul(shift, block.norm(block.x), scale * block.growth)
    block.growth = 1.0
    block.call()
    block.call()
    block.growth = 1e9
    block.call()
    assert block.error(block.call()) < 2e-3 and torch.float16 not in block.met


@pytest.mark.parametrize("other", [lambda y: y * 2.0, torch.tanh, lambda y: y[:, :1].exp(), lambda y: y.double()])
def test_a_result_that_something_else_is_made_of_stays_fp32(other):
    block = Modulated(lambda x, scale, shift: (y := torch.addcmul(shift, x, 1 + scale), other(y))[0])
    block.call()
    assert block.error(block.call()) < 2e-3
    assert set(block.met) == {torch.float32}


def test_model_code_that_does_something_else_later_gets_what_torch_gives(block):
    block.way = lambda x, scale, shift: (x * (1 + scale) + shift).tanh()
    assert block.error(block.call()) < 2e-3 and block.met[-1] == torch.float32
    block.way = lambda x, scale, shift: torch.addcmul(shift * torch.ones_like(x), x, 1 + scale)
    assert block.error(block.call()) < 2e-3 and block.met[-1] == torch.float32
    block.way = WAYS["addcmul"]
    assert block.error(block.call()) < 2e-3 and block.met[-1] == torch.float16
    assert block.calibration.repeats == 0


def test_a_bound_past_fp16_leaves_the_result_in_fp32():
    block = Modulated()
    block.scale = torch.full_like(block.scale, 2e3)
    block.call()
    assert block.error(block.call()) < 2e-2 and set(block.met) == {torch.float32}


def test_shapes_that_change_are_measured_anew(block):
    block.scale, block.shift = block.scale.expand(2, 1, -1).clone(), block.shift.expand(2, 1, -1).clone()
    block.x = torch.cat([block.x, -block.x])
    block.calibration.repeats = 0
    assert block.error(block.call()) < 2e-3 and block.calibration.repeats == 1
    assert block.error(block.call()) < 2e-3 and block.calibration.repeats == 1


def test_a_tensor_for_each_token_is_not_small():
    block = Modulated()
    block.scale = block.scale.expand(1, TOKENS, -1).clone()
    block.shift = block.shift.expand(1, TOKENS, -1).clone()
    block.call()
    assert block.error(block.call()) < 2e-3 and set(block.met) == {torch.float32}


def test_a_device_that_converts_no_results_casts(monkeypatch):
    monkeypatch.setattr("halfsafe.precision.arithmetic.bounds.modulation.converts_results", lambda device: False)
    block = Modulated()
    block.call()
    assert block.error(block.call()) < 2e-3 and set(block.met) == {torch.float32}
    assert block.seen.casts == 2 and sorted(block.seen.reductions) == [1, 2]


def test_what_is_followed_behaves_as_a_tensor():
    x = followed.follow(torch.randn(3, 4), KnownValues())
    for made in (x + 1, x.sum(), torch.cat([x, x]), x.t().contiguous(), x.unbind()[0] * 2, F.gelu(x), x.clone(), x.half()):
        assert type(made) is torch.Tensor
    assert x.shape == (3, 4) and x.tolist() == x.clone().tolist() and isinstance(x, torch.Tensor)


@pytest.mark.parametrize("by_name", [False, True])
def test_operands_that_are_given_by_name_are_as_well_known(by_name):
    values = KnownValues()
    values.begin(calibrating=True)
    with torch.no_grad():
        x = torch.randn(2, 3)
        values.note(x, ValueBound(9.0, 9.0))
        followed.follow(x, values)
        if by_name:
            made = torch.cat(tensors=[x, x], dim=1), F.gelu(input=x), torch.mul(input=x, other=x)
        else:
            made = torch.cat([x, x], 1), F.gelu(x), x * x
        assert [values.of(each) for each in made] == [ValueBound(9.0), ValueBound(9.0, 9.0), ValueBound(81.0)]
    values.end()


@settings(deadline=None, max_examples=80)
@given(st.integers(2, 200), st.integers(0, 999), st.floats(0, 50), st.floats(0, 500), st.booleans(), st.sampled_from([1.0, 1e-4, 1e4]))
def test_no_modulated_norm_passes_its_bound(size, seed, scale, shift, centred, spread):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, size, generator=generator) * spread
    x[0] = 0
    x[0, seed % size], x[0, (seed + 1) % size] = 1e5, -1e5
    gain = scale * (2 * torch.rand(size, generator=generator) - 1)
    added = shift * (2 * torch.rand(size, generator=generator) - 1)
    gain[seed % size], added[seed % size] = scale, shift
    z = F.layer_norm(x, (size,)) if centred else F.rms_norm(x, (size,))
    bound = modulated(after_norm(size, centred, None, None), scale, shift, size)
    for y in (z * gain + added, (z * gain + added).half().float() if bound.largest < 65504 else z * 0):
        assert y.abs().max() <= bound.largest
        assert y.norm(dim=-1).max() <= bound.norm


def test_the_worst_input_comes_close_to_the_bound():
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 1:] = 255.0, -1.0
    found = 3.0 * F.layer_norm(x, (256,)) + 2.0
    assert found.abs().max() >= modulated(after_norm(256, True, None, None), 3.0, 2.0, 256).largest / (1.01 * ROUNDING**2)
