"""``HALFSAFE_LOG``: the level of the pack's log."""

import logging

import pytest
from halfsafe.precision.base.debug_log import LOG_VARIABLE, set_log_level


@pytest.fixture
def log():
    logger = logging.getLogger("halfsafe")
    level = logger.level
    yield logger
    logger.setLevel(level)


def test_the_variable_sets_the_level_of_every_logger_of_the_pack(monkeypatch, log):
    monkeypatch.setenv(LOG_VARIABLE, "debug")
    assert set_log_level() is None
    assert logging.getLogger("halfsafe.compute").getEffectiveLevel() == logging.DEBUG


def test_a_level_that_does_not_exist_is_named_and_nothing_is_set(monkeypatch, log):
    before = log.level
    monkeypatch.setenv(LOG_VARIABLE, "loud")
    assert "HALFSAFE_LOG=LOUD" in set_log_level() and log.level == before
