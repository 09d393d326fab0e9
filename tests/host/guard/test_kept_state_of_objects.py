"""What packs keep that is no plain container: it is put back, or left as it is, and neither breaks it nor the call."""

import socket
import sys
import threading
from types import FunctionType, ModuleType, SimpleNamespace

import numpy
import pytest
import torch
from halfsafe.nodes.host.run.kept_state import KeptState
from support import families


@pytest.fixture(scope="module")
def model(comfy, wan):
    return families.load(comfy, wan, "fp16", "fp16").model


def put_back(model, kept, change) -> None:
    state = KeptState(model, {"kept": [kept]})
    with torch.inference_mode():
        change()
    state.restore()


class OwnDict(dict):
    """A dict with attributes, as caches that count their hits are."""


class OwnList(list):
    """A list with attributes."""


@pytest.mark.parametrize("cls", [OwnDict, OwnList])
def test_the_attributes_of_containers_are_put_back(model, cls):
    kept = cls()
    kept.hits = 0
    put_back(model, kept, lambda: setattr(kept, "hits", 5))
    assert kept.hits == 0


class Private:
    """Private slots, and a ``__setattr__`` that refuses."""

    __slots__ = ("__count",)

    def __init__(self):
        self.set(0)

    def __setattr__(self, name, value):
        raise AttributeError("frozen")

    def set(self, value):
        object.__setattr__(self, "_Private__count", value)

    def get(self):
        return self.__count


def test_private_and_frozen_slots_are_put_back(model):
    kept = Private()
    put_back(model, kept, lambda: kept.set(1))
    assert kept.get() == 0


class ClassProperty:
    """A descriptor that makes a new value each time it is read."""

    def __get__(self, owner, cls):
        return [cls.count]


class Described:
    count = 0
    counts = ClassProperty()


def test_a_class_keeps_its_descriptors_and_loses_what_it_was_given_since(model):
    own = vars(Described)["counts"]

    def change():
        Described.count, Described.made_later = 3, "state"

    put_back(model, Described(), change)
    assert vars(Described)["counts"] is own and Described.count == 0 and not hasattr(Described, "made_later")


class Unreadable:
    """An object without a dict that refuses what it does not have."""

    __slots__ = ("value",)

    def __getattr__(self, name):
        raise RuntimeError(name)


KINDS = {
    "sparse": lambda: torch.ones(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    "expanded": lambda: torch.zeros(3).expand(4, 3),
    "meta": lambda: torch.empty(3, device="meta"),
    "empty": lambda: torch.zeros(0),
    "array of objects": lambda: numpy.array([None, {}], dtype=object),
    "unreadable": Unreadable,
    "objects of the system": lambda: SimpleNamespace(
        lock=threading.Lock(), condition=threading.Condition(), sockets=socket.socketpair(), stream=sys.stderr
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_copied_does_not_stop_the_call(model, kind):
    put_back(model, KINDS[kind](), lambda: None)


def read_only(array):
    array.flags.writeable = False


MOVED = {
    "resized": (lambda: torch.zeros(3), lambda tensor: tensor.resize_(5)),
    "given other memory": (lambda: torch.zeros(3), lambda tensor: setattr(tensor, "data", torch.zeros(7))),
    "freed": (lambda: torch.zeros(3), lambda tensor: tensor.untyped_storage().resize_(0)),
    "made read-only": (lambda: numpy.zeros(3), read_only),
}


@pytest.mark.parametrize("kind", MOVED)
def test_numbers_are_written_only_into_the_memory_they_were_read_from(model, kind):
    make, change = MOVED[kind]
    kept = make()
    put_back(model, kept, lambda: change(kept))


class Worker(threading.Thread):
    """A thread of an own class."""


def test_a_thread_that_was_started_since_can_be_waited_for(model):
    worker = Worker(daemon=True)
    put_back(model, worker, worker.start)
    worker.join(timeout=5)
    assert not worker.is_alive()


def pack(name: str, monkeypatch) -> ModuleType:
    """A pack with a node's class and state of its module."""
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    module.state, module.Node = {}, type("Node", (), {"__module__": name, "kept": {}})
    module.patch = FunctionType((lambda: None).__code__, vars(module))
    return module


def test_packs_in_a_registry_that_another_imports_are_left_alone(model, monkeypatch):
    first, second = pack("first_pack", monkeypatch), pack("second_pack", monkeypatch)
    first.NODE_CLASS_MAPPINGS = {"First": first.Node, "Second": second.Node}
    state = KeptState(model, {"kept": first.patch})
    for one in (first, second):
        one.state["key"] = one.Node.kept["key"] = "set since"
    state.restore()
    assert state.keepers == ["first_pack"] and not first.state and not first.Node.kept
    assert second.state and second.Node.kept
