"""How much memory a container leaves this process, and a refusal before the system kills it."""

import sys
from collections.abc import Iterator
from pathlib import Path

from ..base.errors import MemoryShortage
from ..base.message import Message
from ..base.text import size_text

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_memory() -> int | None:
    """Count the bytes left by the cgroups above this process, file cache as free; None without a
    limit.

    psutil, which ComfyUI asks, does not see them.
    """
    rooms = _cgroup_rooms() if sys.platform == "linux" else ()
    return min(rooms, default=None)


FOR_WEIGHTS = "Choose fp8 storage, close other programs, or raise the container's or service's memory limit."


def require_memory(needed: int, what: str, available: int, advice: str = FOR_WEIGHTS) -> None:
    """Check that ``needed`` bytes are at most the ``available`` bytes; ``what`` is named in the
    error.

    Raises:
        MemoryShortage: they are not.
    """
    if needed > available:
        problem = Message("{0} needs {1} of memory, {2} are available.", what, size_text(needed), size_text(available))
        raise MemoryShortage(problem, advice)


def _cgroup_rooms() -> Iterator[int]:
    for line in _read(PROC / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            yield from _rooms_above(CGROUPS, path, _V2)
            yield from _rooms_above(CGROUPS / "unified", path, _V2)
        elif "memory" in controllers.split(","):
            yield from _rooms_above(CGROUPS / "memory", path, _V1)


def _rooms_above(root: Path, path: str, files: tuple[str, str, str]) -> Iterator[int]:
    # A container sees the root as its own.
    folder = root / path.lstrip("/")
    groups = (group for group in (folder, *folder.parents) if group == root or root in group.parents)
    yield from (room for group in groups if (room := _room(group, *files)) is not None)


def _room(group: Path, limit_file: str, usage_file: str, cache_field: str) -> int | None:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():
        return None
    lines = map(str.split, _read(group / "memory.stat").splitlines())
    cache = next((int(line[1]) for line in lines if line[0] == cache_field), 0)
    return max(0, int(limit) - int(usage) + cache)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
