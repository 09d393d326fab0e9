"""LoRAs beside layers in `fp16_safe`: multiplied by the layer's own operand, and never less safe than it."""

import pytest
import torch
from halfsafe.nodes.host.lora.adapters import LowRank
from halfsafe.nodes.host.lora.low_rank import LowRankModel
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.arithmetic.patching import patched
from support.measures import relative_error
from support.plain_weights import plain_weights

KEY, SHAPE, RANK = "layer.weight", (96, 256), 8


class Layer:
    """One layer in `fp16_safe` with LoRAs beside it, run as a model's call runs it."""

    def __init__(self, wide=None, loras=1, size=0.05, largest_fp16=65504.0):
        generator = torch.Generator().manual_seed(1)
        self.module = torch.nn.Linear(SHAPE[1], SHAPE[0])
        self.calibration = Calibration()
        self.calibration.results.allowed = True
        self.operation = SafeOperation(
            self.module, self.calibration.scale("layer"), self.calibration, plain_weights, wide=wide, largest_fp16=largest_fp16
        )
        self.module.forward = self.operation.__call__
        pairs = [(torch.randn(RANK, SHAPE[1], generator=generator) * size, torch.randn(SHAPE[0], RANK, generator=generator) * size) for _ in range(loras)]
        self.loras = [LowRank(object(), RANK, SHAPE, 1.0, lambda pair=pair: pair) for pair in pairs]
        self.changes = [up.double() @ down.double() for down, up in pairs]
        self.worst = torch.stack([down[0].sign() for down, _ in pairs])
        self.model = LowRankModel({KEY: self.module}, {KEY: self.loras}, torch.float16)

    @torch.inference_mode()
    def __call__(self, x, *strengths):
        return self.calibration.run(lambda: self._once(x, strengths))

    def _once(self, x, strengths):
        if not strengths:
            return self.module(x)
        given = {(KEY, lora.key): strength for lora, strength in zip(self.loras, strengths, strict=True)}
        (layer,) = self.model.layers
        self.model.set_strengths(given, x.device)
        with patched([layer.around(self.module)]):
            self.model.set_strengths(given, x.device)
            return self.module(x)

    def exact(self, x, *strengths):
        change = sum((strength * change for strength, change in zip(strengths, self.changes, strict=False)), torch.zeros(SHAPE).double())
        return x.double() @ (self.module.weight.double() + change).T + self.module.bias.double()

    def is_right(self, x, *strengths):
        result = self(x, *strengths)
        return relative_error(self.exact(x, *strengths), result) < 1e-3, result.dtype, self.calibration.repeats


def inputs(size=1.0):
    return torch.randn(3, 40, SHAPE[1], generator=torch.Generator().manual_seed(2)) * size


@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
def test_later_calls_are_right_and_repeat_nothing(wide, size):
    layer = Layer(wide, loras=2)
    for strengths in ((1.0, 0.5), (1.0, 0.5), (0.1, -1.0), (0.0, 0.0)):
        assert layer.is_right(inputs(size), *strengths) == (True, torch.float16 if size < 1e3 else torch.float32, 0)


def test_a_result_that_a_stronger_lora_takes_out_of_fp16_is_calibrated_anew():
    layer = Layer()
    assert layer.is_right(inputs(), 1.0) == (True, torch.float16, 0)
    assert layer.is_right(inputs(), 1e5) == (True, torch.float32, 1)
    assert layer.is_right(inputs(), 1e5) == (True, torch.float32, 1)
    assert layer.is_right(inputs(), 1.0) == (True, torch.float32, 1)


def test_a_lora_that_the_calibration_has_not_met_is_calibrated_for():
    layer = Layer()
    assert layer.is_right(inputs()) == (True, torch.float16, 0)
    assert layer.is_right(inputs(), 1.0) == (True, torch.float16, 1)
    assert layer.is_right(inputs(), 1.0) == (True, torch.float16, 1)
    assert layer.is_right(inputs()) == (True, torch.float16, 1)


def test_the_worst_input_that_grows_is_calibrated_anew():
    """It fits fp16 by itself, and its product is fp32; what the LoRA makes of it fits up to 64 times the first call's."""
    layer = Layer(largest_fp16=None)
    for size, repeats in ((1.0, 0), (60.0, 0), (6e4, 1), (6e4, 1)):
        assert layer.is_right(layer.worst * size, 1.0) == (True, torch.float32, repeats)


@pytest.mark.parametrize("strength", [1.0, 1e3])
def test_inputs_that_grow_are_calibrated_anew(strength):
    layer = Layer()
    layer(inputs(), strength)
    for growth in (30.0, 300.0, 1e7):
        right, dtype, repeats = layer.is_right(inputs(growth), strength)
        assert right and repeats <= {30.0: 0, 300.0: 1, 1e7: 2}[growth] + (strength > 1)
    assert dtype == torch.float32 and repeats


def test_a_change_far_beyond_fp16_is_right():
    layer = Layer(size=30.0)
    for _ in range(2):
        right, dtype, _ = layer.is_right(inputs(100.0), 5.0)
        assert right and dtype == torch.float32
    assert layer.exact(inputs(100.0), 5.0).abs().max() > 65504 * 4


def test_two_operations_that_share_a_lora_each_have_their_own_fit():
    """Runs of one model share its changes; what one has fitted them to holds for no other."""
    first, second = Layer(), Layer()
    second.model, second.loras = first.model, first.loras
    second.module.load_state_dict(first.module.state_dict())
    for _ in range(3):
        for layer, size in ((second, 6e4), (first, 1.0)):
            assert layer.is_right(first.worst * size, 1.0)[::2] == (True, 0)


@pytest.mark.not_as_on_cuda("autograd records nothing in inference mode")
def test_a_gradient_passes():
    layer = Layer()
    x = inputs().requires_grad_()
    layer.model.set_strengths({(KEY, layer.loras[0].key): 1.0}, x.device)
    with patched([layer.model.layers[0].around(layer.module)]):
        result = layer.calibration.run(lambda: layer.module(x))
        result = layer.calibration.run(lambda: layer.module(x))
    result.sum().backward()
    assert relative_error((layer.module.weight.double() + layer.changes[0]).sum(0).expand(x.shape), x.grad) < 2e-3
