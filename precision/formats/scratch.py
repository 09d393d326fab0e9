"""Memory to compute in, the same each time."""

import threading

import torch

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
    """Free the tensors of :func:`scratch` in the current thread."""
    _held.__dict__.clear()
