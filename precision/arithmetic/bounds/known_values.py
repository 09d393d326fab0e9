"""Carry the bound of a tensor from the operation that made it to the one it is given to, through eager model code.

The bound is kept on the tensor, with its version: it holds for the tensor and its views until somebody writes to it,
whatever model code and other packs do in between. What they compute from it is another tensor, which has none.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

from ...amax import amax
from ..norms import largest_row_norm
from ..proofs import HEADROOM_BITS, Proof, fits_range
from .rotation import Rotation
from .value_bounds import ValueBound

if TYPE_CHECKING:
    from ..operand_scale import OperandScale
    from .modulation import Modulation, Path

TAG = "_halfsafe_bound"
SAMPLED = 16
"""One call of so many measures what is known too: how small operands have become shows in no upper bound."""


class Tag:
    """Keep what is known of a tensor's values in one call; ``bound`` is None until it is measured, by ``once``.

    A tensor has one only where no operation that made it hides what is not finite, as a clamp does. ``used``: an
    operation relies on it. ``carried``: something was made of it that keeps a bound too. Of a tensor that is followed
    (``followed.py``), ``path``: what modulates it, ``steps``: how much of that was made; ``made_by``: the modulation
    that the tensor is the result of; ``sources``: of what it was made of. ``operand``: it in fp16, for all operations
    that it was measured for.
    """

    __slots__ = (
        "__weakref__",
        *("bound", "call", "carried", "columns", "dtype", "made_by", "once", "operand"),
        *("path", "sources", "steps", "used", "values", "version"),
    )

    def __init__(self, bound: ValueBound | None, values: KnownValues, x: torch.Tensor):
        self.bound, self.values, self.version, self.dtype = bound, values, x._version, x.dtype
        self.call = values.call
        self.columns = x.shape[-1] if x.dim() else 1
        self.once: MeasuredOnce | None = None
        self.operand: torch.Tensor | None = None
        self.path: Path | None = None
        self.steps = 0
        self.made_by: Modulation | None = None
        self.sources: tuple[Tag, ...] = ()
        self.used = self.carried = False

    def forget(self) -> None:
        """Know nothing of the tensor any more."""
        self.version = -1

    def __reduce__(self) -> tuple:
        """Copy and save nothing with a tensor; torch loads an empty set everywhere."""
        return set, ()


class MeasuredOnce(Proof):
    """Prove that a tensor which several operations multiply keeps a bound, from one measurement a call.

    ``assumed``: the bound, two bits above the numbers it was made from. ``uses``: how many operands it is the bound of.
    """

    width = 2

    def __init__(self, name: str):
        super().__init__(name)
        self.assumed = ValueBound(0.0, 0.0)
        self.uses = 0

    @property
    def is_shared(self) -> bool:
        return self.uses > 1

    def forget(self) -> None:
        """Begin anew, for a model whose operands are others now."""
        super().forget()
        self.assumed = ValueBound(0.0, 0.0)

    def measure(self, x: torch.Tensor) -> None:
        """Assume of the tensor what it keeps now, and what it kept in earlier calls."""
        self.recorder.device, self.uses = x.device, 0
        largest, norm = (2.0**HEADROOM_BITS * number for number in _measured(x))
        self.assumed = ValueBound(max(largest, self.assumed.largest), max(norm, self.assumed.norm))

    def record(self, x: torch.Tensor) -> None:
        """Record the tensor's amax and the largest 2-norm of its rows."""
        if self.recorder.entry is None or self.recorder.entry.device != x.device:
            self.recorder.missed = True
            return
        self.recorder.entries[0].write_amax(x)
        self.recorder.entries[1].write_row_norm(x)

    def magnitude(self, numbers: list[float]) -> float:
        return numbers[0] if numbers[1] <= self.assumed.norm else math.nan

    def holds(self, magnitude: float) -> bool:
        """Tell whether the tensor keeps the bound."""
        return fits_range(magnitude, self.assumed.largest)


class KnownValues:
    """Hold the bounds of one call of a model.

    ``call``: stands for it; ``since``: for the last one that calibrated. ``paths``: of the tensors that are followed.
    ``rotations``: of q and k, in the order in which the call that calibrated met them.
    ``follows``: any are; none is where one is given to a part that is compiled.
    ``sampling``: this call measures what is known too. ``uniform``: what is measured must not depend on the block, as
    ComfyUI's model compiler asks: nothing is measured once for all of them, and nothing is known of an attention, which
    is told from others by its order in a call only.
    """

    def __init__(self) -> None:
        self.call = self.since = object()
        self._calls = 0
        self.calibrating = True
        self.paths: list[Path] = []
        self.rotations: list[Rotation] = []
        self._matrices: list[weakref.ref[torch.Tensor]] = []
        self.follows = True
        self._followed: list[tuple[weakref.ref[torch.Tensor], type]] = []
        self.sampling = False
        self.uniform = False

    def begin(self, calibrating: bool) -> None:
        """Start a call: what was known of tensors of earlier ones is not relied on."""
        self.end()
        self.call = object()
        self.calibrating = calibrating
        self.since = self.call if calibrating else self.since
        self._calls = 0 if calibrating else self._calls + 1
        self.sampling = self._calls % SAMPLED == 0

    def followed(self, x: torch.Tensor, kind: type) -> None:
        """Note that a tensor has another class until the call ends, in place of this one."""
        self._followed.append((weakref.ref(x), kind))

    def end(self) -> None:
        """Give every tensor of the call its own class, wherever it is kept."""
        for kept, kind in self._followed:
            if (x := kept()) is not None:
                x.__class__ = kind
        self._followed.clear()
        self._matrices.clear()

    def note(self, x: torch.Tensor, bound: ValueBound | None = None) -> Tag | None:
        """Keep a bound on a tensor, or that one may come; None where torch does not count who writes to it."""
        if torch.compiler.is_compiling() or x.is_inference():
            return None
        tag = Tag(bound, self, x)
        setattr(x, TAG, tag)
        # ``F.linear`` gives a view of its matrix product: views of the result are views of that.
        if x._base is not None and x.numel() == x._base.numel() and x.is_contiguous() and x._base.is_contiguous():
            setattr(x._base, TAG, tag)
        return tag

    def tag_of(self, x: torch.Tensor) -> tuple[Tag | None, bool]:
        """Return what is known of a tensor, and whether it is the very tensor that it was found out of, or a view."""
        tag, is_view = getattr(x, TAG, None), False
        if not tag and not x.is_inference() and x._base is not None:
            tag, is_view = getattr(x._base, TAG, None), True
        if not tag or tag.call is not self.call or tag.version != x._version or tag.dtype != x.dtype:
            return None, False
        return tag, is_view

    def of(self, x: torch.Tensor) -> ValueBound | None:
        """Return the bound of a tensor, if one is known."""
        tag, is_view = self.tag_of(x)
        if tag is None or tag.bound is None:
            return None
        return _of_view(tag, x) if is_view else tag.bound

    def head_norm(self, x: torch.Tensor, size: int) -> float:
        """Return the largest 2-norm of ``size`` successive numbers of a tensor, from a multiple of it on."""
        tag, is_view = self.tag_of(x)
        if tag is None or tag.bound is None:
            return math.inf
        inside = not is_view or _lie_inside(tag, x, size)
        return tag.bound.of_head(size) if inside else math.sqrt(size) * tag.bound.largest

    def rotation(self, matrices: torch.Tensor) -> Rotation | None:
        """Return what is known of matrices that rotate, measured where the call meets them first; None for some that
        the call that calibrated did not meet."""
        for met, rotation in zip(self._matrices, self.rotations, strict=False):
            if met() is matrices:
                return rotation
        place = len(self._matrices)
        if place == len(self.rotations):
            if not self.calibrating:
                return None
            self.rotations.append(Rotation(f"rotation {place}"))
        self._matrices.append(weakref.ref(matrices))
        if self.calibrating:
            self.rotations[place].measure(matrices)
        else:
            self.rotations[place].record(matrices)
        return self.rotations[place]

    def covers(self, scale: OperandScale, x: torch.Tensor) -> bool:
        """Tell whether an operation needs no look at its operand: what it was calibrated for holds by what is known of
        it. A tensor that is measured once a call is measured here."""
        if scale.covered is None or torch.compiler.is_compiling():
            return False
        tag, is_view = self.tag_of(x)
        if tag is None:
            return False
        if tag.bound is None and scale.once is not None and scale.once.is_shared and not is_view:
            tag.once = scale.once
            tag.once.record(x)
            tag.bound = tag.once.assumed
        bound = _of_view(tag, x) if tag.bound is not None and is_view else tag.bound
        return bound is not None and bound.is_within(scale.covered)

    def known(self, scale: OperandScale, x: torch.Tensor) -> ValueBound | None:
        """Return what a call that calibrates knows of an operand. It measures a tensor that is tagged without a bound:
        the next operation that is given it knows."""
        tag, is_view = self.tag_of(x)
        if tag is not None and tag.bound is None and not is_view:
            scale.once = tag.once = scale.once or MeasuredOnce(f"{scale.name} input")
            scale.once.measure(x)
            tag.bound = scale.once.assumed
        return self.of(x)

    def rely_on(self, x: torch.Tensor, alone: bool = True) -> None:
        """Note that an operation relies on the bound of a tensor. ``alone``: it would measure it itself otherwise."""
        tag, _ = self.tag_of(x)
        if tag is not None:
            if tag.once is not None:
                tag.once.uses += alone
            _use(tag)

    def multiply(self, x: torch.Tensor, in_fp16: bool) -> None:
        """Note that a layer multiplies a tensor, and whether it does so in fp16, unscaled."""
        tag, _ = self.tag_of(x)
        if tag is None or tag.made_by is None:
            return
        if in_fp16:
            tag.made_by.wanted = True
            for source in tag.sources:
                _use(source)
        else:
            tag.made_by.refused = True

    def modulations(self) -> list[Modulation]:
        """List the modulations that are relied on since the last calibration, those of as many numbers next to each
        other."""
        all_found = (step for path in self.paths for step in path.modulations())
        found = (step for step in all_found if step.since is self.since and step.is_relied_on)
        return sorted(found, key=lambda step: step.numbers)


def _of_view(tag: Tag, x: torch.Tensor) -> ValueBound:
    size = x.shape[-1] if x.dim() else 1
    return ValueBound(tag.bound.largest, tag.bound.norm if _lie_inside(tag, x, size) else math.inf)


def _lie_inside(tag: Tag, x: torch.Tensor, size: int) -> bool:
    """Tell whether so many successive numbers of a view, from a multiple of it on, lie in one row of what has a
    bound."""
    with torch._C.DisableTorchFunctionSubclass():
        base = x._base
        if not size or tag.columns % size or not (x.is_contiguous() and base.is_contiguous()):
            return False
        return (x.storage_offset() - base.storage_offset()) % size == 0


def _use(tag: Tag) -> None:
    tag.used = True
    for source in tag.sources:
        _use(source)


def tag_at(x: torch.Tensor) -> Tag | None:
    """Return what is known of a tensor by whatever model's call it was made in."""
    tag = getattr(x, TAG, None)
    if not tag and not x.is_inference() and x._base is not None:
        tag = getattr(x._base, TAG, None)
    return tag.values.tag_of(x)[0] if tag else None


def _measured(x: torch.Tensor) -> tuple[float, float]:
    return amax(x).item(), largest_row_norm(x).item()


@contextmanager
def _counting_writes() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():
        yield


def counting_writes() -> AbstractContextManager[None]:
    """Let torch count who writes to the results of what runs inside, which it does not in inference mode."""
    return _counting_writes() if torch.is_inference_mode_enabled() else nullcontext()


def counted(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory to which torch counts who writes."""
    if not x.is_inference():
        return x
    with _counting_writes():
        return torch.empty(0, dtype=x.dtype, device=x.device).set_(x)
