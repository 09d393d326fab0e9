"""Tensors bounded for every model input: outputs of norms, and of rotary embeddings or linear layers applied to them.

Attention with such a query needs no check of it in later calls (``attention.py``). An element of a row of N numbers
that a norm divides by the row's deviation or root mean square is at most ``sqrt(N)``.
"""

import math

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ..base.amax import amax
from ..base.nested import tensors_in

NORMS = {"layer_norm": 4, "native_layer_norm": 4, "rms_norm": 3, "_fused_rms_norm": 3}
"""Operation name -> index after its weight and bias among its arguments: they follow the input and the shape of a
row."""


class NormBounds:
    """Bound of the magnitudes of each such tensor, by its storage, in a calibrating call.

    A storage is removed if model code writes to it.
    """

    def __init__(self) -> None:
        self.bounds: dict[StorageWeakRef, torch.Tensor] = {}

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Return the bound of a tensor, 0-dim fp32 on its device; Inf for a tensor without a bound."""
        bound = self.bounds.get(_storage_of(x))
        return x.new_full((), math.inf, dtype=torch.float32) if bound is None else bound

    def set(self, x: torch.Tensor, bound: torch.Tensor) -> None:
        self.bounds[_storage_of(x)] = bound

    def follow(self, func: torch._ops.OpOverload, args: tuple, kwargs: dict, result) -> None:
        """Compute the bound of the result if the operation is a norm, a rotation, both in one, or ``cat``."""
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            for x in tensors_in([args, kwargs]):
                self.bounds.pop(_storage_of(x), None)
        elif name in NORMS:
            weight, bias = (*args[2 : NORMS[name]], None, None)[:2]
            of_weight = args[0].new_ones((), dtype=torch.float32) if weight is None else amax(weight)
            bound = math.sqrt(math.prod(args[1])) * of_weight
            self.set(result[0] if isinstance(result, tuple) else result, bound if bias is None else bound + amax(bias))
        elif name.startswith("apply_rope"):  # comfy-kitchen's: pairs of each argument by matrices of 2 x 2, the last
            of_matrices = 2.0 * amax(args[-1])
            for x, rotated in zip(args[:-1], result if isinstance(result, tuple) else (result,), strict=True):
                self.set(rotated, of_matrices * self.of(x))
        elif name.startswith("rms_rope"):  # comfy-kitchen's: a norm of each row, with its weight, then that rotation
            count = 1 if name.endswith("1") else 2
            weights = [weight for weight in args[count + 1 : 2 * count + 1] if weight is not None]  # of both or each
            most = math.sqrt(args[0].shape[-1]) * (2.0 * amax(args[count])).clamp(min=1.0)  # 1: what is not rotated
            for rotated, weight in zip(tensors_in(result), (weights[0], weights[-1]), strict=False):
                self.set(rotated, most * amax(weight))
        elif name == "cat":
            self.set(result, torch.stack([self.of(x) for x in args[0]]).amax())


def _storage_of(x: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())
