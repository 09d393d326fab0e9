"""Convolutions behind a GroupNorm are known to fit, at every size of the sample; what is not known is measured."""

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic.amax_buffer import NOTHING
from halfsafe.precision.arithmetic.bounds.known_norm import KnownNorm
from halfsafe.precision.arithmetic.bounds.known_values import KnownValues
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import WINOGRAD, SafeOperation
from support.leaf_operations import Reductions
from support.plain_weights import plain_weights

CHANNELS, GROUPS = 32, 4


class Block:
    """GroupNorm, SiLU and a convolution, twice, as of a UNet's block; then a layer that is always measured."""

    def __init__(self, padding_mode="zeros", wide=None, activation=F.silu, gain=1.0):
        torch.manual_seed(0)
        self.calibration, self.activation = Calibration(), activation
        self.calibration.results.allowed = True
        self.norms = [torch.nn.GroupNorm(GROUPS, CHANNELS).requires_grad_(False) for _ in range(2)]
        for norm in self.norms:
            norm.weight.data.normal_().mul_(gain)
            norm.bias.data.normal_()
        self.known = [KnownNorm(norm, norm.forward, self.calibration, plain_weights) for norm in self.norms]
        convolution = lambda: torch.nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, padding_mode=padding_mode).requires_grad_(False)  # noqa: E731
        self.convolutions = [convolution() for _ in range(3)]
        self.layers = [
            SafeOperation(module, self.calibration.scale(f"blocks.{place}.0"), self.calibration, plain_weights, wide, largest)
            for place, (module, largest) in enumerate(zip(self.convolutions, (128.0, None, None), strict=True))
        ]
        self.between = lambda x: x
        self.x = torch.randn(2, CHANNELS, 6, 6)

    def once(self):
        x = self.x
        for norm, layer in zip(self.known, self.layers, strict=False):
            x = x + layer(self.activation(self.between(norm(x))))
        return self.layers[-1](x)

    def call(self):
        with torch.inference_mode(), Reductions() as seen:
            result = self.calibration.run(self.once)
        self.seen = seen.count
        return result.float()

    def error(self, result) -> float:
        with torch.inference_mode():
            x = self.x
            for norm, layer in zip(self.norms, self.convolutions, strict=False):
                x = x + layer(self.activation(self.between(norm(x))))
            expected = self.convolutions[-1](x)
        return ((result - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("wide", [None, False])
def test_only_the_last_layer_is_measured(wide):
    block = Block(wide=wide)
    block.call()
    result = block.call()
    assert block.seen == 1 and block.calibration.repeats == 0
    assert block.error(result) < 2e-3


def test_what_is_known_changes_no_result(monkeypatch):
    block = Block()
    block.call()
    known = block.call()
    monkeypatch.setattr(KnownValues, "covers", lambda self, scale, x: False)
    assert torch.equal(known, block.call()) and block.seen == 3


@pytest.mark.parametrize("size", [4, 24])
def test_another_size_has_a_bound_of_its_own(size):
    block = Block()
    block.call()
    calibrated = [norm.bound.sample for norm in block.known]
    block.x = torch.zeros(1, CHANNELS, size, size)
    block.x[:, ::8, 0, 0], block.x[:, 1::8, 0, 0] = 1e3, -1e3
    result = block.call()
    assert block.error(result) < 2e-3 and block.calibration.repeats == 0
    with torch.inference_mode():
        found = block.norms[0](block.x).flatten(1).norm(dim=1).max().item()
    for norm, before in zip(block.known, calibrated, strict=True):
        bound = norm._bound_of(norm._size(block.x)).sample
        assert bound >= found if norm is block.known[0] else True
        assert bound >= before and (bound > before) == (size > 6)
    # A larger sample passes what the layers were proven for, so that their operands are measured.
    assert block.seen == (3 if size > 6 else 1)


def test_what_is_repeated_around_a_sample_counts_as_often_as_it_is_added():
    zeros, repeated = Block(wide=False), Block("circular", wide=False)
    for block in (zeros, repeated):
        block.call()
    reach = [block.layers[0].scale.reach.largest for block in (zeros, repeated)]
    assert reach[1] > reach[0]


def test_a_gain_that_takes_the_bound_past_fp16_is_measured():
    block = Block(gain=1e4, wide=False)
    block.call()
    result = block.call()
    assert block.seen == 3 and all(layer.scale.covered is None for layer in block.layers)
    assert torch.isfinite(result).all()


def test_a_bound_leaves_room_for_what_a_fast_algorithm_keeps_of_an_operand():
    block = Block(gain=200.0)
    block.call()
    operand = block.layers[0].scale
    assert operand.covered is not None and WINOGRAD * operand.covered.largest <= operand.reach.largest


def test_a_normalized_tensor_that_grows_is_measured():
    block = Block()
    block.call()
    block.between = lambda x: x * 1e6
    result = block.call()
    assert torch.isfinite(result).all() and block.calibration.repeats == 1
    assert block.error(result) < 2e-2


def test_one_activation_that_is_not_known_ends_the_bound():
    block = Block(activation=torch.tanh)
    block.call()
    result = block.call()
    assert block.seen == 3 and block.error(result) < 2e-3


def test_a_layer_behind_a_norm_whose_channels_were_moved_last_is_known():
    """As SDXL's ``proj_in``. Without a mode around the call: below one torch makes no views of what is moved in inference mode."""
    block = Block()
    linear = torch.nn.Linear(CHANNELS, CHANNELS).requires_grad_(False)
    projection = SafeOperation(linear, block.calibration.scale("blocks.0.proj_in"), block.calibration, plain_weights)
    block.once = lambda: block.layers[-1](projection(block.known[0](block.x).movedim(1, 3).flatten(1, 2).contiguous()).movedim(1, 2).reshape(block.x.shape))
    for _ in range(2):
        with torch.inference_mode():
            block.calibration.run(block.once)
    assert projection.scale.covered is not None and projection.scale.recorder.entry.view.item() == NOTHING
    assert block.calibration.repeats == 0


def test_groups_of_one_number_have_no_bound_and_larger_ones_after_them_run():
    block = Block()
    norm = torch.nn.GroupNorm(CHANNELS, CHANNELS).requires_grad_(False)
    block.norms[0], block.known[0] = norm, KnownNorm(norm, norm.forward, block.calibration, plain_weights)
    block.x = torch.randn(2, CHANNELS, 1, 1)
    block.call()
    assert block.known[0].tag is None
    block.x = torch.randn(2, CHANNELS, 4, 4)
    assert block.error(block.call()) < 2e-2
    block.x, block.once = torch.zeros(2, CHANNELS, 0), lambda: block.known[0](block.x)
    block.calibration.recalibrate()
    assert block.call().shape == block.x.shape


def test_a_sample_without_a_batch_is_the_whole_tensor():
    block, length = Block(), 16
    block.x = torch.randn(CHANNELS, GROUPS, length)
    norm = torch.nn.GroupNorm(1, GROUPS).requires_grad_(False)
    block.known[0] = KnownNorm(norm, norm.forward, block.calibration, plain_weights)
    weight, found = block.convolutions[0].weight.data.mul_(4.0), []

    def once():
        found[:] = [block.layers[0](block.known[0](block.x))]
        return block.layers[1](found[0])

    block.once = once
    block.call()
    block.x = torch.zeros_like(block.x)
    block.x[:, :3, 4:7] = 1e4 * weight[0]
    block.call()
    assert block.layers[0].scale.covered is not None and block.calibration.repeats == 0
    assert found[0].abs().max() <= block.layers[0].scale.reach.largest
