"""Do one thing to many files, several at a time; a file that fails does not stop the others."""

import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from ..errors import CheckpointError, HalfsafeError
from ..files.safetensors_file import open_checkpoint

PART = re.compile(r"-\d{5}-of-\d{5}$")
INDEX = ".index.json"
Result = TypeVar("Result")
Advance = Callable[[int], None]
"""Called with the bytes of files just dealt with."""


@dataclass(frozen=True)
class Outcome(Generic[Result]):
    """What came of one file: its result, or the error that it failed with."""

    file: Path
    result: Result | None = None
    error: Exception | None = None

    def to_json(self, of_result: Callable[[Result], dict]) -> dict:
        """Return the result as JSON-safe data, or ``{"file": ..., "error": ...}``."""
        return {"file": str(self.file), "error": str(self.error)} if self.result is None else of_result(self.result)


def for_each(
    files: Sequence[Path], work: Callable[[Path, Advance], Result], jobs: int, progress: Advance
) -> list[Outcome[Result]]:
    """Run ``work(file, progress)`` on each file, ``jobs`` at a time in threads; the outcomes are in their order.

    Numbers are read, rounded and written by torch and the system without Python's lock, so threads are enough.
    ``progress`` is called from one thread at a time. An interrupt ends the files under way at their next tensor.
    """
    lock, stopped = threading.Lock(), threading.Event()

    def advance(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError
        with lock:
            progress(count)

    def run(file: Path) -> Outcome[Result]:
        try:
            return Outcome(file, work(file, advance))
        except Exception as error:
            return Outcome(file, error=error)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            return list(pool.map(run, files))
        except BaseException:
            stopped.set()
            pool.shutdown(cancel_futures=True)
            raise


def bytes_in(files: Iterable[Path]) -> int:
    """Count the bytes of tensors in the files that can be read."""
    total = 0
    for file in files:
        try:
            total += open_checkpoint(file).data_bytes
        except CheckpointError:
            continue
    return total


def models_in(files: Sequence[Path]) -> list[Path]:
    """Return one file for each sharded model, which its index and any part open as a whole, and the other files."""
    models: dict[object, Path] = {}
    for number, file in enumerate(files):
        of_set = PART.search(file.stem) or file.name.endswith(INDEX)
        models.setdefault((file.parent, _stem(file)) if of_set else number, file)
    return list(models.values())


def _stem(source: Path) -> str:
    """Return the name of the model that a file, or a part of one, holds."""
    name = source.name.removesuffix(INDEX)
    return PART.sub("", name.rpartition(".")[0] or name)


def targets_in(folder: Path, sources: Sequence[Path]) -> dict[Path, Path]:
    """Map each source to the file of the same name in a folder, as .safetensors.

    Raises:
        HalfsafeError: two sources would have the same target.
    """
    targets = {source: folder / f"{_stem(source)}.safetensors" for source in sources}
    taken: dict[Path, Path] = {}
    for source, target in targets.items():
        if target in taken:
            raise HalfsafeError(
                f"{taken[target]} and {source} would both become {target}.", "Convert them into two folders."
            )
        taken[target] = source
    return targets
