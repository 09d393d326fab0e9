"""The operations that reach a kernel, as one dispatch mode that others are made from.

Sees: every operation of this thread, inside of tensor subclasses (comfy-kitchen's quantized tensors) and of compiled code
as its backend runs it. torch hands a composite operation such as ``linear`` to a mode whole in inference mode and in parts
outside of it; here it always comes in parts.
Does not see: what a custom operator's own kernel calls, other threads, and reads of a CPU tensor's memory (``tolist``).
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
COMPOSITE = {
    aten.linear.default, aten.matmul.default, aten.einsum.default, aten.scaled_dot_product_attention.default,
    aten.conv1d.default, aten.conv1d.padding, aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default, aten.conv3d.padding,
    aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input,
}  # fmt: skip


def overloads(of: dict[str, object]) -> dict:
    """``of`` by operation instead of its name, as "mm.dtype"; without what this torch does not have."""
    found = {name: getattr(getattr(aten, name.split(".")[0], None), name.split(".")[1], None) for name in of}
    return {found[name]: value for name, value in of.items() if found[name] is not None}


def _is_plain(kind: type) -> bool:
    return issubclass(kind, FakeTensor) or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


class LeafOperations(TorchDispatchMode):
    """Calls ``leaf`` for each operation; a subclass says what it does."""

    # Overrides a method of torch's, which asks each mode before it compiles (TorchDispatchMode of torch/utils/_python_dispatch.py).
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work, which any other mode turns off, and watch what it has made."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not all(map(_is_plain, types)):
            return NotImplemented
        kwargs = kwargs or {}
        if func in COMPOSITE:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = self.leaf(func, args, kwargs)
        # torch would call the constructor of a class made by as_subclass on this, without its arguments
        return (
            result.as_subclass(torch.Tensor)
            if func is aten.alias.default and not isinstance(result, FakeTensor)
            else result
        )

    def leaf(self, func, args: tuple, kwargs: dict):
        """One operation on plain tensors. Returns its result."""
        return func(*args, **kwargs)
