"""How far a result is from its reference."""

import math
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import torch
from support import fast_norm


def relative_error(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """``||approximation - reference|| / ||reference||`` in fp64; 0 for two zero tensors."""
    reference = reference.double()
    norm = reference.norm().item()
    error = (approximation.double() - reference).norm().item()
    return error / norm if norm else error


def summed_alike(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether two results in fp32 of equal numbers differ by no more than sums in another order do: weights elsewhere in
    memory, or other numbers of rows, are summed in another one by some libraries."""
    return relative_error(expected, found) < 2**-20


def sqnr_db(reference: torch.Tensor, approximation: torch.Tensor) -> float:
    """Signal to quantization noise ratio in dB: ``-20 log10`` of :func:`relative_error`; inf when equal."""
    error = relative_error(reference, approximation)
    return math.inf if error == 0 else -20 * math.log10(error)


def functions_run(work: Callable[[], object]) -> Counter:
    """Count the functions of Python (``call``) and of C (``c_call``) of the third time of a piece of work, but for those of `fast_norm`."""
    seen = Counter()

    def note(frame: FrameType, event: str, _) -> None:
        seen[event] += frame.f_code.co_filename != fast_norm.__file__

    for _ in range(2):
        work()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return seen
