"""Faults of the system while files are read and written: an error or a full disk at every point there is."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from halfsafe.precision.base.errors import CheckpointError
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file
from halfsafe.precision.files import safetensors_file, tensor_file
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.plan.rules import rules_from
from safetensors.torch import save_file
from support import dialects, faults

NO_RULES = rules_from("", "none")


@pytest.fixture
def source(tmp_path):
    (tmp_path / "from").mkdir()
    return dialects.block_wise(
        tmp_path / "from" / "in.safetensors", *dialects.reference(shape=(32, 48)), rows=16, columns=16
    )


@pytest.fixture
def target(tmp_path):
    (tmp_path / "to").mkdir()
    return tmp_path / "to" / "out.safetensors"


def convert(source: Path, target: Path) -> None:
    convert_file(source, target, "fp8_e4m3fn", NO_RULES)


def whole(source: Path, folder: Path) -> bytes:
    """What an undisturbed conversion writes."""
    convert(source, folder / "whole.safetensors")
    return (folder / "whole.safetensors").read_bytes()


@contextmanager
def failing_at(point: int, error: BaseException) -> Iterator[None]:
    """Raise ``error`` at the given point, once."""
    passed = []

    def before():
        passed.append(None)
        if len(passed) == point + 1:
            raise error

    with faults.watched(before):
        yield


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_an_error_at_any_point_names_the_target_and_leaves_no_other_file(source, target, tmp_path, code):
    complete = whole(source, tmp_path)
    for point in range(faults.count(lambda: convert(source, target))):
        target.write_bytes(b"old")
        with failing_at(point, OSError(code, os.strerror(code))), pytest.raises(CheckpointError) as error:
            convert(source, target)
        assert os.strerror(code) in str(error.value) and str(target) in str(error.value), f"point {point}"
        assert target.read_bytes() in (b"old", complete)
        assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.mark.parametrize("problem", [KeyboardInterrupt, MemoryError])
def test_what_is_no_system_error_comes_through_and_leaves_no_other_file(source, target, problem):
    for point in range(faults.count(lambda: convert(source, target))):
        target.write_bytes(b"old")
        with failing_at(point, problem()), pytest.raises(problem):
            convert(source, target)
        assert [path.name for path in target.parent.iterdir()] == [target.name]


@contextmanager
def unreadable(monkeypatch, after: int):
    """Files whose reads fail from the given one on."""
    opened = safetensors_file.open_regular

    class Failing:
        def __init__(self, file):
            self.file, self.reads = file, 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read(self, *args):
            self.reads += 1
            if self.reads > after:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return self.file.read(*args)

        def __getattr__(self, name):
            return getattr(self.file, name)

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_file, "open_regular", lambda path: Failing(opened(path)))
        yield


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("use", [open_checkpoint, inspect_file, partial(inspect_file, values=True)])
def test_a_disk_that_cannot_be_read_is_told(source, monkeypatch, after, use):
    with (
        unreadable(monkeypatch, after),
        pytest.raises(CheckpointError, match=r"in\.safetensors.*(Input/output error|cannot be read)"),
    ):
        use(source)


def test_an_index_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    (tmp_path / "m.index.json").write_text("{}")
    with unreadable(monkeypatch, 0), pytest.raises(CheckpointError, match=r"m\.index\.json.*cannot be read"):
        open_checkpoint(tmp_path / "m.index.json")


def test_a_file_that_cannot_be_mapped_is_told(source, monkeypatch):
    def refuse(*_args, **_kwargs):
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(tensor_file.mmap, "mmap", refuse)
    with pytest.raises(CheckpointError, match="mapped"):
        open_checkpoint(source)


def test_no_file_stays_open_after_an_error(tmp_path):
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("reads /proc")
    before = len(os.listdir("/proc/self/fd"))
    save_file({"a.weight": torch.full((4, 4), float("nan"))}, tmp_path / "nan.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "nan.safetensors").read_bytes()[:-1])
    for name in ("nan", "cut") * 20:
        with pytest.raises(CheckpointError):
            convert(tmp_path / f"{name}.safetensors", tmp_path / "out.safetensors")
    assert len(os.listdir("/proc/self/fd")) <= before + 1
