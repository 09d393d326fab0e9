"""Operations of model code that turn Inf or NaN into a finite number, and so can hide an overflow.

An operand that passes fp16's range makes Inf or NaN of a whole row of its layer's result, and norms make NaN of that.
It reaches the result of the call, unless one of the operations of ``HIDING`` stands in between:

=====================  =====================================  ========================================================
operation              hides                                  what sees the overflow instead
=====================  =====================================  ========================================================
tanh, relu, softmax,   Inf of an operand, by a wrong number   a look at one column of the result of each layer of the
exp, clamp, sort ...                                          block that ran before (the block, as NaN passes through)
a division, rsqrt,     Inf below the fraction bar, by 0       the same
a negative power
nan_to_num, a test     Inf and NaN                            the same, and a look at the last layer of each block
for NaN or Inf                                                before
clamp, nan_to_num      an fp16 result that overflowed by      results of those layers are returned in fp32
of fp16                itself
the same saturating    nothing: Inf is what the number        none is needed
of an fp16 result      saturates to
attention              -Inf among its scores                  a look at q, or the norms before it (``attention.py``)
=====================  =====================================  ========================================================

Model code is watched in the calls that calibrate alone, where time does not count.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..base.layer_names import block_of
from ..base.nested import plain_alias
from .norm_bounds import NormBounds


@dataclass(frozen=True)
class Hides:
    """How an operation hides an overflow.

    ``places``: the places of the operands whose Inf it hides. ``nan``: it hides NaN too. ``replaces``: it puts another
    number in the place of what overflows in fp16. ``is_tested``: model code gives the operation no Inf on purpose, as
    masks give to ``softmax`` and to comparisons, so that the operand itself can be tested in plain fp16
    (``nodes/host/guard/clamps.py``).
    """

    places: tuple[int, ...] = (0,)
    nan: bool = False
    replaces: bool = False
    is_tested: bool = True


SATURATING = (
    *("tanh", "sigmoid", "hardsigmoid", "hardtanh", "relu", "relu6", "elu", "selu", "celu", "softplus", "softsign"),
    *("erf", "atan", "rsqrt", "reciprocal", "glu", "logsigmoid", "log_sigmoid_forward"),
)
POWERS = ("pow", "__pow__", "__ipow__")
DIVISIONS = ("div", "__truediv__", "__itruediv__")
REPLACING = ("clip", "clamp", "clamp_min", "clamp_max")
OF_TWO = ("minimum", "maximum", "fmin", "fmax", "min", "max")
OF_MASKS = ("softmax", "_softmax", "_safe_softmax", "exp", "exp2", "expm1", "sort", "topk", "argmax", "sign")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
HIDING = {
    **dict.fromkeys(SATURATING, Hides()),
    **dict.fromkeys(POWERS, Hides(places=(0, 1))),
    **dict.fromkeys(DIVISIONS, Hides(places=(1,))),
    "addcdiv": Hides(places=(2,)),
    **dict.fromkeys(REPLACING, Hides(replaces=True)),
    **dict.fromkeys(OF_TWO, Hides(places=(0, 1), replaces=True)),
    **dict.fromkeys(OF_MASKS, Hides(is_tested=False)),
    **dict.fromkeys(COMPARISONS, Hides(nan=True, is_tested=False)),
    **dict.fromkeys(("isnan", "isinf", "isfinite"), Hides(nan=True)),
    "nan_to_num": Hides(nan=True, replaces=True),
}
"""Operation, as torch dispatches or exports it -> how it hides an overflow."""


NAMES = ({"input", "self"}, {"other", "exponent", "tensor1"}, {"tensor2"})
"""What torch calls the operands, by their places."""


def hidden_operands(name: str, args: Sequence, kwargs: Mapping) -> list[torch.Tensor]:
    """List the tensors of floats whose overflow an operation of ``HIDING`` would hide."""
    if name in POWERS:
        exponent = args[1] if len(args) > 1 else kwargs.get("exponent")
        if isinstance(exponent, (int, float)) and exponent > 0:
            return []
    operands = [_argument(place, args, kwargs) for place in HIDING[name].places]
    if name in ("min", "max") and not isinstance(operands[1], torch.Tensor):  # of the elements of one tensor
        return []
    # A single number, such as a step's sigma, is no layer's result, which has a row for each token.
    return [each for each in operands if isinstance(each, torch.Tensor) and each.is_floating_point() and each.dim()]


def _argument(place: int, args: Sequence, kwargs: Mapping) -> object:
    if len(args) > place:
        return args[place]
    return next((value for key, value in kwargs.items() if key in NAMES[place]), None)


_watching = threading.local()


def own_arithmetic() -> contextlib.AbstractContextManager:
    """Run operations of ours inside, which no :class:`HidingCode` of this thread takes for model code."""
    mode = getattr(_watching, "mode", None)
    return mode.pause() if mode else contextlib.nullcontext()


class Looked(Protocol):
    """Stand for a layer whose result can be looked at in every later call, or be fp32 from now on."""

    def look(self) -> None: ...

    def widen(self) -> None: ...


class HidingCode(TorchDispatchMode):
    """Find the layers whose overflow model code can hide, in a call that calibrates.

    ``paused``: what runs is no model code. ``norms``: what model code bounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def __enter__(self):
        _watching.mode = self
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _watching.mode = None
        self.begin()

    def begin(self) -> None:
        self.paused = 0
        self.norms = NormBounds()
        self._recent: list[tuple[str, Looked]] = []
        self._ends: list[Looked] = []

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Watch no operation inside."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def ran(self, name: str, layer: Looked) -> None:
        """Note a layer that has just run. Of the blocks before the present one only the last layer is remembered."""
        block = block_of(name)
        if block and self._recent and (last := self._recent[-1])[0] not in ("", block):
            self._ends.append(last[1])
            self._recent = [each for each in self._recent if not each[0]]
        self._recent.append((block, layer))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix("_")
        if not self.paused and name in HIDING:
            for operand in hidden_operands(name, args, kwargs or {}):
                self._hide(HIDING[name], operand.dtype)
        result = func(*args, **(kwargs or {}))
        self.norms.follow(func, args, kwargs or {}, result)
        return plain_alias(func, result)

    def _hide(self, how: Hides, dtype: torch.dtype) -> None:
        layers = [layer for _, layer in self._recent]
        for layer in layers + (self._ends if how.nan else []):
            layer.look()
        if how.replaces and dtype == torch.float16:
            for layer in layers:
                layer.widen()
