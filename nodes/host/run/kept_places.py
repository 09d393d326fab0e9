"""The places in which Python code keeps state: what each holds, and how it is made to hold that again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy
import torch

OURS = __name__.partition(".nodes.")[0]
ABSENT = object()


class Place:
    """One place and what it held: ``kept``."""

    def __init__(self, owner: Any):
        self.owner = owner
        self.kept = self.read()

    def read(self) -> Any:
        """Return a shallow copy of what the place holds now."""
        return dict(self.owner)

    def write(self, held: Any) -> None:
        """Make the place hold what a copy has."""
        self.owner.clear()
        self.owner.update(held)

    def values(self) -> list:
        """List the values that were held."""
        return list(self.kept.values() if isinstance(self.kept, dict) else self.kept)

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

    def __init__(self, owner: dict, left_alone: frozenset[str] = frozenset()):
        self.left_alone = left_alone
        super().__init__(owner)

    def read(self) -> dict:
        left_alone = self.left_alone
        return {name: value for name, value in self.owner.items() if name not in left_alone}

    def write(self, held: dict) -> None:
        present = self.read()
        for name in {**present, **held}:
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
    """Attributes of an owner that has no dict to write to: slots, a cell of a closure, a class."""

    def __init__(self, owner: object, names: Iterable[str]):
        self._names = tuple(names)
        super().__init__(owner)  # type: ignore[arg-type]

    def read(self) -> dict:
        found = {}
        for name in self._names:
            try:
                found[name] = getattr(self.owner, name)
            except (AttributeError, ValueError):  # an empty slot; an empty cell
                continue
        return found

    def put(self, name: str, value: object) -> None:
        (delattr(self.owner, name) if value is ABSENT else setattr(self.owner, name, value))


class Tensors(Place):
    """A tensor or array that may be written in place, copied."""

    LARGEST = 1 << 20

    def read(self) -> Any:
        return self.owner.copy() if isinstance(self.owner, numpy.ndarray) else self.owner.clone()

    def values(self) -> list:
        return []

    def restore(self) -> None:
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
