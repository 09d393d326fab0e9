"""Follow a norm's result through model code: what is scaled and shifted by small tensors keeps a bound, and is made in
fp16 at once where nothing but layers multiplies it and the bound fits.

A result that is followed is of a class of its own, whose operations torch hands over (``__torch_function__``); those of
all other tensors are not slowed down. It has that class between the operations of model code only: layers, attention
and whatever is not known here are given a plain tensor, and everything is one again when the call ends, in whatever
way (``end``), so that what a cache keeps is plain. A call that calibrates finds out what model code does with the
result; one that does something else with a result made in fp16 is repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch._guards import TracingContext

from ...dtypes import FP16_MAX
from ...nested import PLAIN
from ..result_bound import RESULT_MARGIN
from .known_values import KnownValues, Tag, counted, counting_writes, tag_at
from .modulation import Modulation, Operands
from .value_bounds import ValueBound


class Followed(torch.Tensor):
    """Be an ordinary tensor whose operations are seen."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if torch.compiler.is_compiling():
                return func(*args, **kwargs)
            found = None
            if func in OPERATIONS and not kwargs:
                found = _modulated(func, *OPERATIONS[func], args)
            if found is None and func in ROTATES and not kwargs:
                found = _rotated(func, args)
            if found is None and func in BOUNDS:
                found = _carried(func, BOUNDS[func], args, kwargs)
            return _otherwise(func, args, kwargs) if found is None else found


_kinds: dict[type, type] = {torch.Tensor: Followed}
_plain: dict[type, type] = {Followed: torch.Tensor}
PLAIN.add(Followed)


def follow(x: torch.Tensor, values: KnownValues) -> torch.Tensor:
    """Have the operations of a tensor seen from now on, until the call ends."""
    kind = type(x)
    if kind not in _plain and values.follows:
        if kind not in _kinds:
            _kinds[kind] = made = type(Followed.__name__, (Followed, kind), {})
            _plain[made] = kind
        x.__class__ = _kinds[kind]
        values.followed(x, kind)
    return x


def is_followed(x: object) -> bool:
    """Tell whether the operations of a tensor are seen."""
    return type(x) in _plain


@contextmanager
def as_plain(x: torch.Tensor) -> Iterator[None]:
    """See no operation of a tensor inside, where it is a plain one."""
    kind = type(x)
    x.__class__ = _plain[kind]
    try:
        yield
    finally:
        x.__class__ = kind


def unfollow(*tensors: object) -> None:
    """Make tensors plain that something else than a layer is given."""
    for x in tensors:
        if is_followed(x):
            x.__class__ = _plain[type(x)]
            _unforeseen(x, tag_at(x))


def _of_addcmul(args: tuple) -> Operands | None:
    pair = None if is_followed(args[0]) else _of_two(args[1:])
    return None if pair is None else Operands(pair[0], pair[1], args[0])


def _of_mul(args: tuple) -> Operands | None:
    pair = _of_two(args)
    return None if pair is None else Operands(pair[0], pair[1], None)


def _of_add(args: tuple) -> Operands | None:
    pair = _of_two(args)
    return None if pair is None else Operands(pair[0], None, pair[1])


def _of_two(args: tuple) -> tuple[Any, Any] | None:
    """Return the followed one of two operands and the other."""
    if len(args) != 2 or is_followed(args[0]) == is_followed(args[1]):
        return None
    return args if is_followed(args[0]) else (args[1], args[0])


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
    if tag.steps == len(tag.path.steps) and operands.x.dtype != torch.float16:
        operands.x.__class__ = _plain[type(operands.x)]
    with counting_writes():
        half = {"out": torch.empty_like(operands.x, dtype=torch.float16)} if step.narrows else {}
        return _noted(step, tag.values, operation(*args, **half))


def _calibrated(step: Modulation, source: Tag, result: torch.Tensor, operands: Operands) -> torch.Tensor:
    _unforeseen(operands.x, source)
    known = source.values.of(operands.x)
    if known is None or not step.calibrate(operands, known, source):
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
    return follow(result, values)


def _kept(tensors: list[ValueBound], *_: object) -> ValueBound | None:
    return tensors[0] if tensors[0].largest <= FP16_MAX / RESULT_MARGIN else None


def _product(tensors: list[ValueBound], *_: object) -> ValueBound:
    return ValueBound(tensors[0].largest * tensors[1].largest)


def _largest(tensors: list[ValueBound], dimension: int, dim: int = 0) -> ValueBound:
    largest = ValueBound(*map(max, zip(*tensors, strict=True)))
    return ValueBound(largest.largest) if dim in (-1, dimension - 1) else largest._replace(sample=math.inf)


BOUNDS: dict[object, Callable[..., ValueBound | None]] = {
    F.gelu: _kept,
    F.silu: _kept,
    torch.mul: _product,
    torch.Tensor.mul: _product,
    torch.cat: _largest,
    torch.Tensor.contiguous: _kept,
}
"""What is known of a result, from what is known of all tensors that it is made of, how many dimensions they have, and
what else the operation is given. A GELU or SiLU is no larger than what it is of. A product may pass fp16's range: it
is then Inf, which every layer behind it shows."""


def _carried(func: Callable, bound_of: Callable, args: tuple, kwargs: dict) -> torch.Tensor | None:
    """Return what an operation of tensors gives that all are known; None where one is not."""
    tensors = list(_tensors_of((*args, *kwargs.values())))
    tags = [tag for x in tensors if (tag := tag_at(x)) is not None and not tag.values.uniform]
    if len(tags) != len(tensors) or "out" in kwargs or (bound_of is _product and len(tags) != 2):
        return None
    known = [bound for tag, x in zip(tags, tensors, strict=True) if (bound := tag.values.of(x)) is not None]
    others = [each for each in (*args, *kwargs.values()) if hasattr(each, "__index__") and not torch.is_tensor(each)]
    if len(known) != len(tags) or (bound := bound_of(known, tensors[0].dim(), *others)) is None:
        return None
    for tag, x in zip(tags, tensors, strict=True):
        _unforeseen(x, tag)
        tag.carried = tag.carried or tag.values.calibrating
    with counting_writes():
        result = func(*args, **kwargs)
    if result is tensors[0] or (tag := tags[0].values.note(result, bound)) is None:
        return result
    tag.sources = tuple(tags)
    return follow(result, tag.values)


ROTATES: set[object] = set()
"""The operations that multiply pairs of numbers of each tensor by the 2 x 2 matrices given last, added by a host."""


def _rotated(func: Callable, args: tuple) -> Any:
    """Return rotated tensors, those that something is known of known to keep a bound; None where nothing is."""
    *tensors, matrices = args
    found = [(tag, tag.values.of(x)) if (tag := tag_at(x)) is not None else (None, None) for x in tensors]
    values = next((tag.values for tag, bound in found if bound is not None and not tag.values.uniform), None)
    rotation = None if values is None or is_followed(matrices) else values.rotation(matrices)
    if rotation is None:
        return None
    with ExitStack() as plain:
        for x in filter(is_followed, tensors):
            plain.enter_context(as_plain(x))
        plain.enter_context(counting_writes())
        result = func(*args)
    for (tag, bound), x, made in zip(found, tensors, result if isinstance(result, tuple) else (result,), strict=True):
        _unforeseen(x, tag)
        if bound is not None and (made_tag := values.note(made, rotation.of(bound))) is not None:
            tag.carried = tag.carried or values.calibrating
            made_tag.sources = (tag,)
    return result


def _otherwise(func: Callable, args: tuple, kwargs: dict) -> object:
    """Run what is not known here on plain tensors. Views of a followed one are followed."""
    found = [(x, type(x), tag_at(x)) for x in _tensors_of((*args, *kwargs.values())) if is_followed(x)]
    for x, kind, _ in found:
        x.__class__ = _plain[kind]
    try:
        result = func(*args, **kwargs)
    except BaseException:
        for x, _, tag in found:
            _unforeseen(x, tag)
        raise
    for x, kind, tag in found:
        if tag is None:
            continue
        if TracingContext.try_get() is not None:
            tag.values.follows = False  # a graph is of tensors of one class: it would be traced again in each call
            _unforeseen(x, tag)
        made = [each for each in _tensors_of((result,)) if _is_counted_view(each, x)]
        for view in made:
            follow(view, tag.values)
        if not made and _name_of(func) not in ABOUT:
            _unforeseen(x, tag)
            if _hands_out_memory(func, x, result):
                tag.forget()
        if tag_at(x) is tag and tag.values.follows:
            x.__class__ = kind
    return result


def _tensors_of(values: tuple) -> Iterator[torch.Tensor]:
    for value in values:
        for each in value if isinstance(value, tuple | list) else (value,):
            if torch.is_tensor(each):
                yield each


def _is_counted_view(made: torch.Tensor, x: torch.Tensor) -> bool:
    """Tell whether a tensor is a view of another, and writes to it are counted as writes to that."""
    if made is x or made.is_inference() or not made._is_view():
        return False
    return made._base is (x._base if x._is_view() else x)


ABOUT = frozenset(
    {
        *("shape", "size", "dim", "ndim", "numel", "stride", "is_contiguous", "layout", "__len__", "_version"),
        *("device", "get_device", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta", "is_sparse", "is_quantized"),
        *("is_floating_point", "is_complex", "requires_grad", "is_inference", "is_nested", "is_leaf"),
    }
)
"""What tells of a tensor what is the same in fp16; numbers, dtype and bytes are not."""
NUMBERS = (bool, int, float, list, str, torch.dtype)


def _name_of(func: Any) -> str:
    if func.__name__ != "__get__":
        return func.__name__
    attribute = func.__self__
    return getattr(attribute, "fget", attribute).__name__  # a property has no name of its own before Python 3.13


def _hands_out_memory(func: Callable, x: torch.Tensor, result: object) -> bool:
    """Tell whether the tensor may be written to from now on without torch counting it."""
    if torch.is_tensor(result):
        return result is not x and result.untyped_storage()._cdata == x.untyped_storage()._cdata
    return not isinstance(result, NUMBERS) or func.__name__ == "data_ptr"


def _unforeseen(x: torch.Tensor, tag: Tag | None) -> None:
    """Note that something else is done to a tensor than that a layer multiplies it: it is not to be made in fp16, and
    if it was, the call is repeated."""
    step = tag and tag.made_by
    if not step or tag is None:
        return
    if tag.values.calibrating:
        step.refused = True
    elif x.dtype == torch.float16:
        step.recorder.missed = True
