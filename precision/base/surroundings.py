"""Settings of torch's that a caller may hold around a call and that change what an operation computes: autocast, the
default dtype and device, deterministic algorithms, gradients and inference mode."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_dtypes(device: torch.device) -> Iterator[None]:
    """Compute in the dtypes of the operands, without autocast, and create tensors in fp32 if no dtype is given."""
    kinds, default = autocasts(device), torch.get_default_dtype()
    try:
        for kind in kinds:
            torch.set_autocast_enabled(kind, False)
        torch.set_default_dtype(torch.float32)
        yield
    finally:
        for kind in kinds:
            torch.set_autocast_enabled(kind, True)
        torch.set_default_dtype(default)


@contextmanager
def neutral(device: torch.device) -> Iterator[None]:
    """Compute as in a new process, for an answer that is kept for the process."""
    with own_dtypes(device), torch.inference_mode(False), torch.no_grad(), torch.device("cpu"), _any_algorithm():
        yield


def autocasts(device: torch.device) -> list[str]:
    """List the types of devices, of this device's and the CPU's, on which autocast chooses the dtypes."""
    kinds = dict.fromkeys(("cpu", device.type))
    return [kind for kind in kinds if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)]


@contextmanager
def _any_algorithm() -> Iterator[None]:
    if not torch.are_deterministic_algorithms_enabled():  # to set it imports torch's compiler, which takes seconds
        yield
        return
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=warns)
