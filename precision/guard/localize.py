"""Locate the first operation of a model's call whose result is not finite, with its module and its
operands.

One call is run with every operation watched. Each non-finite result is traced back to the operation
that computed it from finite operands, so a harmless mask of -inf is not blamed for a sum that
overflowed elsewhere.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..arithmetic.hiding import HIDING, hidden_operands
from ..base.amax import amax_value
from ..base.dtypes import name_of
from ..base.layer_names import plain_name
from ..base.layers import kind_of, parts_of
from ..base.nested import PLAIN, plain_alias, tensors_in
from ..base.patching import PutsWatch, patched, watched_forward
from ..report.schema import EventKind

FACTORY_OPS = (
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided",
    "full", "full_like", "new_full", "fill_", "scalar_tensor",
)  # fmt: skip
PLAIN_NAMES = {
    **dict.fromkeys(
        ("mm", "addmm", "bmm", "baddbmm", "linear", "_scaled_mm", "_scaled_mm_v2", "_int_mm", "int8_linear"), "matmul"
    ),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), "convolution"),
    **dict.fromkeys(("_to_copy", "to"), "cast"),
}


@dataclass(frozen=True)
class Origin:
    """The operation that computed a non-finite value.

    Args:
        layer: the innermost module that ran it; empty outside of the model.
        op: its name (matmul, add, mul, attention, ...), or the weight that it read if ``kind`` is
            "weights".
        kind: "overflow" (Inf or NaN from finite operands), "nan" (NaN from finite operands below
            1), "weights", or "unknown" if no watched operation computed it.
        dtype: the narrowest float dtype of its operands.
        largest: the largest finite magnitude of its operands; NaN if unknown.
        multiplies: the module is a matrix product or convolution, and the operation is its product.
        result: the dtype of the non-finite value.
    """

    layer: str
    op: str
    kind: EventKind
    dtype: str
    largest: float
    multiplies: bool = False
    result: str = ""

    @classmethod
    def of_weight(cls, name: str, dtype: str = "") -> "Origin":
        """Return the origin that blames a weight."""
        return cls(name.rpartition(".")[0], name, "weights", dtype, math.nan)


@dataclass
class _Frame:
    """A module, or a function without one, that is running."""

    name: str
    module: torch.nn.Module
    inputs: list[torch.Tensor]


class Localizer(TorchDispatchMode):
    """Watch one call of ``model``: run it inside of :meth:`watching`, then ask :meth:`origin`.

    ``watched``: returns the patches by which a module's calls are watched. Every watched operation
    synchronizes with the device: use it for a call that has failed already.
    """

    def __init__(self, model: torch.nn.Module, watched: PutsWatch = watched_forward):
        super().__init__()
        self._watched = watched
        self._named = {plain_name(name): module for name, module in model.named_modules()}
        self._weights = _storages(model)
        self._stack: list[_Frame] = []
        self._made: dict[int, Origin] = {}
        self._first_bad: Origin | None = None
        self.hidden: list[Origin] = []
        """Origins of NaN and Inf that model code replaced by a number."""
        self._read: Origin | None = None

    @contextmanager
    def watching(self) -> Iterator["Localizer"]:
        """Watch the forwards of the model inside of the context."""
        modules = {id(module): (name, module) for name, module in self._named.items()}
        framed = [(module, partial(self._framed, name, module)) for name, module in modules.values()]
        with patched([patch for module, frame in framed for patch in self._watched(module, frame)]), self:
            yield self

    def origin(self, result: torch.Tensor) -> Origin | None:
        """Return the origin of NaN and Inf in ``result``. In a finite result: of the first NaN that
        an operation made of what it was given, a weight or an input; else of a value that a clamp
        hid; None if there is neither."""
        if math.isfinite(amax_value(result)):
            return self._read or (self.hidden[0] if self.hidden else None)
        unknown = Origin("", "", "unknown", name_of(result.dtype), math.nan)
        return self._made.get(_key(result)) or self._first_bad or unknown

    def opaque(self, op: str, call: Callable, *args, **kwargs):
        """Run code that cannot be watched inside, such as another pack's attention kernel, as one
        operation."""
        with torch.utils._python_dispatch._disable_current_modes():
            inputs = _with_reach((args, kwargs))
            result = call(*args, **kwargs)
            self._note(op, inputs, tensors_in(result))
        return result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # its own handler runs next, and what that multiplies comes back here
        if any(kind not in PLAIN for kind in types):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        inputs = _with_reach((args, {key: value for key, value in kwargs.items() if key != "out"}))
        result = plain_alias(func, func(*args, **kwargs))
        if name in FACTORY_OPS:
            for tensor in tensors_in(result):
                self._made.pop(_key(tensor), None)
            return result
        op = "attention" if "attention" in name else PLAIN_NAMES.get(name, name)
        if hidden := _hidden(name.removesuffix("_"), args, kwargs, inputs):
            self.hidden.append(self._source_of(hidden, op, inputs))
        self._note(op, inputs, tensors_in(result))
        return result

    def _note(self, op: str, inputs: list[tuple[torch.Tensor, float]], outputs: list[torch.Tensor]) -> None:
        bad = [tensor for tensor, size in inputs if not math.isfinite(size)]
        written = {id(tensor) for tensor, _ in inputs}
        shared = {_key(tensor) for tensor, _ in inputs}
        for tensor in outputs:
            size = amax_value(tensor)
            if math.isfinite(size):
                if _key(tensor) not in shared or id(tensor) in written:  # else a view, which tells nothing of the rest
                    self._made.pop(_key(tensor), None)
            elif bad:
                source = self._made[_key(tensor)] = self._source_of(bad, op, inputs)
                if math.isnan(size) and (_key(tensor) not in shared or id(tensor) in written):
                    self._note_read(source, inputs)
            elif inputs and not any(one.is_floating_point() for one, _ in inputs):  # bytes that are read as numbers
                self._made.pop(_key(tensor), None)
            else:
                self._made[_key(tensor)] = replace(self._made_by(op, inputs, size), result=name_of(tensor.dtype))

    def _note_read(self, source: Origin, inputs: list[tuple[torch.Tensor, float]]) -> None:
        """Note the source of a NaN if it is a weight, else if an operation was given NaN that none
        was seen to make."""
        known = self._read.kind if self._read else ""
        given = source.kind == "unknown" and any(math.isnan(size) for _, size in inputs)
        if (source.kind == "weights" and known != "weights") or (given and not known):
            self._read = source

    def _kind(self) -> str | None:
        return kind_of(self._stack[-1].module) if self._stack else None

    def _source_of(self, bad: list[torch.Tensor], op: str, inputs: list[tuple[torch.Tensor, float]]) -> Origin:
        known = [self._made[_key(tensor)] for tensor in bad if _key(tensor) in self._made]
        if known:
            return known[0]
        weights = [self._weights[_key(tensor)] for tensor in bad if _key(tensor) in self._weights]
        if weights:
            return Origin.of_weight(weights[0], name_of(bad[0].dtype))
        # Dynamic VRAM multiplies by a copy of the weight (``cast_bias_weight`` in comfy/ops.py).
        copied = self._bad_weight(self._stack[-1]) if self._kind() else None
        return self._first_bad or copied or replace(self._made_by(op, inputs, math.nan), kind="unknown")

    def _made_by(self, op: str, inputs: list[tuple[torch.Tensor, float]], size: float) -> Origin:
        frame = self._stack[-1] if self._stack else None
        finite = [magnitude for _, magnitude in inputs if math.isfinite(magnitude)]
        floats = [tensor.dtype for tensor, _ in inputs if tensor.is_floating_point()]
        dtype = name_of(min(floats, key=lambda kind: kind.itemsize)) if floats else ""
        kind: EventKind = "nan" if math.isnan(size) and max(finite, default=0.0) < 1.0 else "overflow"
        largest = max(finite, default=math.nan)
        return Origin(frame.name if frame else "", op, kind, dtype, largest, self._kind() is not None)

    def framed(self, name: str, call: Callable) -> Callable:
        """Wrap a function that model code calls, so that its operations are of ``name``."""
        return partial(self._framed, name, torch.nn.Module(), call)

    def _framed(self, name: str, module: torch.nn.Module, call: Callable, *args, **kwargs):
        self._stack.append(_Frame(name, module, tensors_in((args, kwargs))))
        try:
            result = call(*args, **kwargs)
            self._leave(self._stack[-1], tensors_in(result))
            return result
        finally:
            self._stack.pop()

    def _leave(self, frame: _Frame, outputs: list[torch.Tensor]) -> None:
        """Blame a module with finite inputs and a non-finite result if no operation inside of it
        was seen to fail."""
        with torch.utils._python_dispatch._disable_current_modes():
            bad = [tensor for tensor in outputs if not math.isfinite(amax_value(tensor))]
            if self._first_bad or not bad:
                return
            sizes = [amax_value(tensor) for tensor in frame.inputs]
            if all(map(math.isfinite, sizes)):
                made = [self._made[_key(tensor)] for tensor in bad if _key(tensor) in self._made]
                dtype, largest = name_of(bad[0].dtype), max(sizes, default=math.nan)
                unknown = Origin(frame.name, "", "unknown", dtype, largest, result=dtype)
                self._first_bad = made[0] if made else self._bad_weight(frame) or unknown

    def _bad_weight(self, frame: _Frame) -> Origin | None:
        name = first_bad_weight(frame.module)
        if name is None:
            return None
        return Origin(frame.name, f"{frame.name}.{name}", "weights", "", math.nan)


def first_bad_weight(module: torch.nn.Module) -> str | None:
    """Return the name of a parameter or buffer of ``module`` that holds NaN or Inf."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return next(
        (name for name, tensor in named if not all(map(math.isfinite, map(amax_value, parts_of(tensor))))), None
    )


def _with_reach(values) -> list[tuple[torch.Tensor, float]]:
    return [(tensor, amax_value(tensor)) for tensor in tensors_in(values)]


def _hidden(name: str, args, kwargs, inputs: list[tuple[torch.Tensor, float]]) -> list[torch.Tensor]:
    """List the fp16 operands with NaN or Inf that model code hides by this operation."""
    if name not in HIDING or not HIDING[name].is_tested:
        return []
    bad = {id(tensor) for tensor, size in inputs if tensor.dtype == torch.float16 and not math.isfinite(size)}
    return [operand for operand in hidden_operands(name, args, kwargs) if id(operand) in bad]


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _storages(model: torch.nn.Module) -> dict[int, str]:
    named = [*model.named_parameters(), *model.named_buffers()]
    plain = ((plain_name(name), part) for name, tensor in named for part in parts_of(tensor))
    return {_key(tensor): name for name, tensor in plain if tensor.numel()}
