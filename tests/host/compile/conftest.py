"""Models of one block: each is traced many times."""

from pathlib import Path

import pytest
from support import tiny_models


@pytest.fixture(scope="session")
def wan(models_dir: Path) -> Path:
    """A Wan model of one block that is finite in fp16."""
    return tiny_models.wan(models_dir / "diffusion_models" / "wan_one_block.safetensors", blocks=1)


@pytest.fixture(scope="session")
def overflowing(models_dir: Path) -> Path:
    """The same with a feed-forward scaled, so that it is NaN in fp16 and finite in bf16 and fp32."""
    return tiny_models.wan_overflowing(models_dir / "diffusion_models" / "wan_one_block_overflowing.safetensors", blocks=1)
