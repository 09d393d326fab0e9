"""What tests of the library share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def without_gradients() -> Iterator[None]:
    """Run a test as inference does."""
    with torch.no_grad():
        yield
