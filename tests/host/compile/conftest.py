"""Models of one block: each is traced many times."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support import families, tiny_models
from torch.utils._python_dispatch import TorchDispatchMode

if not hasattr(TorchDispatchMode, "ignore_compile_internals"):

    @pytest.fixture(autouse=True)
    def as_on_cuda() -> Iterator[None]:
        """Each test in inference mode, without CUDA's rules: any dispatch mode turns the compiler of torch 2.8 off."""
        with torch.inference_mode():
            yield


@pytest.fixture(scope="session")
def shared_files(models_dir: Path) -> tuple[Path, Path]:
    """Those of one block."""
    folder = models_dir / "diffusion_models"
    clean = tiny_models.wan(folder / "wan_one_block.safetensors", blocks=1)
    return clean, tiny_models.wan_overflowing(folder / "wan_one_block_overflowing.safetensors", blocks=1)


@pytest.fixture(scope="session")
def wan(shared_files: tuple[Path, Path]) -> Path:
    """This and what follows are as in `tests/host/conftest.py`, whose own would keep these files for the tests of other folders too."""
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
