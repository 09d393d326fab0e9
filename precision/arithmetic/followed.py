"""Follow a norm's result through model code: what is scaled and shifted by small tensors keeps a bound, and is made in
fp16 at once where nothing but layers multiplies it and the bound fits.

A result that is followed is of a class of its own, whose operations torch hands over (``__torch_function__``); those of
all other tensors are not slowed down. A call that calibrates finds out what model code does with the result, and a
later one in which it does something else gets what torch gives.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from ..dtypes import FP16_MAX
from .known_values import KnownValues, Tag, counted, counting_writes, tag_at
from .modulation import Modulation, Operands
from .result_bound import RESULT_MARGIN
from .value_bounds import ValueBound


class Followed(torch.Tensor):
    """Be an ordinary tensor whose operations are seen."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            kwargs = kwargs or {}
            found = None
            if func in OPERATIONS and not kwargs:
                found = _modulated(func, *OPERATIONS[func], args)
            if found is None and func in BOUNDS:
                found = _carried(func, BOUNDS[func], args, kwargs)
            return _seen(func(*args, **kwargs), args) if found is None else found


_kinds: dict[type, type] = {torch.Tensor: Followed}


def follow(x: torch.Tensor) -> torch.Tensor:
    """Have the operations of a tensor seen from now on."""
    if not isinstance(x, Followed):
        kind = type(x)
        if kind not in _kinds:
            _kinds[kind] = type(Followed.__name__, (Followed, kind), {})
        x.__class__ = _kinds[kind]
    return x


def as_plain(*tensors: torch.Tensor) -> AbstractContextManager:
    """See no operation of these inside."""
    return torch._C.DisableTorchFunctionSubclass() if any(isinstance(x, Followed) for x in tensors) else nullcontext()


def _of_addcmul(args: tuple) -> Operands | None:
    pair = None if isinstance(args[0], Followed) else _of_two(args[1:])
    return None if pair is None else Operands(pair[0], pair[1], args[0])


def _of_mul(args: tuple) -> Operands | None:
    pair = _of_two(args)
    return None if pair is None else Operands(pair[0], pair[1], None)


def _of_add(args: tuple) -> Operands | None:
    pair = _of_two(args)
    return None if pair is None else Operands(pair[0], None, pair[1])


def _of_two(args: tuple) -> tuple[Any, Any] | None:
    """Return the followed one of two operands and the other."""
    if len(args) != 2 or isinstance(args[0], Followed) == isinstance(args[1], Followed):
        return None
    return args if isinstance(args[0], Followed) else (args[1], args[0])


OPERATIONS: dict[object, tuple[Callable, Callable]] = {
    torch.addcmul: (torch.addcmul, _of_addcmul),
    torch.Tensor.addcmul: (torch.addcmul, _of_addcmul),
    torch.mul: (torch.mul, _of_mul),
    torch.Tensor.mul: (torch.mul, _of_mul),
    torch.add: (torch.add, _of_add),
    torch.Tensor.add: (torch.add, _of_add),
}


def _modulated(func: object, operation: Callable, operands_of: Callable, args: tuple) -> torch.Tensor | None:
    """Return what an operation gives, known to keep a bound; None where it is not known to."""
    operands = operands_of(args)
    if operands is None or (tag := tag_at(operands.x)) is None or tag.path is None or not operands.can_be_measured():
        return None
    step = tag.path.next_of(tag, func)
    if step is None:
        return None
    if tag.values.calibrating:
        return _calibrated(step, tag, counted(operation(*args)), operands)
    if not step.is_relied_on or tag.values.uniform:
        return None
    step.record(operands, tag.call)
    with counting_writes():
        half = {"out": torch.empty(0, dtype=torch.float16, device=operands.x.device)} if step.narrows else {}
        result = operation(*args, **half)
    return _noted(step, tag.values, result) if result.shape == operands.x.shape else result


def _calibrated(step: Modulation, source: Tag, result: torch.Tensor, operands: Operands) -> torch.Tensor:
    known = source.values.of(operands.x)
    if result.shape != operands.x.shape or known is None or not step.calibrate(operands, known, source):
        return result
    result = _noted(step, source.values, result)
    step.tag = tag_at(result)
    if step.tag is not None:
        step.tag.sources = (source,)
    return result


def _noted(step: Modulation, values: KnownValues, result: torch.Tensor) -> torch.Tensor:
    tag = values.note(result, step.bound)
    if tag is None:
        return result
    tag.path, tag.made_by = step.path, step
    return follow(result)


def _kept(tensors: list[ValueBound]) -> ValueBound | None:
    return tensors[0] if tensors[0].largest <= FP16_MAX / RESULT_MARGIN else None


def _product(tensors: list[ValueBound]) -> ValueBound:
    return ValueBound(tensors[0].largest * tensors[1].largest)


def _largest(tensors: list[ValueBound]) -> ValueBound:
    return ValueBound(max(each.largest for each in tensors))


BOUNDS: dict[object, Callable[[list[ValueBound]], ValueBound | None]] = {
    F.gelu: _kept,
    F.silu: _kept,
    torch.mul: _product,
    torch.Tensor.mul: _product,
    torch.cat: _largest,
}
"""What is known of a result, from what is known of all tensors that it is made of. A GELU or SiLU is no larger than
what it is of. A product may pass fp16's range: it is then Inf, which every layer behind it shows."""


def _carried(func: Callable, bound_of: Callable, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Return what an operation of tensors gives that all are known; None where one is not."""
    tensors = list(args[0]) if isinstance(args[0], tuple | list) else [x for x in args if torch.is_tensor(x)]
    tags = [tag for x in tensors if (tag := tag_at(x)) is not None and not tag.values.uniform]
    if len(tags) != len(tensors) or "out" in kwargs or (bound_of is _product and len(tags) != 2):
        return None
    known = [bound for tag, x in zip(tags, tensors, strict=True) if (bound := tag.values.of(x)) is not None]
    if len(known) != len(tags) or (bound := bound_of(known)) is None:
        return None
    with counting_writes():
        result = func(*args, **kwargs)
    if (tag := tags[0].values.note(result, bound)) is None:
        return result
    tag.sources = tuple(tags)
    return follow(result)


def _seen(result: object, args: tuple) -> object:
    """Follow the views of a followed tensor; whatever else is made of it may need its precision."""
    x = next((each for each in args if isinstance(each, Followed)), None)
    for made in result if isinstance(result, tuple | list) else (result,):
        if not torch.is_tensor(made) or made is x or x is None:
            continue
        if made._is_view() and not made.is_inference() and made._base is (x._base if x._is_view() else x):
            follow(made)
        elif (tag := tag_at(x)) is not None and tag.made_by is not None and tag.values.calibrating:
            tag.made_by.refused = True
    return result
