"""Make the pack importable as `halfsafe` in tests, whatever its folder is called and without ComfyUI."""

from __future__ import annotations

import contextlib
import gc
import importlib.machinery
import importlib.util
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent
sys.path[:] = [
    str(ROOT / "tests"),
    *(path for path in sys.path if Path(path).absolute() != ROOT),
    str(ROOT / "scripts"),
]
RELEASE = bool(os.environ.get("HALFSAFE_RELEASE"))
"""Whether the tests run that are run before a release alone: benchmarks, the GPU kit, settings beside settings that others stand for."""
SHIFT = int(os.environ.get("HALFSAFE_SEED") or 0)
"""Tests draw the same alone, in any order and in any process; HALFSAFE_SEED shifts the seeds that tests and ComfyUI give to generators, not the product's own."""


@contextlib.contextmanager
def draws_of(name: str) -> Iterator[None]:
    """Draws from torch's global generator as this name has them. Without torch there are none."""
    if "torch" not in sys.modules:
        yield
        return
    from torch import default_generator

    before = default_generator.get_state()
    default_generator.manual_seed(zlib.crc32(f"{SHIFT} {name}".encode()))
    try:
        yield
    finally:
        default_generator.set_state(before)


def shift_seeds() -> None:
    """Shift the seeds that generators are given from now on, once."""
    import numpy as np
    import torch

    drawn_by_torch = torch._C.Generator
    if torch.Generator is not drawn_by_torch:
        return

    class Kind(type(drawn_by_torch)):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, drawn_by_torch)

    class Generator(drawn_by_torch, metaclass=Kind):
        def manual_seed(self, seed: int) -> drawn_by_torch:
            return super().manual_seed(_shifted(seed))

    torch.Generator = Generator
    torch.manual_seed = _shifting(torch.manual_seed)
    np.random.default_rng = _shifting(np.random.default_rng)


def _shifting(seeded: Callable) -> Callable:
    def call(seed=None):
        return seeded(_shifted(seed) if isinstance(seed, int) else seed)

    return call


def _shifted(seed: int) -> int:
    asked_by = sys._getframe(2).f_globals["__name__"].partition(".")[0]
    return seed if asked_by == "halfsafe" else seed + SHIFT


class RootIsAFolder:
    """Collect the pack's root as a folder: as a package, pytest would import its `__init__.py` under a wrong name."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    from support.cpu_time import CpuTime

    config.pluginmanager.register(RootIsAFolder(), "halfsafe-root")
    config.pluginmanager.register(CpuTime(), "halfsafe-cpu-time")
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(SHIFT)
    if SHIFT:
        shift_seeds()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with draws_of(f"{request.node.nodeid} {fixturedef.argname} {request.param_index}"):
        return (yield)


@pytest.fixture(autouse=True)
def own_draws(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test draws hangs on its id and HALFSAFE_SEED alone."""
    with draws_of(request.node.nodeid):
        yield


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """No garbage is looked for while modules and tests are made, which stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist shares them out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs before a release alone: marker `release`."""
    if RELEASE:
        return
    left_out = [item for item in items if item.get_closest_marker("release")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to go on where pytest-xdist does not see the groups: it would share out every test by itself, with a server for each process.

    What stays until the end is left out of what the collector looks through: modules and tests are a million objects, and each of
    its runs takes most of a second with them. It begins after 10,000 new objects instead of 700, which one small model has.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    if getattr(session.config.option, "loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("pytest-xdist lost the groups of the tests: see TOOLS in scripts/setup/environment.py")


def make_alias_package() -> None:
    """Create the package `halfsafe` without running its `__init__.py`, which needs ComfyUI."""
    spec = importlib.machinery.ModuleSpec("halfsafe", loader=None, origin=str(ROOT / "__init__.py"), is_package=True)
    spec.submodule_search_locations = [str(ROOT)]
    sys.modules["halfsafe"] = importlib.util.module_from_spec(spec)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For work on tensors so small that a second thread costs more than it does."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


if "halfsafe" not in sys.modules:
    make_alias_package()


@pytest.fixture
def fresh_probes() -> Iterator[None]:
    """Run the probes of devices anew in a test, and after it."""
    from support.probing import forget_probes

    forget_probes()
    yield
    forget_probes()


@pytest.fixture
def as_on_mps(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """CPU tensors stand for those of a Mac: the infinity norm loses NaN, and the device is known for it."""
    from halfsafe.precision.base import amax
    from support.broken_arithmetic import NormsLoseNaN

    monkeypatch.setattr(amax, "KEEP_NAN", ())
    monkeypatch.setattr(amax, "_HOST", ())
    monkeypatch.setattr(amax, "_loses_nan", {"cpu": True, "meta": True})
    with NormsLoseNaN():
        yield
