"""The places in which Python code keeps state: what each holds, and how it is made to hold that again."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy
import torch

OURS = __name__.partition(".nodes.")[0]
ABSENT = object()
CELL = {"cell_contents": vars(types.CellType)["cell_contents"]}
OF_CLASSES = (
    *(types.FunctionType, staticmethod, classmethod, property),
    *(types.MemberDescriptorType, types.GetSetDescriptorType),
)


class Place:
    """One place and what it held: ``kept``."""

    def __init__(self, owner: Any, left_alone: Collection[str] = ()):
        self.owner, self.left_alone = owner, left_alone
        self.kept = self.read()

    def read(self) -> Any:
        """Return a shallow copy of what the place holds now."""
        return dict(self.owner)

    def write(self, held: Any) -> None:
        """Make the place hold what a copy has."""
        self.owner.clear()
        self.owner.update(held)

    def values(self) -> Collection:
        """Return the values that were held."""
        return self.kept.values() if isinstance(self.kept, dict) else self.kept

    def restore(self) -> None:
        """Make the place hold what it held."""
        self.replace(self.kept, self.read())

    def replace(self, held: Any, present: Any = ABSENT) -> None:
        """Make the place hold this, if it is anything else than ``present``, its content when this was made."""
        if not _same(held, self.kept if present is ABSENT else present):
            self.write(held)


class Sequence(Place):
    """A list, deque or set."""

    def read(self) -> list:
        return list(self.owner)

    def write(self, held: list) -> None:
        self.owner.clear()
        (self.owner.extend if hasattr(self.owner, "extend") else self.owner.update)(held)


class Names(Place):
    """Names with values in a dict, some of which are not state: the attributes of an instance, the data of a module."""

    def read(self) -> dict:
        held, left_alone = self.owner.copy(), self.left_alone  # at once, as other threads may set attributes meanwhile
        return {name: value for name, value in held.items() if name not in left_alone} if left_alone else held

    def restore(self) -> None:
        self.write(self.kept)

    def write(self, held: dict) -> None:
        present = self.read()
        for name in present.keys() | held.keys():
            old, new = present.get(name, ABSENT), held.get(name, ABSENT)
            if new is not old and not _is_ours(old) and not _is_ours(new):
                self.put(name, new)

    def put(self, name: str, value: object) -> None:
        """Give a name its value, or take it away."""
        if value is ABSENT:
            self.owner.pop(name, None)
        else:
            self.owner[name] = value


class Attributes(Names):
    """Attributes of an owner that has no dict to write to: slots, a cell of a closure; name -> its descriptor."""

    def __init__(self, owner: object, descriptors: Mapping[str, Any]):
        self._descriptors = descriptors
        super().__init__(owner)

    def read(self) -> dict:
        found = {}
        for name, descriptor in self._descriptors.items():
            try:
                found[name] = descriptor.__get__(self.owner)
            except (AttributeError, ValueError):  # an empty slot; an empty cell
                continue
        return found

    def put(self, name: str, value: object) -> None:
        descriptor = self._descriptors[name]
        (descriptor.__delete__(self.owner) if value is ABSENT else descriptor.__set__(self.owner, value))


class ClassData(Names):
    """The data that a class has of its own, without constants."""

    def read(self) -> dict:
        own = vars(self.owner).copy().items()
        return {name: value for name, value in own if not _is_of_class(name, value)}

    def put(self, name: str, value: object) -> None:
        (delattr(self.owner, name) if value is ABSENT else setattr(self.owner, name, value))


class Tensors(Place):
    """A tensor or array that may be written in place, copied."""

    LARGEST = 1 << 20

    def __init__(self, owner: Any):
        super().__init__(owner)
        self._memory = _memory_of(owner)

    def read(self) -> Any:
        return self.owner.copy() if isinstance(self.owner, numpy.ndarray) else self.owner.clone()

    def values(self) -> list:
        return []

    def restore(self) -> None:
        """Write the numbers back, unless the tensor was given other memory since."""
        if _memory_of(self.owner) == self._memory:
            self.owner[...] = self.kept

    def replace(self, held: Any, present: Any = ABSENT) -> None:
        """Leave the numbers: a tensor in another dtype is another tensor."""


class RandomNumbers(Place):
    """A generator of random numbers."""

    def read(self) -> torch.Tensor:
        return self.owner.get_state()

    def write(self, held: torch.Tensor) -> None:
        self.owner.set_state(held)

    def values(self) -> list:
        return []

    def replace(self, held: torch.Tensor, present: Any = ABSENT) -> None:
        if present is not ABSENT:
            self.write(held)


class Generated(Place):
    """A suspended generator of Python, which nothing can put back."""

    def read(self) -> list:
        frame = self.owner.gi_frame
        return [frame and frame.f_lasti, *(frame.f_locals.values() if frame else ())]

    @property
    def name(self) -> str:
        """Its name."""
        return self.owner.__qualname__

    def has_advanced(self) -> bool:
        """Tell whether it was advanced since."""
        return [id(value) for value in self.kept] != [id(value) for value in self.read()]

    def replace(self, held: list, present: Any = ABSENT) -> None:
        """Leave it as it is."""


def _is_of_class(name: str, value: object) -> bool:
    return name.startswith("__") or name.isupper() or isinstance(value, OF_CLASSES)


def _memory_of(tensor: Any) -> tuple:
    """Tell where a tensor's or array's numbers are, and whether an array's can be written."""
    if isinstance(tensor, numpy.ndarray):
        return tensor.__array_interface__["data"], tensor.shape
    return tensor.data_ptr(), tensor.shape


def _is_ours(value: object) -> bool:
    function = getattr(value, "func", value) if callable(value) else type(value)
    return (getattr(function, "__module__", None) or "").startswith(OURS)


def _same(held: Any, present: Any) -> bool:
    """Tell whether two copies hold the same objects in the same order."""
    if isinstance(held, torch.Tensor):
        return False
    first, second = (list(_flat(one)) for one in (held, present))
    return len(first) == len(second) and all(one is other for one, other in zip(first, second, strict=True))


def _flat(held: dict | list) -> Iterator[object]:
    return (part for item in held.items() for part in item) if isinstance(held, dict) else iter(held)
