"""Memory to compute in, the same each time, and memory for large results."""

import ctypes
import functools
import mmap
import threading
from collections.abc import Sequence

import torch

LARGE = 1 << 20
"""Bytes from which on a result asks for huge pages. Neighbours of 1 MB share one."""
_held = threading.local()


def scratch(count: int, size: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Give ``count`` tensors of ``size`` elements, the same each time in a thread until others are asked for.

    Page faults of fresh memory take as long as a multiplication, and large tensors that come and go between weights
    that stay leave holes in the heap. Made outside of inference mode, or they could not be written to there later.
    """
    kind = count, size, dtype, device
    if getattr(_held, "kind", None) != kind:
        with torch.inference_mode(False):
            _held.kind, _held.tensors = kind, [torch.empty(size, dtype=dtype, device=device) for _ in range(count)]
    return _held.tensors


def forget_scratch() -> None:
    """Free what :func:`scratch` holds for this thread."""
    _held.__dict__.clear()


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Make an uninitialized tensor, in host memory of huge pages where the kernel gives them on request.

    The page faults of new memory take as long as a cast into it, at 4 KB each.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.device.type == "cpu" and tensor.nbytes >= LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        page = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        # A kernel without huge pages refuses the advice, and the memory is as any other.
        _libc().madvise(ctypes.c_void_p(page), ctypes.c_size_t(end - page), mmap.MADV_HUGEPAGE)
    return tensor


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
