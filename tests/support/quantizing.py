"""Where weights are quantized, by the operation itself, and what two devices make of the same."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class Quantizing(TorchDispatchMode):
    """``where``: the devices of each multiplication by a scale (``mul``) and each rotation to int8 (``mm``); ``tf32``: whether it was on."""

    def __init__(self):
        super().__init__()
        self.where: dict[str, list[str]] = {"mul": [], "mm": []}
        self.tf32: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (aten.mul.out, aten.mm.out):
            self.where[func.overloadpacket.__name__].append(args[0].device.type)
            self.tf32.append(torch.backends.cuda.matmul.allow_tf32)
        return func(*args, **(kwargs or {}))


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit, in host memory."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.device.type == "cpu" and one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor]) -> int:
    """int8 of sums in another order: codes to a step, of which there are few, and scales to what rounding 256 terms in some order
    comes to, sqrt(256) 2^-24 of their magnitudes' sum, which is four times the largest result. Returns how many scales differ."""
    pairs = list(zip(found, expected, strict=True))
    codes = [pair for pair in pairs if pair[0].dtype == torch.int8]
    scales = [pair for pair in pairs if pair[0].dtype == torch.float32 and pair[0].dim() == 2 and pair[0].shape[1] == 1]
    assert len(codes) == len(scales) > 0
    assert all(((one - other).abs() <= 4e-6 * other).all() for one, other in scales)
    assert all(((one.short() - other.short()).abs() <= 1).all() for one, other in codes)
    assert sum((one != other).sum().item() for one, other in codes) < 1e-3 * sum(one.numel() for one, _ in codes)
    return sum((one != other).sum().item() for one, other in scales)
