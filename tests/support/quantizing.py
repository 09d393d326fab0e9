"""Where weights are quantized, by the operation itself, and what two devices make of the same."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Quantizing(TorchDispatchMode):
    """``where``: the devices of each multiplication by a scale (``mul``) and each rotation to int8 (``mm``); ``tf32``: whether it was on for a rotation on a card."""

    def __init__(self):
        super().__init__()
        self.where: dict[str, list[str]] = {"mul": [], "mm": []}
        self.tf32: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mul.out, aten.mm.out):
            self.where[func.overloadpacket.__name__].append(args[0].device.type)
        if func is aten.mm.out and args[0].device.type == "cuda":
            self.tf32.append(torch.backends.cuda.matmul.allow_tf32)
        return func(*args, **(kwargs or {}))


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit, in host memory."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.device.type == "cpu" and one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))
