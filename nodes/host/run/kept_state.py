"""Put back what nodes and models keep of one call for the next, so that a repeat finds what the call found.

Found from structure, in whatever hangs on a model's call: its ``transformer_options``, the model options of its
patcher, the attributes of its modules; from there containers, closures, instances and, of packs, the data in their
modules. Left alone: weights, what torch, Python's own library and ComfyUI's management of models keep, and the
attributes of single layers.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy
import torch

from ....precision import nested
from ..core import core_writes
from .kept_places import (
    CELL,
    Advancing,
    Attributes,
    ClassData,
    Names,
    Place,
    RandomNumbers,
    Sequence,
    Tensors,
)
from .origins import OURS, Code, is_of_framework, is_of_pack, keeper_of

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

OF_TORCH = frozenset(vars(torch.nn.Module())) - {"forward"}
OF_PYTHON = frozenset({"__path__", *(name for name in vars(types) if name.startswith("__"))})
PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range, types.BuiltinFunctionType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.nn.Parameter),
    }
)
RANDOM = (random.Random, numpy.random.RandomState, numpy.random.Generator, torch.Generator)
GLOBAL_RANDOM_NUMBERS = (random.random.__self__, numpy.random.rand.__self__)
MOST = 4096
"""Larger containers, such as vocabularies, are put back, but what is in them is not looked at."""


class KeptState:
    """What is kept between the calls of a model, as it is now.

    Args:
        options: the call's ``transformer_options``.
        largest: tensors of at most so many bytes are copied, as they may be written to; larger ones are kept by
            reference. None: all are copied.

    ``keepers``: the packs that have code on the model.
    """

    def __init__(self, model: BaseModel, options: dict, largest: int | None = Tensors.LARGEST):
        self._walk = Walk(largest)
        self._walk.model(model, options)
        self.places: list[Place] = self._walk.places

    @property
    def keepers(self) -> list[str]:
        """Return the names of the packs whose code was met."""
        return sorted(self._walk.keepers)

    def restore(self) -> None:
        """Put everything back as it was."""
        with torch.inference_mode():
            for place in self.places:
                place.restore()

    def lost(self) -> list[str]:
        """Name what has changed since and cannot be put back, with the pack or node that keeps it."""
        return [place.name for place in self.places if isinstance(place, Advancing) and place.has_advanced()]

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Put everything back when the context ends, whatever happens in it."""
        try:
            yield
        finally:
            self.restore()


class Walk:
    """Walk from a model's call through everything that may keep state. ``places``: what was found."""

    def __init__(self, largest: int | None):
        self.places: list[Place] = []
        self.keepers: set[str] = set()
        self._largest = largest
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._alive: list[object] = []
        self._todo: list[tuple[object, Code | None]] = []
        self._met: list[dict] = []
        self._keeper: Code | None = None

    def model(self, model: BaseModel, options: dict) -> None:
        """Walk from a model and its ``transformer_options``, whose own tensors are inputs."""
        patcher = model.current_patcher
        self._follow(GLOBAL_RANDOM_NUMBERS)
        self._follow(value for value in options.values() if not isinstance(value, torch.Tensor))
        self._follow(patcher.model_options.values() if patcher is not None else ())
        self._add(Names(vars(model), _of_core()))
        self.module(model)
        self._finish()
        self.keepers = {keeper_of(names["__name__"]) for names in self._met}
        while self._met:
            names = self._met.pop()
            self._keeper = Code(names["__name__"])
            self._add(Names(names, OF_PYTHON))
            self._finish()

    def _finish(self) -> None:
        while self._todo:
            value, self._keeper = self._todo.pop()
            _step_of(type(value))(self, value)  # type: ignore[arg-type]

    def _is_of_pack_here(self, module: str) -> bool:
        """Tell whether a module is of a pack with code on the model; others are met in registries of nodes or routes,
        which packs import."""
        return is_of_pack(module) and (not self.keepers or keeper_of(module) in self.keepers)

    def _follow(self, values: Iterable[object]) -> None:
        """Look at values later, each once, as kept by what is looked at now."""
        seen = self._seen
        for value in values:
            if type(value) not in PLAIN and id(value) not in seen:
                seen.add(id(value))
                self._alive.append(value)
                self._todo.append((value, self._keeper))

    def _add(self, place: Place) -> None:
        self.places.append(place)
        values = place.values()
        if len(values) <= MOST:
            self._follow(values)

    def module(self, module: torch.nn.Module) -> None:
        """Look at a module and those in it: their own attributes, unless they are single layers or containers."""
        seen, todo = self._seen, [module]
        while todo:
            one = todo.pop()
            if not _is_single(type(one)):  # type: ignore[arg-type]
                self._attributes(one)
            elif "forward" in one.__dict__:
                self._follow([one.__dict__["forward"]])
            for child in one._modules.values():
                if child is None or id(child) in seen:
                    continue
                if child._modules or "forward" in child.__dict__ or not _is_single(type(child)):  # type: ignore[arg-type]
                    seen.add(id(child))
                    todo.append(child)

    def _attributes(self, module: torch.nn.Module) -> None:
        cls, around = type(module), self._keeper
        if is_of_pack(cls.__module__):
            self._keeper = Code(cls.__module__, cls.__qualname__)
        if cls not in self._classes:
            self._class(cls)
        self._add(Names(module.__dict__, _of_core()))
        if module._buffers and is_of_pack(cls.__module__):
            self._add(Names(module._buffers))
        self._keeper = around

    def mapping(self, mapping: dict) -> None:
        """Look at a dict, or one with weak keys or values."""
        self._add(Place(mapping))
        self._own(mapping)

    def sequence(self, values: Any) -> None:
        """Look at a list, deque or set."""
        self._add(Sequence(values))
        self._own(values)

    def fixed(self, values: tuple) -> None:
        """Look at what is in a tuple."""
        self._follow(values)
        self._own(values)

    def _own(self, container: object) -> None:
        """Look at the attributes of a container of an own class."""
        if not is_of_framework(type(container).__module__):
            self.instance(container)

    def tensor(self, tensor: Any) -> None:
        """Copy a tensor or array that is small enough."""
        if _may_be_written(tensor) and (self._largest is None or tensor.nbytes <= self._largest):
            self.places.append(Tensors(tensor))

    def random(self, generator: Any) -> None:
        """Look at a generator of random numbers."""
        self.places.append(RandomNumbers(generator))

    def advancing(self, iterator: Iterator) -> None:
        """Look at a generator or another iterator of Python's own."""
        self.places.append(Advancing(iterator, self._keeper))

    def function(self, function: types.FunctionType) -> None:
        """Look at a function's closure, defaults and attributes, and at its module's data where that is of a pack."""
        name = function.__module__ or ""
        self._kept_by(name, function.__qualname__)
        if name.startswith(OURS) or name.partition(".")[0] == "torch":
            return
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._add(Attributes(cell, CELL))
        self._follow([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        if function.__dict__ or is_of_pack(name):
            self._add(Place(function.__dict__))
        self._globals(function.__globals__)

    def _kept_by(self, module: str, name: str) -> None:
        """Take what is found from here on as kept by this function or class, where it is a pack's."""
        if is_of_pack(module):
            self._keeper = Code(module, name)

    def _globals(self, names: dict) -> None:
        module = names.get("__name__", "")
        if id(names) not in self._seen and self._is_of_pack_here(module):
            self._seen.add(id(names))
            self._met.append(names)

    def method(self, method: types.MethodType) -> None:
        """Look at a method's function and its owner."""
        self._follow([method.__func__, method.__self__])

    def partial(self, partial: functools.partial) -> None:
        """Look at a partial function and its arguments."""
        self._follow([partial.func, *partial.args, *partial.keywords.values()])

    def instance(self, instance: object) -> None:
        """Look at an instance's attributes and its class."""
        self._kept_by(type(instance).__module__, type(instance).__qualname__)
        self._class(type(instance))
        if type(instance).__dictoffset__:
            self._add(Names(instance.__dict__))
        if slots := _slots_of(type(instance)):  # type: ignore[arg-type]
            self._add(Attributes(instance, slots))

    def class_(self, cls: type) -> None:
        """Look at a class that is kept as a value."""
        self._class(cls)

    def _class(self, cls: type) -> None:
        """Look at the data that a pack's class has of its own, and at its module's."""
        if cls in self._classes:
            return
        self._classes.add(cls)
        if self._is_of_pack_here(cls.__module__):
            self._add(ClassData(cls))
            self.module_data(sys.modules.get(cls.__module__))
        for base in cls.__bases__:
            self._class(base)

    def module_data(self, module: types.ModuleType | None) -> None:
        """Look at the data of a Python module."""
        self._globals(vars(module) if module else {})

    def nothing(self, value: object) -> None:
        """Leave what keeps no state of a call, or none that can be reached."""


@functools.lru_cache(maxsize=256)
def _step_of(cls: Any) -> Callable[[Walk, Any], None]:
    """Return how a walk looks at instances of a class."""
    table: list[tuple[Any, Callable]] = [
        (torch.nn.Module, Walk.module),
        (threading.Thread, Walk.nothing),
        ((dict, weakref.WeakKeyDictionary, weakref.WeakValueDictionary), Walk.mapping),
        ((list, deque, set, weakref.WeakSet), Walk.sequence),
        (tuple, Walk.fixed),
        ((torch.Tensor, numpy.ndarray), Walk.tensor),
        (types.FunctionType, Walk.function),
        (types.MethodType, Walk.method),
        (functools.partial, Walk.partial),
        (types.GeneratorType, Walk.advancing),
        (random.SystemRandom, Walk.nothing),
        (RANDOM, Walk.random),
        (type, Walk.class_),
        (types.ModuleType, Walk.module_data),
        ((types.SimpleNamespace, threading.local), Walk.instance),
    ]
    if cls.__module__.startswith(OURS):
        return Walk.nothing
    if issubclass(cls, Iterator) and cls.__module__ in ("builtins", "itertools"):
        return Walk.advancing
    found = next((step for kinds, step in table if issubclass(cls, kinds)), None)
    return found or (Walk.nothing if is_of_framework(cls.__module__) else Walk.instance)


@functools.lru_cache(maxsize=256)
def _is_single(cls: Any) -> bool:
    """Tell whether a module of this class keeps nothing of its own: a layer or a container of torch's or ComfyUI's."""
    return is_of_framework(cls.__module__)


@functools.cache
def _of_core() -> frozenset[str]:
    """Name the attributes of modules that torch and ComfyUI's management of models set."""
    return OF_TORCH | core_writes()


@functools.lru_cache(maxsize=256)
def _slots_of(cls: Any) -> dict[str, types.MemberDescriptorType]:
    own = (item for one in reversed(cls.__mro__) if "__slots__" in vars(one) for item in vars(one).items())
    return {name: slot for name, slot in own if isinstance(slot, types.MemberDescriptorType)}


def _may_be_written(tensor: Any) -> bool:
    """Tell whether a tensor's or array's numbers can be written: of one that was expanded several are in one place."""
    if isinstance(tensor, numpy.ndarray):
        return tensor.flags.writeable
    plain = type(tensor) in nested.PLAIN and tensor.layout == torch.strided and tensor.device.type != "meta"
    return plain and not torch._debug_has_internal_overlap(tensor)
