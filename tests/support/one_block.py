"""Fixtures of models of one block, for a folder whose tests run or trace a model many times: its `conftest.py` imports all of them, because a session fixture that
asks for another one of them would keep the files of two blocks.

They are otherwise as in `tests/host/conftest.py`.
"""

from pathlib import Path

import pytest
from support import families, tiny_models


@pytest.fixture(scope="session")
def shared_files(models_dir: Path) -> tuple[Path, Path]:
    """Those of one block."""
    folder = models_dir / "diffusion_models"
    clean = tiny_models.wan(folder / "wan_one_block.safetensors", blocks=1)
    return clean, tiny_models.wan_overflowing(folder / "wan_one_block_overflowing.safetensors", blocks=1)


@pytest.fixture(scope="session")
def wan(shared_files: tuple[Path, Path]) -> Path:
    return shared_files[0]


@pytest.fixture(scope="session")
def overflowing(shared_files: tuple[Path, Path]) -> Path:
    return shared_files[1]


@pytest.fixture(scope="session")
def call(comfy, wan: Path) -> families.Call:
    return families.capture(families.load(comfy, wan), "wan")


@pytest.fixture(scope="session")
def call_of_two(comfy, wan: Path) -> families.Call:
    return families.capture(families.load(comfy, wan), "wan", batch=2)
