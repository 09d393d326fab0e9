"""torch's process-wide precision flags as a scope: set for one model's calls, and exactly back to what they were."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .message import Message

UNREADABLE = (AttributeError, RuntimeError)


@dataclass(frozen=True)
class _FlagSetting:
    """One setting: ``read`` gives its exact state, ``write`` takes that or a bool, ``is_on`` reads a state as a
    bool."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]
    is_on: Callable[[Any], bool]


def _matmul():
    return torch.backends.cuda.matmul


def _pair(name: str) -> _FlagSetting:
    """Make a setting of matmuls, whose reduced-precision reductions have a split-k half."""
    flag, split_k = f"allow_{name}", f"allow_{name}_split_k"

    def read() -> tuple[bool, bool] | bool:
        allowed, half = getattr(_matmul(), flag), _get(_matmul, split_k)
        return allowed if half is None else (allowed, half)

    def write(value: tuple[bool, bool] | bool) -> None:
        if isinstance(value, bool) and _get(_matmul, split_k) is not None:
            # Split-k reduces in fp32 while the flag is off. Without it cuBLAS refuses every half product that has no
            # cublasLt epilogue (ATen CUDABlas.cpp, DisallowReducedPrecisionDisallowSplitK).
            value = (value, True)
        setattr(_matmul(), flag, value)

    return _FlagSetting(name, read, write, lambda state: state[0] if isinstance(state, tuple) else state)


_Tf32 = tuple[bool | None, str | None, str | None]
"""A state of TF32: the legacy bool, None where it refuses to be read; ``fp32_precision``, None where torch has none;
what ``set_float32_matmul_precision`` was given, None where it refuses to be read or is another setting's."""


def _word_of_matmuls() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # where what it sets was set in parts
        return None


def _tf32(
    name: str, old_owner: Callable[[], Any], new_owner: Callable[[], Any], word: Callable[[], str | None] = lambda: None
) -> _FlagSetting:
    def read() -> _Tf32:
        # Once the new names were written, the old ones may refuse to be read (PyTorch #164766, #166387).
        old, new = _get(old_owner, "allow_tf32"), _get(new_owner, "fp32_precision")
        if old is None and new is None:
            raise AttributeError(Message("torch {0} has no TF32 flag", torch.__version__))
        return old, new, word()

    def write(value: _Tf32 | bool) -> None:
        if isinstance(value, bool):
            has_old = read()[0] is not None
            value = (value, None, None) if has_old else (None, "tf32" if value else "ieee", None)
        old, new, given = value
        if old is not None:
            old_owner().allow_tf32 = old
        # Writing it also takes the word "medium" apart, which torch then refuses to read.
        if given is not None and word() != given:
            torch.set_float32_matmul_precision(given)
        # Writing ``allow_tf32`` has moved ``fp32_precision`` from "none" to "ieee" (torch 2.11).
        if new is not None and _get(new_owner, "fp32_precision") != new:
            new_owner().fp32_precision = new

    return _FlagSetting(name, read, write, lambda state: state[1] == "tf32" if state[0] is None else state[0])


def _get(owner: Callable[[], object], name: str):
    try:
        return getattr(owner(), name)
    except UNREADABLE:
        return None


SETTINGS = {
    setting.name: setting
    for setting in (
        _pair("fp16_accumulation"),
        _pair("fp16_reduced_precision_reduction"),
        _pair("bf16_reduced_precision_reduction"),
        _tf32("tf32_matmul", _matmul, _matmul, _word_of_matmuls),
        _tf32("tf32_convolution", lambda: torch.backends.cudnn, lambda: torch.backends.cudnn.conv),
    )
}


def state_of(name: str) -> object | None:
    """Return the exact state of a setting, to compare or to write back; None where this torch does not have it."""
    try:
        return SETTINGS[name].read()
    except UNREADABLE:
        return None


def is_on(name: str) -> bool | None:
    """True if a setting is on; None where this torch does not have it."""
    state = state_of(name)
    return None if state is None else SETTINGS[name].is_on(state)


class _Scopes:
    """Every scope that is open, in order of opening; the flags are those of the newest.

    Threads may open scopes side by side (several GPUs run one model): the flags go back when the last one closes, and
    where the newest scopes of two threads differ a flag is off, which is always the more precise. So a flag that a
    thread's newest scope holds off is off until that scope closes, whatever the other threads open.
    """

    def __init__(self):
        self.lock = threading.RLock()
        self._open: list[tuple[object, int, Mapping[str, bool]]] = []
        self.before: dict[str, object] = {}

    def enter(self, key: object, wanted: Mapping[str, bool]) -> None:
        with self.lock:
            for name in wanted:
                if name not in self.before and (state := state_of(name)) is not None:
                    self.before[name] = state
            self._open.append((key, threading.get_ident(), wanted))
            self._apply(wanted)

    def leave(self, key: object) -> None:
        with self.lock:
            closed = [wanted for entry, _, wanted in self._open if entry is key]
            self._open = [entry for entry in self._open if entry[0] is not key]
            self._apply(name for wanted in closed for name in wanted)
            if not self._open:
                self.before.clear()

    def holds(self, name: str, value: bool) -> bool:
        """True if the newest scope of this thread that names the setting holds it at this value."""
        mine = threading.get_ident()
        with self.lock:
            for _, thread, wanted in reversed(self._open):
                if thread == mine and name in wanted:
                    return wanted[name] is value
        return False

    def _newest(self, name: str) -> dict[int, bool]:
        """Map each thread to the value in its newest scope that names the setting."""
        return {thread: wanted[name] for _, thread, wanted in self._open if name in wanted}

    def _apply(self, names: Iterable[str]) -> None:
        for name in filter(self.before.__contains__, names):
            newest = self._newest(name)
            wanted = all(newest.values()) if newest else self.before[name]
            if state_of(name) != wanted:
                SETTINGS[name].write(wanted)


_scopes = _Scopes()


@contextmanager
def flags_set(wanted: Mapping[str, bool]) -> Iterator[None]:
    """Hold the flags of ``SETTINGS`` named in ``wanted`` at these values; those this torch does not have are left
    alone."""
    key = object()
    try:
        _scopes.enter(key, wanted)
        yield
    finally:
        _scopes.leave(key)


def fp32_accumulation() -> AbstractContextManager[None]:
    """Keep fp16 accumulation off, for fp16 products with fp32 results. Inside of a compiled graph nothing changes."""
    # A graph of torch.compile cannot switch flags.
    if torch.compiler.is_compiling() or _scopes.holds("fp16_accumulation", False):
        return nullcontext()
    # While it is on cuBLAS refuses such products (ATen CUDABlas.cpp, allowFP16AccumulationCuBLAS).
    return flags_set({"fp16_accumulation": False})


def outside(name: str) -> bool | None:
    """Return the value of a setting outside of every open scope; None if this torch does not have the setting."""
    with _scopes.lock:
        state = _scopes.before.get(name, state_of(name))
    return None if state is None else SETTINGS[name].is_on(state)
