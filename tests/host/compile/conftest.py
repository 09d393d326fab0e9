"""Models of one block: each is traced many times."""

from collections.abc import Iterator

import pytest
import torch
from support import one_block
from torch.utils._python_dispatch import TorchDispatchMode

shared_files, wan, overflowing = one_block.shared_files, one_block.wan, one_block.overflowing
call, call_of_two = one_block.call, one_block.call_of_two

if not hasattr(TorchDispatchMode, "ignore_compile_internals"):

    @pytest.fixture(autouse=True)
    def as_on_cuda() -> Iterator[None]:
        """Each test in inference mode, without CUDA's rules: any dispatch mode turns the compiler of torch 2.8 off."""
        with torch.inference_mode():
            yield
