"""Memory left for the process: cgroups of both versions, and the refusal."""

import sys

import pytest
from halfsafe.precision.base.errors import MemoryShortage
from halfsafe.precision.devices import memory

GB = 10**9


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Make up /proc and /sys/fs/cgroup; return the folder that holds both."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(sys, "platform", "linux")
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def group(folder, limit, usage, cache=0, version=2):
    names = memory._V2 if version == 2 else memory._V1
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\n{names[2]} {cache}\nactive_file 7\n")


def belongs_to(machine, *lines):
    (machine / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_without_a_limit_nothing_is_told(machine):
    assert memory.available_memory() is None
    belongs_to(machine, "0::/user")
    group(machine / "cgroup/user", "max", 3 * GB)
    assert memory.available_memory() is None


@pytest.mark.parametrize("version, line, root", [(2, "0::/a/b", "cgroup"), (1, "4:cpu,memory:/a/b", "cgroup/memory")])
def test_the_tightest_cgroup_above_the_process_counts_and_file_cache_is_free(machine, version, line, root):
    belongs_to(machine, line)
    group(machine / root / "a/b", 10 * GB, 9 * GB, 4 * GB, version)
    assert memory.available_memory() == 5 * GB
    group(machine / root / "a", 8 * GB, 7 * GB, 2 * GB, version)
    assert memory.available_memory() == 3 * GB
    group(machine / root, 4 * GB, 3 * GB, 0, version)
    assert memory.available_memory() == 1 * GB


def test_a_container_that_does_not_see_its_own_path_uses_its_root(machine):
    belongs_to(machine, "0::/system.slice/docker-abc.scope")
    group(machine / "cgroup", 2 * GB, GB)
    assert memory.available_memory() == GB


def test_an_overdrawn_cgroup_has_nothing_left(machine):
    belongs_to(machine, "0::/a")
    group(machine / "cgroup/a", GB, 2 * GB)
    assert memory.available_memory() == 0


def test_a_shortage_names_need_have_and_what_to_do():
    memory.require_memory(GB, "Loading a.safetensors", GB)
    with pytest.raises(MemoryShortage, match=r"Loading a\.safetensors needs 30\.00 GiB.*12\.50 GiB are available.*fp8"):
        memory.require_memory(30 * 2**30, "Loading a.safetensors", int(12.5 * 2**30))
