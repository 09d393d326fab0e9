"""A device with values on a machine without one: tensors of device ``cuda``, ``mps``, ``xpu`` or ``privateuseone`` that hold CPU data.

Sees: values and devices at once. A tensor of it is an exact ``torch.Tensor``, as the pack and ComfyUI ask for by type; its
memory is its own and counted; two devices in one operation raise as on a real one; each operation goes by the device's rule book before it
is computed on the CPU; custom operators of comfy-kitchen are run by their Python on the device's tensors.
Does not see: gradients (torch's engine wants a real device), compiled graphs, streams and late copies, how a real kernel rounds, and time.

One thread needs one ``Mode``; ``SecondDevice`` gives it to each thread that begins inside of ``with``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest import mock

import torch
from support.held_tensors import (
    PARAMETER,
    Functions,
    as_subclass,
    hold,
    is_held,
    is_plain,
    made_on_the_host,
    modules_swapped,
    of_raw,
    parameter,
    raw_of,
    tolist,
)
from support.rule_book import RuleBook
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

aten = torch.ops.aten
CPU = torch.device("cpu")
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd
WHOLE = {aten.scaled_dot_product_attention.default, aten.quantile.default, aten.quantile.scalar}
"""Computed in one: in parts, torch asks which of its kernels the device has, or turns a tensor in place."""
ANY_DEVICES = {
    aten.copy_.default, aten._to_copy.default, aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default,
    aten.index_put.default, aten._has_compatible_shallow_copy_type.default,
}  # fmt: skip
MIXED = "Expected all tensors to be on the same device, but found at least two devices, {} and {}! (when checking {})"


INSIDE = "cuda"
"""What torch's C++ knows every kind as: it has a device guard for CUDA that does nothing."""


_present: list[SecondDevice] = []


def is_present() -> bool:
    """Whether there is one now."""
    return bool(_present)


class SecondDevice:
    """Devices of one kind while inside of ``with``, for every thread that begins there and for this one.

    Args:
        kind: torch's name of it.
        book: what it refuses and what it answers otherwise than a CPU.
        memory: bytes that each device has; nothing is refused for lack of it, ComfyUI decides by what is free.
    """

    def __init__(self, kind: str, book: RuleBook, memory: int = 8 << 30):
        self.kind = kind
        self.book = book
        self.memory = memory
        self.operations: dict[str, int] = {}
        self._held: dict[int, tuple[StorageWeakRef, torch.device, int]] = {}

    def __enter__(self) -> SecondDevice:
        run = threading.Thread.run

        def run_with_device(thread):
            with Mode(self), Functions(self.inside):
                run(thread)

        _present.append(self)
        self._undo = ExitStack()
        self._undo.callback(_present.remove, self)
        self._undo.enter_context(modules_swapped())
        self._undo.enter_context(mock.patch.object(PARAMETER, "__new__", parameter))
        self._undo.enter_context(mock.patch.object(threading.Thread, "run", run_with_device))
        self._undo.enter_context(mock.patch.object(torch.Tensor, "tolist", tolist(torch.Tensor.tolist)))
        self._undo.enter_context(mock.patch.object(torch.Tensor, "as_subclass", as_subclass(torch.Tensor.as_subclass)))
        self._undo.enter_context(mock.patch.object(torch.Tensor, "set_", self._set(torch.Tensor.set_)))
        self._undo.enter_context(
            mock.patch.object(
                torch.Tensor, "_make_wrapper_subclass", self._wrapper(torch.Tensor._make_wrapper_subclass)
            )
        )
        for name in ("untyped_storage", "data_ptr"):
            self._undo.enter_context(mock.patch.object(torch.Tensor, name, of_raw(getattr(torch.Tensor, name))))
        self._undo.enter_context(
            mock.patch.object(
                _python_dispatch,
                "_disable_current_modes",
                self._other_modes_off(_python_dispatch._disable_current_modes),
            )
        )
        for name in ("tensor", "as_tensor"):
            self._undo.enter_context(mock.patch.object(torch, name, made_on_the_host(getattr(torch, name))))
        for name, answer in self._answers().items():
            answer.__name__ = name
            self._undo.enter_context(mock.patch.object(torch.Tensor, name, property(answer)))
        self._undo.enter_context(Mode(self))
        self._undo.enter_context(Functions(self.inside))
        return self

    def __exit__(self, *error) -> None:
        self._undo.close()

    def _wrapper(self, real: Callable) -> Callable:
        """For tensors made of tensors, as comfy-kitchen's are."""
        return lambda *args, device=None, **options: real(*args, device=self._inside(device), **options)

    def _set(self, real: Callable) -> Callable:
        """A new tensor of another's memory; the one it is asked of, which has none of its own, is left as it is."""
        return lambda tensor, *source: (
            self.hold(source[0].raw, source[0].device) if is_held(source[0]) else real(tensor, *source)
        )

    def _other_modes_off(self, real: Callable) -> Callable:
        """A device stays where torch's modes are turned off."""

        @contextlib.contextmanager
        def off() -> Iterator[None]:
            with real(), Mode(self):
                yield

        return off

    def _answers(self) -> dict[str, Callable]:
        """What a tensor says of where it is."""
        where = torch._C.TensorBase.device.__get__
        kinds = {
            f"is_{kind}": lambda tensor, kind=kind: self.outside(where(tensor)).type == kind
            for kind in ("cuda", "mps", "xpu", "cpu")
        }
        return {"device": lambda tensor: self.outside(where(tensor)), **kinds}

    def device(self, index: int = 0) -> torch.device:
        return torch.device(self.kind, index)

    def inside(self, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Arguments with devices as torch's C++ knows them."""
        if self.kind == INSIDE:
            return args, kwargs
        return tuple(map(self._inside, args)), {name: self._inside(value) for name, value in kwargs.items()}

    def _inside(self, value):
        if isinstance(value, torch.device) and value.type == self.kind:
            return torch.device(INSIDE, value.index or 0)
        return torch.device(INSIDE, 0) if isinstance(value, str) and value == self.kind else value

    def outside(self, device: torch.device) -> torch.device:
        """A device as Python knows it."""
        return torch.device(self.kind, device.index) if device.type == INSIDE else device

    def used(self, device: torch.device) -> int:
        """Bytes of the tensors alive on one of the devices."""
        self._held = {key: entry for key, entry in self._held.items() if not entry[0].expired()}
        return sum(size for _, where, size in self._held.values() if where.index == (device.index or 0))

    def hold(self, raw: torch.Tensor, device: torch.device) -> torch.Tensor:
        storage = raw.untyped_storage()
        device = torch.device(INSIDE, device.index or 0)
        self._held[storage._cdata] = (StorageWeakRef(storage), device, storage.nbytes())
        return hold(raw, device)

    def run(self, func, args, kwargs):
        """One operation with a tensor or a target of this device."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        ours = [tensor for tensor in tensors if is_held(tensor)]
        target = _target(kwargs, ours)
        self._refuse(func, args, kwargs, ours, target)
        _same_device(func, tensors, ours)
        self.operations[func.name()] = self.operations.get(func.name(), 0) + 1
        if func in (aten._to_copy.default, aten.copy_.default):
            return self._copied(func, args, kwargs, target)
        with torch._C._DisableTorchDispatch():
            computed = self.book.answers.get(func, func)(
                *tree_map(raw_of, args), **tree_map(raw_of, _on_the_cpu(kwargs))
            )
        known = {id(tensor.raw): tensor for tensor in ours}
        # torch gives the view of a tensor that was made outside of inference mode its base's version, which one made inside has not
        with torch.inference_mode(
            torch.is_inference_mode_enabled() and not (func.is_view and not ours[0].is_inference())
        ):
            return tree_map(lambda result: self._given(result, known, target), computed)

    def _refuse(self, func, args, kwargs, ours: list[torch.Tensor], target: torch.device) -> None:
        self.book.operation(func, args, kwargs)
        asked = [kwargs["dtype"]] if kwargs.get("dtype") is not None and target != CPU else []
        moved = [leaf for leaf in args if isinstance(leaf, torch.Tensor)] if target != CPU and not asked else ours
        for dtype in {*asked, *(tensor.dtype for tensor in moved)}:
            self.book.dtype(func, dtype)

    def _given(self, result, known: dict[int, torch.Tensor], target: torch.device):
        if not isinstance(result, torch.Tensor):
            return result
        if id(result) in known:
            _unchanged(known[id(result)])
            return known[id(result)]
        return self.hold(result, target) if target != CPU else result

    def _copied(self, func, args, kwargs, target: torch.device):
        into = args[0] if func is aten.copy_.default else None
        source = args[1] if into is not None else args[0]
        memory = raw_of(into) if into is not None else self._room(source, kwargs)
        with torch._C._DisableTorchDispatch():
            memory.copy_(raw_of(source))
        return into if into is not None else self.hold(memory, target) if target != CPU else memory

    def _room(self, source: torch.Tensor, kwargs: dict) -> torch.Tensor:
        """Memory for a copy, laid out as torch lays it out."""
        options = {name: kwargs.get(name) for name in ("dtype", "memory_format") if kwargs.get(name) is not None}
        with torch._C._DisableTorchDispatch():
            return torch.empty_like(raw_of(source), **options)


class Mode(TorchDispatchMode):
    """Hands the operations of this thread that concern the device to it."""

    def __init__(self, device: SecondDevice):
        super().__init__()
        self.of = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if not all(map(is_plain, types)):
            return NotImplemented
        args, kwargs = self.of.inside(args, kwargs)
        if kwargs.pop("pin_memory", None):
            return func(*args, **kwargs)
        if not any(_concerns(leaf) for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with self:
            result = _in_parts(func, args, kwargs)
        return self.of.run(func, args, kwargs) if result is NotImplemented else result


def _concerns(value: object) -> bool:
    return is_held(value) or (isinstance(value, torch.device) and value.type == INSIDE)


def _in_parts(func, args, kwargs):
    if func in WHOLE:
        return NotImplemented
    if func.namespace == "comfy_kitchen":
        return func._op_dk(EXPLICIT, *args, **kwargs)
    return func.decompose(*args, **kwargs) if func.has_kernel_for_dispatch_key(COMPOSITE) else NotImplemented


def _target(kwargs: dict, ours: list[torch.Tensor]) -> torch.device:
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else ours[0].device if ours else CPU
    return torch.device(INSIDE, device.index or 0) if device.type != "cpu" else CPU


def _on_the_cpu(kwargs: dict) -> dict:
    return {**kwargs, "device": CPU} if kwargs.get("device") is not None else kwargs


def _same_device(func, tensors: list[torch.Tensor], ours: list[torch.Tensor]) -> None:
    if func in ANY_DEVICES:
        return
    devices = sorted({str(tensor.device) for tensor in tensors if is_held(tensor) or tensor.dim() > 0})
    if len(devices) > 1:
        raise RuntimeError(MIXED.format(devices[0], devices[1], func.name()))


def _unchanged(tensor: torch.Tensor) -> None:
    if tensor.shape != tensor.raw.shape or tensor.stride() != tensor.raw.stride():
        raise NotImplementedError("an operation in place that changes a tensor's layout")
