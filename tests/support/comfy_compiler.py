"""ComfyUI's model compiler (``comfy/model_prefetch.py`` from 0.34 on) on a CPU: a recorder that raises where aimdo's would break.

What it asks of a model's call, by that source and ``comfy_aimdo/malloc_graph.py`` 0.6.0: between ``malloc_graph_begin`` and
``malloc_graph_end`` of a thread no other graph is begun; what is allocated in a block is freed in it (else a "rogue"); each
block allocates what the one of its name before it did (else a "graph break"). aimdo itself goes on after the last two. The
first call is not compared with later ones: MiniMax H3 has one timestep in it, of picture and sound, and two in the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import comfy.cli_args
import comfy.model_prefetch
import pytest
import torch
from halfsafe.precision.base.nested import tensors_in
from support.leaf_operations import LeafOperations
from torch.multiprocessing.reductions import StorageWeakRef

BLOCK = "block"
QUEUE = ["a queue"]


class GraphError(BaseException):
    """What the recorder raises; no ``Exception``, which a guard or a check may catch."""


@dataclass
class Scope:
    """What was allocated in a block or outside of all of them: bytes of each, and those that may live yet."""

    name: str
    sizes: list[int] = field(default_factory=list)
    alive: list[StorageWeakRef] = field(default_factory=list)


class Recorder(LeafOperations):
    """Sees each allocation of this thread while a graph is open. ``calls``: graphs ended; ``aborted``: those cleaned up while open."""

    def __init__(self):
        super().__init__()
        self.scopes: list[Scope] = []
        self.patterns: dict[str, list[int]] = {}
        self.calls = self.aborted = 0
        self.paused = False

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        if self.scopes and not self.paused:
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in([args, kwargs])}
            for tensor in tensors_in([result]):
                storage = tensor.untyped_storage()
                if storage._cdata not in given:
                    self.scopes[-1].sizes.append(storage.nbytes())
                    self.scopes[-1].alive.append(StorageWeakRef(storage))
        return result

    def begin(self) -> None:
        if comfy.cli_args.args.disable_comfy_compiler:
            return
        if self.scopes:
            raise GraphError("a graph is begun in one that is open")
        self.scopes.append(Scope("call"))

    def iterate(self, name: str | None) -> None:
        if self.scopes and self.scopes[-1].name == BLOCK:
            self._pop()
        if self.scopes and name:
            self.scopes.append(Scope(name))

    def end(self) -> None:
        if self.scopes:
            self._pop()
            self.calls += 1
            self.patterns = {} if self.calls == 1 else self.patterns

    def cleanup(self) -> None:
        self.aborted += bool(self.scopes)
        self.scopes, self.patterns = [], {}

    def _pop(self) -> None:
        scope = self.scopes.pop()
        rogues = [size for size, one in zip(scope.sizes, scope.alive, strict=True) if not one.expired()]
        if rogues:
            raise GraphError(f"rogues of a {scope.name}: {rogues} bytes")
        if self.patterns.setdefault(scope.name, scope.sizes) != scope.sizes:
            raise GraphError(f"a {scope.name} allocates {scope.sizes}, one before it {self.patterns[scope.name]}")

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        self.paused = True
        try:
            yield
        finally:
            self.paused = False


@contextlib.contextmanager
def comfy_compiler(whole_call: type | None = None) -> Iterator[Recorder]:
    """Record the calls of this thread.

    ``whole_call``: a class of models whose graph is open during all of ``forward``, as of MiniMax H3; others open theirs in
    ``make_prefetch_queue`` and end it after their last block, as Qwen-Image 2.1. None has a ``finally`` for it.
    """
    recorder = Recorder()

    def pop(queue, device, module, dtype=None, **options) -> None:
        recorder.iterate(module and BLOCK)
        if module is None and not whole_call:
            recorder.end()

    def queue(*args):
        if not whole_call:
            recorder.begin()
        return QUEUE

    with pytest.MonkeyPatch.context() as patch, recorder:
        patch.setattr(comfy.cli_args.args, "disable_comfy_compiler", False, raising=False)
        patch.setattr(comfy.model_prefetch, "cleanup_malloc_graph", recorder.cleanup, raising=False)
        patch.setattr(comfy.model_prefetch, "prefetch_queue_pop", pop)
        patch.setattr(comfy.model_prefetch, "make_prefetch_queue", queue)
        patch.setattr(comfy.model_prefetch, "pause_malloc_graph", recorder.pause, raising=False)
        if whole_call:
            patch.setattr(whole_call, "forward", _recorded(recorder, whole_call.forward))
        yield recorder
        assert comfy.cli_args.args.disable_comfy_compiler is False, "left off"


def _recorded(recorder: Recorder, forward):
    def run(self, x, *args, **kwargs):
        if comfy.cli_args.args.disable_comfy_compiler:
            return forward(self, x, *args, **kwargs)
        out = [torch.empty_like(part) for part in x]
        recorder.begin()
        made = forward(self, x, *args, **kwargs)
        for place, part in zip(out, made, strict=True):
            place.copy_(part)
        del made, part
        recorder.end()
        return out

    return run
