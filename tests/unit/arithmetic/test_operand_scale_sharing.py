"""One operand for the operations of a block that are given the same tensor, and none that outlives its block."""

import weakref

import pytest
import torch
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from halfsafe.precision.arithmetic.operand_scale import OperandScale
from support.plain_weights import plain_weights


def operands_of(names: list[str]) -> list[torch.Tensor]:
    """The operands of a call that is not the first: each operation is given the same tensor."""
    calibration, x = Calibration(), torch.randn(4, 4)
    scales = [calibration.scale(name) for name in names]
    for scale in scales:
        scale.calibrate(1.0)
    calibration.operands.begin()
    for scale in scales:
        calibration.operands.measured(scale, x)
    calibration.operands.end()
    return [calibration.operands.of(scale, x) for scale in scales]


def test_operations_of_one_block_share_an_operand_and_those_of_two_blocks_none():
    first, second, third = operands_of(["blocks.0.q", "blocks.0.k", "blocks.1.q"])
    assert first is second and third is not first and torch.equal(first, third)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_call_that_calibrates_holds_no_operand_longer_than_the_model_holds_its_input(dtype):
    """Behind the widest layer of a video model, that is its hidden state and that in fp16, 6 GB, in the next block's attention."""
    module, calibration, alive, after_the_block = torch.nn.Linear(32, 32), Calibration(), [], []
    operation = SafeOperation(module, calibration.scale("blocks.0.ffn.2"), calibration, plain_weights)
    scaled = OperandScale.scaled_eagerly

    def block(x: torch.Tensor) -> torch.Tensor:
        hidden = (x * 2).to(dtype)
        alive.append(weakref.ref(hidden))
        return operation(hidden)

    def noted(scale, x):
        operand = scaled(scale, x)
        alive.append(weakref.ref(operand))
        return operand

    with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
        patch.setattr(OperandScale, "scaled_eagerly", noted)
        calibration.run(lambda: [block(torch.randn(4, 32)), after_the_block.extend(each() for each in alive)][0])
    assert len(after_the_block) >= 2 and set(after_the_block) == {None}
