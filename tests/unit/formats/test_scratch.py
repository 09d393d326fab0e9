"""Memory to compute in, the same while it is asked for alike; memory for large results, of huge pages where the kernel gives them."""

import mmap
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from halfsafe.precision.formats import scratch

CPU = torch.device("cpu")


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


def test_memory_that_is_asked_for_alike_is_the_same():
    with torch.inference_mode():
        (first,) = scratch.scratch(1, 1000, torch.float32, CPU)
        assert scratch.scratch(1, 1000, torch.float32, CPU)[0] is first
    assert scratch.scratch(1, 1000, torch.float32, CPU)[0] is first and (first.fill_(2.5) == 2.5).all()
    assert scratch.scratch(1, 1000, torch.bfloat16, CPU)[0] is not first


def test_each_thread_has_its_own():
    mine = scratch.scratch(2, 10, torch.float32, CPU)
    with ThreadPoolExecutor(1) as other:
        assert not {id(one) for one in mine} & {id(one) for one in other.submit(scratch.scratch, 2, 10, torch.float32, CPU).result()}


def test_forgotten_memory_is_made_anew():
    (first,) = scratch.scratch(1, 10, torch.float32, CPU)
    scratch.forget_scratch()
    assert scratch.scratch(1, 10, torch.float32, CPU)[0] is not first
