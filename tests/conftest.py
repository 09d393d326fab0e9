"""Make the pack importable as `halfsafe` in tests, whatever its folder is called and without ComfyUI."""

from __future__ import annotations

import gc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent
sys.path[:] = [
    str(ROOT / "tests"),
    *(path for path in sys.path if Path(path).absolute() != ROOT),
    str(ROOT / "scripts"),
]

from support import draws  # noqa: E402 (on the path from here on)


class RootIsAFolder:
    """Collect the pack's root as a folder: as a package, pytest would import its `__init__.py` under a wrong name."""

    def pytest_collect_directory(self, path: Path, parent: pytest.Collector) -> pytest.Dir | None:
        return pytest.Dir.from_parent(parent, path=path) if path == ROOT else None


@pytest.hookimpl(tryfirst=True)  # before hypothesis reads its seed
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(RootIsAFolder(), "halfsafe-root")
    if getattr(config.option, "hypothesis_seed", None) is None:
        config.option.hypothesis_seed = str(draws.SHIFT)
    if draws.SHIFT:
        draws.shift_seeds()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef, request: pytest.FixtureRequest) -> Iterator[None]:
    if fixturedef.scope == "function":
        return (yield)
    with draws.own_draws(f"{request.node.nodeid} {fixturedef.argname} {request.param_index}"):
        return (yield)


@pytest.fixture(autouse=True)
def own_draws(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a test draws hangs on its id and HALFSAFE_SEED alone."""
    with draws.own_draws(request.node.nodeid):
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to go on where pytest-xdist does not see the groups: it would share out every test by itself, with a server for each process.

    What stays until the end is left out of what the collector looks through: modules and tests are a million objects, and each of
    its runs takes most of a second with them.
    """
    gc.collect()
    gc.freeze()
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
