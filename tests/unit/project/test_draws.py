"""What tests draw by chance hangs on their own names and HALFSAFE_SEED, not on what ran before."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from halfsafe.precision.formats import fp8
from support import draws

CONFTEST = Path(__file__).absolute().parents[2] / "conftest.py"
TESTS = """
import pytest, torch, numpy
@pytest.fixture(scope="module")
def shared():
    return torch.rand(1).item()
def test_first(record_property, shared):
    record_property("drawn", (shared, torch.rand(1).item()))
def test_second(record_property, shared):
    record_property("drawn", (shared, torch.rand(1).item()))
def test_seeded(record_property):
    torch.manual_seed(5)
    own = torch.rand(1, generator=torch.Generator().manual_seed(5)).item()
    record_property("drawn", (own, torch.rand(1).item(), numpy.random.default_rng(5).random()))
"""


class Drawn(dict):
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self[report.nodeid.partition("::")[2]] = dict(report.user_properties)["drawn"]


@pytest.fixture
def drawn(request: pytest.FixtureRequest, tmp_path: Path):
    """What each of the tests above draws where these run, in this order."""
    conftest = request.config.pluginmanager.get_plugin(str(CONFTEST))
    file = tmp_path / "test_by_chance.py"
    file.write_text(TESTS, encoding="utf-8")

    def drawn(*names: str) -> dict[str, tuple]:
        run = Drawn()
        ids = [f"{file}::test_{name}" for name in names]
        assert pytest.main([*ids, "-q", "-p", "no:cacheprovider", "--import-mode=importlib", f"--rootdir={tmp_path}"], plugins=[conftest, run]) == 0
        return run

    return drawn


@pytest.fixture
def another_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((torch, "Generator"), (torch, "manual_seed"), (np.random, "default_rng")):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(draws, "SHIFT", draws.SHIFT + 1)


def test_a_test_draws_alone_and_after_others_what_it_draws(drawn):
    together = drawn("first", "second", "seeded")
    assert drawn("seeded", "second", "first") == together
    assert drawn("second") == {"test_second": together["test_second"]}
    assert together["test_first"] != together["test_second"] and together["test_seeded"][0] == together["test_seeded"][1]


def test_another_seed_draws_other_numbers_everywhere(drawn, another_seed, monkeypatch):
    shifted = drawn("first", "second", "seeded")
    monkeypatch.undo()
    plain = drawn("first", "second", "seeded")
    pairs = [pair for name in plain for pair in zip(plain[name], shifted[name], strict=True)]
    assert len(pairs) == 7 and all(one != other for one, other in pairs)


def test_the_products_own_seeds_stay(another_seed, monkeypatch):
    draws.shift_seeds()
    assert torch.Generator().manual_seed(7).initial_seed() == 7 + draws.SHIFT
    assert isinstance(torch.default_generator, torch.Generator)
    assert fp8.__name__.partition(".")[0] == draws.PRODUCT
    monkeypatch.setattr(draws, "PRODUCT", __name__.partition(".")[0])
    assert torch.Generator().manual_seed(7).initial_seed() == 7
