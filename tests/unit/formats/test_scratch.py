"""Memory for large results: huge pages where the kernel gives them, and tensors like any other in every case."""

import mmap
from types import SimpleNamespace

import pytest
import torch
from halfsafe.precision.formats import scratch


@pytest.fixture
def advised(monkeypatch):
    """Collect the ranges that huge pages are asked for."""
    ranges = []
    libc = SimpleNamespace(madvise=lambda address, size, advice: ranges.append((address.value, size.value, advice)))
    monkeypatch.setattr(scratch, "_libc", lambda: libc)
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    return ranges


def test_a_large_result_asks_for_huge_pages_within_its_own_memory(advised):
    tensor = scratch.empty((3000, 2001), torch.bfloat16)
    (begin, size, advice), end = advised[0], tensor.data_ptr() + tensor.nbytes
    assert advice == mmap.MADV_HUGEPAGE
    assert begin % mmap.PAGESIZE == 0
    assert tensor.data_ptr() <= begin < tensor.data_ptr() + mmap.PAGESIZE
    assert begin + size == end


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_small_result_and_one_elsewhere_ask_for_none(advised, device):
    shape = (1000,) if device == "cpu" else (3000, 2001)
    assert scratch.empty(shape, torch.int8, torch.device(device)).shape == shape
    assert advised == []


def test_a_system_without_huge_pages_gets_plain_memory(advised, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert scratch.empty((3000, 2001), torch.bfloat16).shape == (3000, 2001)
    assert advised == []


def test_the_memory_can_be_freed_shared_and_pinned_as_torchs_own():
    tensor = scratch.empty((3000, 2001), torch.bfloat16).fill_(2.5)
    assert (tensor.share_memory_() == 2.5).all()
    tensor.untyped_storage().resize_(0)
    assert tensor.untyped_storage().nbytes() == 0
