"""The places in which Python code keeps state: what each holds, and how it is made to hold that again."""

from __future__ import annotations

import random
import types
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy
import torch

from .origins import OURS, Code, pack_and_node

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
        held = self.owner.copy()  # at once, as other threads may set attributes meanwhile
        for name in held.keys() & self.left_alone if self.left_alone else ():
            del held[name]
        return held

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
    """A generator of random numbers of torch, Python or numpy."""

    def read(self) -> Any:
        if isinstance(self.owner, numpy.random.Generator):
            return self.owner.bit_generator.state
        return getattr(self.owner, self._name("get"))()

    def write(self, held: Any) -> None:
        if isinstance(self.owner, numpy.random.Generator):
            self.owner.bit_generator.state = held
        else:
            getattr(self.owner, self._name("set"))(held)

    def _name(self, verb: str) -> str:
        return f"{verb}state" if isinstance(self.owner, random.Random) else f"{verb}_state"

    def values(self) -> list:
        return []

    def restore(self) -> None:
        self.write(self.kept)

    def replace(self, held: Any, present: Any = ABSENT) -> None:
        """Leave them: they have no dtype."""


class Advancing(Place):
    """A generator or another iterator of Python's own, which nothing can put back.

    Args:
        keeper: the code of a pack that keeps it.
    """

    def __init__(self, owner: Iterator, keeper: Code | None):
        self._alive: list = []
        self._keeper = keeper
        super().__init__(owner)

    @property
    def name(self) -> str:
        """Its name, with its pack and node."""
        own = self.owner.__qualname__ if isinstance(self.owner, types.GeneratorType) else type(self.owner).__qualname__
        of = pack_and_node(self.owner, self._keeper)
        return f"{own} ({of})" if of else own

    def read(self) -> list:
        return list(self._position(self.owner))

    def _position(self, value: Any) -> Iterator[object]:
        """Yield what tells how far an iterator is, and those it reads from."""
        if isinstance(value, types.GeneratorType):
            frame = value.gi_frame
            yield frame and frame.f_lasti
            for local in frame.f_locals.values() if frame else ():
                self._alive.append(local)
                yield id(local)
        elif isinstance(value, Iterator):
            try:
                yield from self._position(value.__reduce_ex__(2))
            except TypeError:  # one that cannot be copied, such as a memoryview's, and from Python 3.14 on of itertools
                yield object()
        elif isinstance(value, tuple):
            for part in value:
                yield from self._position(part)
        else:
            yield value if type(value) in (int, float, complex, bool) else len(value) if type(value) is list else None

    def values(self) -> list:
        return []

    def has_advanced(self) -> bool:
        """Tell whether it was advanced since, or may have been."""
        return self.kept != self.read()

    def restore(self) -> None:
        """Leave it as it is."""

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
