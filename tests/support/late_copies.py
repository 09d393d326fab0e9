"""Copies between the host and an emulated device that take effect as late as a real one may let them, and the order of its streams.

A copy that does not wait is made where its result is first used, or where the host waits for it: what is in the host's memory
by then is what the device gets. Where the host then finds its memory changed since the copy was asked for, that is an error, as
it is one to use on a stream what another one still writes.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

REUSED = "host memory {} was written before its copy to the device took effect"
FREED = "memory of stream {} was given back while stream {} may still use it, which was neither waited for nor recorded"
UNORDERED = "{} uses memory on stream {} that stream {} has not finished with"
POISON = 0x7B


@dataclass(eq=False)
class Stream:
    """A queue of a device. ``known``: how far it has waited for each queue."""

    device: torch.device
    number: int
    ticks: int = 0
    known: dict[Stream, int] = field(default_factory=dict)

    def __hash__(self) -> int:
        return self.number

    def wait(self, other: dict[Stream, int]) -> None:
        for stream, tick in other.items():
            self.known[stream] = max(self.known.get(stream, 0), tick)

    def now(self) -> dict[Stream, int]:
        return {**self.known, self: self.ticks}


class Memory:
    """A tensor whose memory lives as long as others hold it."""

    def __init__(self, tensor: torch.Tensor):
        self.key, self._storage = _key(tensor), StorageWeakRef(tensor.untyped_storage())
        self._dtype, self._layout = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def __call__(self) -> torch.Tensor | None:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return None if storage is None else torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)


@dataclass(eq=False)
class Copy:
    """One copy that was asked for. ``into``: gives where; None where a device's memory was given back. ``seen``: the source's bytes at that
    moment."""

    into: Memory | Callable[[], torch.Tensor]
    source: torch.Tensor
    seen: torch.Tensor
    stream: Stream
    tick: int
    from_host: bool
    is_made: bool = False

    def make(self) -> None:
        if not self.is_made:
            self.is_made = True
            into = self.into()
            if into is not None:
                into.copy_(self.source if self.from_host else self.seen)


@dataclass
class Uses:
    """Who used a memory last: the queue that wrote it, and how far each had come that read it. ``owner``: the queue it was given to, by
    which torch gives it away again; ``recorded``: those that it waits for before that."""

    memory: StorageWeakRef
    owner: Stream
    written: tuple[Stream, int] | None = None
    read: dict[Stream, int] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)
    others: dict[Stream, int] = field(default_factory=dict)


class LateCopies:
    """The copies of a device that are under way, and who uses its memory."""

    def __init__(self):
        self.under_way: list[Copy] = []
        self.of_pageable = 0
        self._uses: dict[int, Uses] = {}
        self._shared: dict[int, Uses] = {}
        self._numbers = itertools.count(1)
        self._first: dict[torch.device, Stream] = {}
        self._streams: list[Stream] = []
        self._host: dict[Stream, int] = {}
        self._thread = threading.local()
        self._lock = threading.RLock()

    def new_stream(self, device: torch.device) -> Stream:
        return self._new(device, next(self._numbers))

    def _new(self, device: torch.device, number: int) -> Stream:
        self._streams.append(Stream(device, number))
        return self._streams[-1]

    def current(self, device: torch.device) -> Stream:
        """The queue that this thread asks a device in."""
        chosen = getattr(self._thread, "streams", {}).get(device)
        if chosen is None and device not in self._first:
            self._first[device] = self._new(device, -(device.index or 0))
        return chosen or self._first[device]

    def use(self, stream: Stream) -> Stream:
        """Make a stream this thread's; returns the one before."""
        before = self.current(stream.device)
        self._thread.streams = {**getattr(self._thread, "streams", {}), stream.device: stream}
        return before

    def allocated(self, device: torch.device, memory: torch.Tensor) -> None:
        """The queue that asks for new memory owns it."""
        with self._lock:
            self._uses_of(memory, self.current(device))

    def record(self, memory: torch.Tensor, stream: Stream) -> None:
        with self._lock:
            self._uses_of(memory, stream).recorded.add(stream)

    def copy(self, device: torch.device, into: torch.Tensor, source: torch.Tensor, to_device: bool, from_device: bool) -> Copy | None:
        """Ask a device for a copy; between two tensors of devices it is made at once, as everything else of a queue."""
        with self._lock, torch._C._DisableTorchDispatch():
            stream = self.current(device)
            self._use("copy", stream, [source] if from_device else [], [into] if to_device else [])
            if to_device and from_device:
                into.copy_(source)
                return None
            target = Memory(into) if to_device else lambda: into
            self.under_way.append(Copy(target, source, source.clone(), stream, stream.ticks, to_device))
            if not to_device:
                into.view(-1).view(torch.uint8).fill_(POISON) if into.is_contiguous() else into.zero_()
            return self.under_way[-1]

    def used(self, device: torch.device, func, memories: list[torch.Tensor], args: tuple) -> None:
        """An operation is about to read or write memories of a device."""
        with self._lock, torch._C._DisableTorchDispatch():
            self._use(func.name(), self.current(device), memories, _written(func, args))

    def finish(self, until: dict[Stream, int] | None = None) -> None:
        """The host waits, for everything or for what a moment of the queues names; whatever it asks for after that comes after that."""
        with self._lock, torch._C._DisableTorchDispatch():
            until = {stream: stream.ticks for stream in self._streams} if until is None else until
            self._host |= {stream: max(tick, self._host.get(stream, 0)) for stream, tick in until.items()}
            done = [copy for copy in self.under_way if until.get(copy.stream, 0) >= copy.tick]
            self.under_way = [copy for copy in self.under_way if copy not in done]
            for copy in done:
                _end(copy)

    def finish_one(self, copy: Copy) -> None:
        """A copy that waits: it has taken effect when the host goes on."""
        with self._lock, torch._C._DisableTorchDispatch():
            if copy in self.under_way:
                self.under_way.remove(copy)
            _end(copy)

    def check_freed(self) -> None:
        """Raise for memory that was given back while a queue that does not own it may still use it."""
        for key, uses in [(key, uses) for key, uses in self._shared.items() if uses.memory.expired()]:
            del self._shared[key]
            for stream, tick in uses.others.items():
                if stream not in uses.recorded and self._behind(uses.owner, stream, tick):
                    raise RuntimeError(FREED.format(uses.owner.number, stream.number))

    def _behind(self, stream: Stream, other: Stream, tick: int) -> bool:
        """Whether neither a queue nor the host has waited for a moment of another."""
        return max(stream.known.get(other, 0), self._host.get(other, 0)) < tick

    def _uses_of(self, memory: torch.Tensor, stream: Stream) -> Uses:
        key = _key(memory)
        uses = self._uses.get(key)
        if uses is None or uses.memory.expired():
            self.check_freed()
            uses = self._uses[key] = Uses(StorageWeakRef(memory.untyped_storage()), stream)
        return uses

    def _use(self, name: str, stream: Stream, read: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        self.check_freed()
        stream.ticks += 1
        touched = {_key(memory) for memory in (*read, *written)}
        for copy in self.under_way:
            if copy.from_host and copy.into.key in touched:
                copy.make()
        for memory in read:
            self._order(name, stream, memory, writes=False)
        for memory in written:
            self._order(name, stream, memory, writes=True)

    def _order(self, name: str, stream: Stream, memory: torch.Tensor, writes: bool) -> None:
        uses = self._uses_of(memory, stream)
        if uses.owner is not stream and uses.owner.device == stream.device:
            uses.others[stream], self._shared[_key(memory)] = stream.ticks, uses
        earlier = [uses.written] if uses.written else []
        if writes:
            earlier += list(uses.read.items())
        for other, tick in earlier:
            if other is not stream and other.device == stream.device and self._behind(stream, other, tick):
                raise RuntimeError(UNORDERED.format(name, stream.number, other.number))
        if writes:
            uses.written, uses.read = (stream, stream.ticks), {}
        else:
            uses.read[stream] = stream.ticks


def _end(copy: Copy) -> None:
    copy.make()
    if copy.from_host and not _same_bytes(copy.source, copy.seen):
        raise RuntimeError(REUSED.format(tuple(copy.source.shape)))


def _same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def _key(memory: torch.Tensor) -> int:
    return memory.untyped_storage()._cdata


def _written(func, args: tuple) -> list[torch.Tensor]:
    arguments = zip(func._schema.arguments, args, strict=False)
    return [
        value.raw for argument, value in arguments
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor) and "raw" in value.__dict__
    ]  # fmt: skip
