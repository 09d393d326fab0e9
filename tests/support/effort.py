"""What reading a file costs, counted where it is done: bytes asked of it, lines of the pack that ran, tensors taken.

A count is the same on a busy machine. Does not see: time spent inside of one call of C code.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from unittest import mock

from halfsafe.precision.files import safetensors_file
from halfsafe.precision.files.tensor_file import TensorFile

PRECISION = str(Path(__file__).absolute().parents[2] / "precision")


@contextlib.contextmanager
def bytes_asked() -> Iterator[list[int]]:
    """How many bytes each read of a safetensors file's header asks for, met or not."""
    asked, open_regular = [], safetensors_file.open_regular

    class Watched(io.BufferedReader):
        def read(self, size: int = -1) -> bytes:
            asked.append(size if size >= 0 else Path(self.raw.name).stat().st_size)
            return super().read(size)

    with mock.patch.object(safetensors_file, "open_regular", lambda path: Watched(open_regular(path).detach())):
        yield asked


@contextlib.contextmanager
def lines_run() -> Iterator[Counter]:
    """How often each file of ``precision/`` has run one of its lines in this thread."""
    lines, before = Counter(), sys.gettrace()

    def inside(frame: FrameType, event: str, _):
        lines[frame.f_code.co_filename] += event == "line"
        return inside

    sys.settrace(lambda frame, *_: inside if frame.f_code.co_filename.startswith(PRECISION) else None)
    try:
        yield lines
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def tensors_taken() -> Iterator[Counter]:
    """How often each tensor is taken from a model file."""
    taken, take = Counter(), TensorFile.__getitem__

    def counted(self: TensorFile, name: str):
        taken[name] += 1
        return take(self, name)

    with mock.patch.object(TensorFile, "__getitem__", counted):
        yield taken


def functions_run(work: Callable[[], object]) -> Counter:
    """How many functions of Python (``call``) and of C (``c_call``) the third time of a piece of work runs."""
    seen = Counter()

    def note(frame: FrameType, event: str, _) -> None:
        seen[event] += 1

    for _ in range(2):
        work()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen
