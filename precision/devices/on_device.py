"""Quantized weights made on a device that has memory of its own, each uploaded while the one before is made.

By the same functions as on a CPU. fp8 is equal bit for bit: a largest magnitude is the same in any order, its scale is
a power of two, and both round a cast to nearest even. int8 and fewer bits rotate first, a product whose sums a device
adds in another order: a scale can differ in its last bits from a CPU's, and here and there a code by one step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from traceback import clear_frames
from typing import TypeVar

import torch

from ..arithmetic.flags import flags_set
from ..dtypes import QUANTIZED_NAMES
from ..formats.comfy_format import WeightPlan, stays, tensors_of
from ..formats.comfy_state import Made
from ..formats.scratch import forget_scratch
from ..formats.stored_weight import StoredWeight
from ..oom import is_oom
from .pinned import PinnedCopies

SOURCES = (torch.float16, torch.bfloat16, torch.float32)
SMALL = 1 << 18
"""Values below which a weight is made sooner than a device has been asked and waited for: 0.4 ms of a core in fp8."""
WORK = 256 << 20
"""Bytes of the device that making a weight takes beside it and its result: for codes of 4 bits, which take most."""
T = TypeVar("T")


@dataclass
class _Begun:
    """A weight whose turn has come. ``there``: it on the device, once ``arrived`` has passed; None: made on the CPU."""

    name: str
    weight: StoredWeight
    plan: WeightPlan
    there: StoredWeight | None = None
    arrived: torch.cuda.Event | None = None


class OnDevice:
    """Makes the weights that gain by it on a device while inside of ``with``, and holds none of its memory after that.

    On the CPU stay: weights that are only cast, which is as much to copy as to compute; those that are unpacked or
    have scales in the file, whose unpacking is the CPU's; those too small to gain; and any that the device has too
    little memory for.

    Args:
        device: CUDA's or ROCm's.
        free: bytes of its memory that nobody uses. Half of them are used at most.

    Attributes:
        made: the bytes of the weights that were made there.
        used: something was asked of the device.
    """

    def __init__(self, device: torch.device, free: int):
        self._device, self._room = device, free // 2
        self._copies: PinnedCopies | None = None
        self._begun: deque[_Begun] = deque()
        self.made, self.used = 0, False

    def __enter__(self) -> OnDevice:
        return self

    def __exit__(self, kind, error: BaseException | None, traceback) -> None:
        if self._copies is not None:
            self._copies.close()
        self._begun.clear()
        if error is not None:
            clear_frames(error.__traceback__)  # or who keeps the error keeps the tensors that its frames name
        if self.used:
            forget_scratch()

    def weights(
        self, weights: Iterable[tuple[str, StoredWeight]], plans: Mapping[str, WeightPlan], path, read: bool
    ) -> Iterator[Made]:
        """Make weights in their order; see :func:`~halfsafe.precision.formats.comfy_state.made_here`."""
        for name, weight in weights:
            begun = self._begin(name, weight, plans[name])
            if begun.there is not None:
                yield from self._ended(path, read)
            self._begun.append(begun)
            if self._begun[0].there is None:
                yield from self._ended(path, read)
        yield from self._ended(path, read)

    def _begin(self, name: str, weight: StoredWeight, plan: WeightPlan) -> _Begun:
        there = _unless_full(self._upload, weight) if self._gains(weight, plan) else None
        return _Begun(name, weight, plan, *(there or ()))

    def _gains(self, weight: StoredWeight, plan: WeightPlan) -> bool:
        made = plan.storage in QUANTIZED_NAMES and not stays(weight, plan.storage)
        large = weight.plain and weight.data.dtype in SOURCES and weight.data.numel() >= SMALL
        # Twice: the next one is uploaded while it is made.
        return made and large and 2 * (weight.data.nbytes + plan.bytes) + WORK <= self._room

    def _upload(self, weight: StoredWeight) -> tuple[StoredWeight, torch.cuda.Event]:
        self.used = True
        if self._copies is None:
            self._copies = PinnedCopies(self._device)
        data, arrived = self._copies.upload(weight.data)
        return replace(weight, data=data), arrived

    def _ended(self, path, read: bool) -> Iterator[Made]:
        while self._begun:
            begun = self._begun.popleft()
            made = _unless_full(self._made, begun, path) if begun.there is not None else None
            yield begun.name, begun.weight, made or tensors_of(begun.weight, begun.plan.storage, path, read)

    def _made(self, begun: _Begun, path) -> dict[str, torch.Tensor]:
        there, begun.there, copies = begun.there, None, self._copies
        assert there is not None and copies is not None
        torch.cuda.current_stream(self._device).wait_event(begun.arrived)
        # TF32 rounds what is rotated to 10 bits.
        with flags_set({"tf32_matmul": False}):
            tensors = tensors_of(there, begun.plan.storage, path)
        del there
        tensors = {name: one if one.device.type == "cpu" else copies.download(one) for name, one in tensors.items()}
        self.made += begun.plan.bytes
        return tensors


def _unless_full(work: Callable[..., T], *args) -> T | None:
    """Return what some work gives, None where the device has no memory left for it."""
    try:
        return work(*args)
    except RuntimeError as error:
        if not is_oom(error):
            raise
    return None
