"""torch's process-wide precision flags as a scope: set for one model's calls, and back to what they were.

Restoring is exact, whatever the flags were set with. Three things make that less simple than it sounds (torch 2.11):
a plain bool for a reduced-precision reduction leaves its split-k half on; writing ``allow_tf32`` also moves
``fp32_precision`` from "none" to "ieee"; and once the new TF32 names were written the old ones may refuse to be read
(PyTorch #164766, #166387).
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

UNREADABLE = (AttributeError, RuntimeError)
Result = TypeVar("Result")


@dataclass(frozen=True)
class FlagSetting:
    """One setting: ``read`` gives its exact state, ``write`` takes that or a bool, ``is_on`` reads a state as a bool."""

    name: str
    read: Callable[[], object]
    write: Callable[[object], None]
    is_on: Callable[[object], bool]


def _matmul():
    return torch.backends.cuda.matmul


def _plain(name: str) -> FlagSetting:
    return FlagSetting(name, lambda: getattr(_matmul(), f"allow_{name}"), lambda v: setattr(_matmul(), f"allow_{name}", v), bool)


def _read_pair(name: str) -> tuple[bool, bool] | bool:
    allowed = getattr(_matmul(), f"allow_{name}")
    split_k = getattr(_matmul(), f"allow_{name}_split_k", None) if _has_split_k() else None
    return allowed if split_k is None else (allowed, split_k)


def _write_pair(name: str, value: tuple[bool, bool] | bool) -> None:
    if isinstance(value, bool) and _has_split_k():
        value = (value, value)
    setattr(_matmul(), f"allow_{name}", value)


def _has_split_k() -> bool:
    try:
        return isinstance(_matmul().allow_fp16_reduced_precision_reduction_split_k, bool)
    except UNREADABLE:
        return False


def _pair(name: str) -> FlagSetting:
    return FlagSetting(
        name, lambda: _read_pair(name), lambda v: _write_pair(name, v), lambda v: v[0] if isinstance(v, tuple) else v
    )


@dataclass(frozen=True)
class _Tf32State:
    """``old``: the legacy bool, None where it refuses to be read; ``new``: fp32_precision, None where torch has none."""

    old: bool | None
    new: str | None


def _tf32(name: str, old_owner: Callable[[], object], new_owner: Callable[[], object]) -> FlagSetting:
    def read() -> _Tf32State:
        state = _Tf32State(_get(old_owner, "allow_tf32"), _get(new_owner, "fp32_precision"))
        if state == _Tf32State(None, None):
            raise AttributeError(f"torch {torch.__version__} has no TF32 flag")
        return state

    def write(value) -> None:
        if isinstance(value, bool):
            value = _Tf32State(value, None) if read().old is not None else _Tf32State(None, "tf32" if value else "ieee")
        if value.old is not None:
            old_owner().allow_tf32 = value.old
        if value.new is not None and _get(new_owner, "fp32_precision") != value.new:
            new_owner().fp32_precision = value.new

    return FlagSetting(name, read, write, lambda state: state.old if state.old is not None else state.new == "tf32")


def _get(owner: Callable[[], object], name: str):
    try:
        return getattr(owner(), name)
    except UNREADABLE:
        return None


SETTINGS = {
    setting.name: setting
    for setting in (
        _plain("fp16_accumulation"),
        _pair("fp16_reduced_precision_reduction"),
        _pair("bf16_reduced_precision_reduction"),
        _tf32("tf32_matmul", _matmul, _matmul),
        _tf32("tf32_convolution", lambda: torch.backends.cudnn, lambda: torch.backends.cudnn.conv),
    )
}


def state_of(name: str) -> object | None:
    """The exact state of a setting, to compare or to write back; None where this torch does not have it."""
    try:
        return SETTINGS[name].read()
    except UNREADABLE:
        return None


def is_on(name: str) -> bool | None:
    """Whether a setting is on; None where this torch does not have it."""
    state = state_of(name)
    return None if state is None else SETTINGS[name].is_on(state)


class _Scopes:
    """Every scope that is open, in order of opening; the flags are those of the newest.

    Threads may open scopes side by side (several GPUs run one model): the flags go back when the last one closes, and
    where the newest scopes of two threads differ a flag is off, which is always the more precise.
    """

    def __init__(self):
        self._lock = threading.RLock()
        self._open: list[tuple[object, int, Mapping[str, bool]]] = []
        self._before: dict[str, object] = {}

    def enter(self, key: object, wanted: Mapping[str, bool]) -> None:
        with self._lock:
            for name in wanted:
                if name not in self._before and (state := state_of(name)) is not None:
                    self._before[name] = state
            self._open.append((key, threading.get_ident(), wanted))
            self._apply()

    def leave(self, key: object) -> None:
        with self._lock:
            self._open = [entry for entry in self._open if entry[0] is not key]
            self._apply()
            if not self._open:
                self._before.clear()

    def _apply(self) -> None:
        for name, before in self._before.items():
            newest = {thread: scope[name] for _, thread, scope in self._open if name in scope}
            wanted = all(newest.values()) if newest else before
            if state_of(name) != wanted:
                SETTINGS[name].write(wanted)

    def switched(self, name: str, value: bool, call: Callable[[], Result]) -> Result:
        with self._lock:
            if name not in self._before or any(thread != threading.get_ident() for _, thread, _ in self._open):
                return call()
            try:
                SETTINGS[name].write(value)
                return call()
            finally:
                self._apply()

    def outside(self, name: str) -> object | None:
        with self._lock:
            return self._before.get(name, state_of(name))


_scopes = _Scopes()


@contextmanager
def flags_set(wanted: Mapping[str, bool]) -> Iterator[None]:
    """Hold the flags of ``SETTINGS`` named in ``wanted`` at these values; those this torch does not have are left alone."""
    key = object()
    try:
        _scopes.enter(key, wanted)
        yield
    finally:
        _scopes.leave(key)


def switched(name: str, value: bool, call: Callable[[], Result]) -> Result:
    """``call()`` with one flag of this thread's open scope at ``value``; at the scope's value while other threads have one.

    No other thread can open a scope until ``call`` is back.
    """
    return _scopes.switched(name, value, call)


def outside(name: str) -> bool | None:
    """What a setting is outside every open scope; None where this torch does not have it."""
    state = _scopes.outside(name)
    return None if state is None else SETTINGS[name].is_on(state)
