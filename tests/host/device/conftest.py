"""Fixtures of tests on the emulated device with values; ``support/second_device.py`` says what it is."""

import pytest
from support import families
from support.second_machine import machine


@pytest.fixture
def on():
    """``on(kind, **options)``: the machine the rest of the test runs on."""
    entered = []

    def enter(kind, **options):
        entered.append(machine(kind, **options))
        return entered[-1].__enter__()

    yield enter
    for each in reversed(entered):
        each.__exit__(None, None, None)


@pytest.fixture(scope="package")
def clean(comfy, wan):
    """What the finite model gives in fp32 on the CPU."""
    return families.sample(families.load(comfy, wan, "fp32", "fp32"), "wan", steps=2)


@pytest.fixture(scope="package")
def cured(comfy, overflowing):
    """What the overflowing model gives in fp32 on the CPU."""
    return families.sample(families.load(comfy, overflowing, "fp32", "fp32"), "wan", steps=2)
