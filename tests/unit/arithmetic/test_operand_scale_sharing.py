"""One operand for the operations of a block that are given the same tensor, and none that outlives its block."""

import torch
from halfsafe.precision.arithmetic.calibration import Calibration


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
