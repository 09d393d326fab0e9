"""Operations of model code that turn Inf or NaN into a finite number, and so can hide an overflow.

An operand that passes fp16's range makes Inf or NaN of a whole row of its layer's result, and norms
make NaN of that. NaN reaches the result of the call, unless an operation of ``HIDING`` comes
between. A sum in fp16 that overflows makes Inf of one number: of such a layer the whole result is
checked in place of one column.

=====================  =====================================  ========================================================
operation              hides                                  what detects the overflow instead
=====================  =====================================  ========================================================
tanh, relu, softmax,   Inf of an operand, by a wrong number   the check of one column of the result of each layer of
exp, clamp, sort ...                                          the preceding block (NaN passes through, so one block)
a division, rsqrt,     Inf in the denominator, by 0           the same
a negative power
nan_to_num, a test     Inf and NaN                            the same, and the check of the last layer of each
for NaN or Inf, a                                             earlier block
product of 8 bits
or fewer
attention              -Inf among its scores                  the check of q (``attention.py``)
=====================  =====================================  ========================================================

Model code is watched in calibrating calls only, whose time does not matter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from ..base.layer_names import block_of
from ..base.nested import plain_alias


@dataclass(frozen=True, kw_only=True)
class _Hides:
    """How an operation hides an overflow.

    ``is_tested``: model code passes no intended Inf to the operation, as masks do to ``softmax``
    and to comparisons, so ``nodes/host/guard/clamps.py`` wraps torch's function and tests the
    operand while a model in plain fp16 is sampled. ``places``: indices of the operands whose Inf it
    hides. ``nan``: it hides NaN too.
    """

    is_tested: bool
    places: tuple[int, ...] = (0,)
    nan: bool = False


SATURATING = (
    *("tanh", "sigmoid", "hardsigmoid", "hardtanh", "relu", "relu6", "elu", "selu", "celu", "softplus", "softsign"),
    *("erf", "atan", "rsqrt", "reciprocal", "glu", "logsigmoid", "log_sigmoid_forward"),
)
POWERS = ("pow", "__pow__", "__ipow__")
DIVISIONS = ("div", "__truediv__", "__itruediv__")
CLAMPING = ("clip", "clamp", "clamp_min", "clamp_max")
OF_TWO = ("minimum", "maximum", "fmin", "fmax", "min", "max")
OF_MASKS = ("softmax", "_softmax", "_safe_softmax", "exp", "exp2", "expm1", "sort", "topk", "argmax", "sign")
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
# comfy-kitchen's. fp8 clamps to 448 where a file states the scale; CUDA's int8 makes 65504 of Inf and -128 of NaN
# (``finite_absmax_for_int8_scale`` in ops/int8_linear.cu, Comfy-Org/comfy-kitchen#66).
_QUANTIZING = (
    *("quantize_fp8", "quantize_nvfp4", "quantize_mxfp8", "quantize_int8_rowwise", "quantize_int8_tensorwise"),
    *("quantize_svdquant_w4a4", "int8_linear"),
)
HIDING = {
    **dict.fromkeys((*SATURATING, *CLAMPING), _Hides(is_tested=True)),
    **dict.fromkeys(POWERS, _Hides(is_tested=True, places=(0, 1))),
    **dict.fromkeys(DIVISIONS, _Hides(is_tested=True, places=(1,))),
    "addcdiv": _Hides(is_tested=True, places=(2,)),
    **dict.fromkeys(OF_TWO, _Hides(is_tested=True, places=(0, 1))),
    **dict.fromkeys(OF_MASKS, _Hides(is_tested=False)),
    **dict.fromkeys(COMPARISONS, _Hides(is_tested=False, nan=True)),
    **dict.fromkeys(("isnan", "isinf", "isfinite"), _Hides(is_tested=True, nan=True)),
    "nan_to_num": _Hides(is_tested=True, nan=True),
    **dict.fromkeys(_QUANTIZING, _Hides(is_tested=False, nan=True)),
}
"""Operation name, as torch dispatches or exports it -> how it hides an overflow."""
_PRODUCTS = ("linear", "addmm", "mm", "matmul")
"""Operations that multiply by a weight, which round their input where the weight is quantized."""


NAMES = ({"input", "self"}, {"other", "exponent", "tensor1"}, {"tensor2"})
"""torch's keyword names of the operands, by their index."""


def hidden_operands(name: str, args: Sequence, kwargs: Mapping) -> list[torch.Tensor]:
    """List the float tensors whose overflow an operation of ``HIDING`` would hide."""
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
    """Context for operations of this pack, which a :class:`HidingCode` of this thread does not
    treat as model code."""
    mode = getattr(_watching, "mode", None)
    return mode.pause() if mode else contextlib.nullcontext()


class _Looked(Protocol):
    """A layer whose result can be checked in every later call."""

    def look(self) -> None: ...


class HidingCode(TorchDispatchMode):
    """Find the layers whose overflow model code can hide, in a calibrating call.

    ``paused``: above 0 while no model code runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.begin()

    def __enter__(self):
        self._outer = getattr(_watching, "mode", None)
        _watching.mode = self
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        _watching.mode = self._outer
        self.begin()

    def begin(self) -> None:
        self.paused = 0
        self._recent: list[tuple[str, _Looked]] = []
        self._ends: list[_Looked] = []

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which no operation is watched."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def ran(self, name: str, layer: _Looked) -> None:
        """Note a layer that has just run. Of earlier blocks only the last layer is remembered."""
        block = block_of(name)
        if block and self._recent and (last := self._recent[-1])[0] not in ("", block):
            self._ends.append(last[1])
            self._recent = [each for each in self._recent if not each[0]]
        self._recent.append((block, layer))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.removesuffix("_")
        if not self.paused and name in HIDING and hidden_operands(name, args, kwargs or {}):
            self.look_behind(HIDING[name].nan)
        elif not self.paused and types and name in _PRODUCTS and any(map(is_traceable_wrapper_subclass, args)):
            self.look_behind(hides_nan=True)
        return plain_alias(func, func(*args, **(kwargs or {})))

    def look_behind(self, hides_nan: bool = False) -> None:
        """Have the results checked that an operation may hide an overflow of."""
        for layer in [layer for _, layer in self._recent] + (self._ends if hides_nan else []):
            layer.look()
