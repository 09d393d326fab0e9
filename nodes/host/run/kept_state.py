"""Put back what nodes and models keep of one call for the next, so that a repeat finds what the call found.

Found from structure, in whatever hangs on a model's call: its ``transformer_options``, the model options of its
patcher, the attributes of its modules; from there containers, closures, instances and, of packs, the data in their
modules. Left alone: weights, what torch, Python's own library and ComfyUI's management of models keep, and the
attributes of single layers.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import sysconfig
import threading
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import comfy.model_management
import numpy
import torch

from ..core import core_writes
from .kept_places import (
    CELL,
    OURS,
    Attributes,
    ClassData,
    Generated,
    Names,
    Place,
    RandomNumbers,
    Sequence,
    Tensors,
)

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

COMFYUI = Path(comfy.model_management.__file__).parents[1]
PACKS = COMFYUI / "custom_nodes"
LIBRARIES = tuple({Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
FRAMEWORK = frozenset({"torch", "numpy", "comfy", *sys.stdlib_module_names})
OF_TORCH = frozenset(vars(torch.nn.Module())) - {"forward"}
OF_PYTHON = frozenset({"__path__", *(name for name in vars(types) if name.startswith("__"))})
PLAIN = frozenset(
    {
        *(bool, int, float, complex, str, bytes, type(None), type(...), slice, range, types.BuiltinFunctionType),
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.nn.Parameter),
    }
)
MOST = 4096
"""Larger containers, such as vocabularies, are put back, but what is in them is not looked at."""
NARROW = (torch.float16, torch.bfloat16)


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
        """Name what has changed since and cannot be put back."""
        return [place.name for place in self.places if isinstance(place, Generated) and place.has_advanced()]

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Put everything back when the context ends, whatever happens in it."""
        try:
            yield
        finally:
            self.restore()


class LeftBehind:
    """The dtypes of what a call has left, without the tensors: by shape, of those that ``before`` did not have."""

    def __init__(self, before: KeptState, model: BaseModel, options: dict):
        self._known = {id(tensor) for place in before.places for tensor in _floats(place.values())}
        self._before, self._model, self._options = before, model, options
        self._dtypes = Counter((tensor.shape, tensor.dtype) for _, tensor in self._new())

    def _new(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for place in KeptState(self._model, self._options, 0).places:
            yield from ((place, tensor) for tensor in _floats(place.values()) if id(tensor) not in self._known)

    def give_dtypes(self) -> None:
        """Cast what a repeat in fp32 has left to the 16 bits in which the call itself left tensors of that shape.

        What is too large for those stays.
        """
        for place in {id(place): place for place, _ in self._new()}.values():
            held = place.kept.items() if isinstance(place.kept, dict) else enumerate(place.kept)
            cast = {key: self._as_left(value) for key, value in held}
            place.replace(cast if isinstance(place.kept, dict) else list(cast.values()))

    def _as_left(self, value: object) -> object:
        if type(value) is tuple:
            return tuple(map(self._as_left, value))
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or id(value) in self._known:
            return value
        left = [dtype for dtype in (torch.float32, *NARROW) if self._dtypes[value.shape, dtype]]
        fits = len(left) == 1 and value.numel() and bool(value.abs().amax() <= torch.finfo(left[0]).max)
        return value.to(left[0]) if fits else value


def _floats(values: Iterable) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) is tuple:
            yield from _floats(value)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value


class Walk:
    """Walk from a model's call through everything that may keep state. ``places``: what was found."""

    def __init__(self, largest: int | None):
        self.places: list[Place] = []
        self.keepers: set[str] = set()
        self._largest = largest
        self._seen: set[int] = set()
        self._classes: set[type] = set()
        self._alive: list[object] = []
        self._todo: list[object] = []
        self._met: list[dict] = []

    def model(self, model: BaseModel, options: dict) -> None:
        """Walk from a model and its ``transformer_options``, whose own tensors are inputs."""
        patcher = model.current_patcher
        self._follow(value for value in options.values() if not isinstance(value, torch.Tensor))
        self._follow(patcher.model_options.values() if patcher is not None else ())
        self._add(Names(vars(model), _of_core()))
        self.module(model)
        self._finish()
        self.keepers = {keeper_of(names["__name__"]) for names in self._met}
        while self._met:
            self._add(Names(self._met.pop(), OF_PYTHON))
            self._finish()

    def _finish(self) -> None:
        while self._todo:
            value = self._todo.pop()
            _step_of(type(value))(self, value)  # type: ignore[arg-type]

    def _is_of_pack_here(self, module: str) -> bool:
        """Tell whether a module is of a pack with code on the model; others are met in registries of nodes or routes,
        which packs import."""
        return _is_of_pack(module) and (not self.keepers or keeper_of(module) in self.keepers)

    def _follow(self, values: Iterable[object]) -> None:
        """Look at values later, each once."""
        seen = self._seen
        for value in values:
            if type(value) not in PLAIN and id(value) not in seen:
                seen.add(id(value))
                self._alive.append(value)
                self._todo.append(value)

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
            if not _is_single(type(one)):
                self._attributes(one)
            elif "forward" in one.__dict__:
                self._follow([one.__dict__["forward"]])
            for child in one._modules.values():
                if child is None or id(child) in seen:
                    continue
                if child._modules or "forward" in child.__dict__ or not _is_single(type(child)):
                    seen.add(id(child))
                    todo.append(child)

    def _attributes(self, module: torch.nn.Module) -> None:
        cls = type(module)
        self._class(cls)
        self._add(Names(module.__dict__, _of_core()))
        if module._buffers and _is_of_pack(cls.__module__):
            self._add(Names(module._buffers))

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
        if not _is_of_framework(type(container).__module__):
            self.instance(container)

    def tensor(self, tensor: Any) -> None:
        """Copy a tensor or array that is small enough."""
        if _may_be_written(tensor) and (self._largest is None or tensor.nbytes <= self._largest):
            self.places.append(Tensors(tensor))

    def random(self, generator: torch.Generator) -> None:
        """Look at a generator of random numbers."""
        self.places.append(RandomNumbers(generator))

    def generated(self, generator: types.GeneratorType) -> None:
        """Look at a suspended generator."""
        self.places.append(Generated(generator))

    def function(self, function: types.FunctionType) -> None:
        """Look at a function's closure, defaults and attributes, and at its module's data where that is of a pack."""
        name = function.__module__ or ""
        if name.startswith(OURS) or name.partition(".")[0] == "torch":
            return
        for cell in function.__closure__ or ():
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._add(Attributes(cell, CELL))
        self._follow([*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()])
        if function.__dict__ or _is_of_pack(name):
            self._add(Place(function.__dict__))
        self._globals(function.__globals__)

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
        (types.GeneratorType, Walk.generated),
        (torch.Generator, Walk.random),
        (type, Walk.class_),
        (types.ModuleType, Walk.module_data),
        ((types.SimpleNamespace, threading.local), Walk.instance),
    ]
    if cls.__module__.startswith(OURS):
        return Walk.nothing
    found = next((step for kinds, step in table if issubclass(cls, kinds)), None)
    return found or (Walk.nothing if _is_of_framework(cls.__module__) else Walk.instance)


def _is_single(cls: type) -> bool:
    """Tell whether a module of this class keeps nothing of its own: a layer or a container of torch's or ComfyUI's."""
    return _is_of_framework(cls.__module__)


@functools.cache
def _is_of_framework(module: str) -> bool:
    """Tell whether a module is Python's, torch's, numpy's, ours, or ComfyUI's other than its models' code and its
    extra nodes."""
    root = module.partition(".")[0]
    if module.startswith(("comfy.ldm.", "comfy_extras.")):
        return False
    if root in FRAMEWORK or module.startswith(OURS):
        return True
    file = _file_of(module)
    return file is not None and file.is_relative_to(COMFYUI) and not _is_outside_of_core(file)


@functools.cache
def _is_of_pack(module: str) -> bool:
    """Tell whether a module's own data may be state of a call: that of packs and of ComfyUI's extra nodes."""
    file = _file_of(module)
    in_library = file is not None and any(file.is_relative_to(folder) for folder in LIBRARIES)
    return not (in_library or module.startswith("comfy.ldm.") or _is_of_framework(module))


def _is_outside_of_core(file: Path) -> bool:
    return file.is_relative_to(PACKS) or any(file.is_relative_to(folder) for folder in LIBRARIES)


def _file_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file) if file else None


@functools.cache
def keeper_of(module: str) -> str:
    """Name the pack of a module: its folder in ``custom_nodes``, else the first part of the module's name."""
    parts = Path(_file_of(module) or "").parts
    packs = [index for index, part in enumerate(parts) if part == PACKS.name]
    return parts[packs[-1] + 1] if packs and len(parts) > packs[-1] + 1 else module.rpartition("/")[2].partition(".")[0]


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
    plain = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.device.type != "meta"
    return plain and not torch._debug_has_internal_overlap(tensor)
