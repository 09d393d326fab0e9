"""What tests draw by chance: the same alone, in any order and in any process, and other numbers under another HALFSAFE_SEED.

torch's global generator begins anew for each test and each fixture that several tests share, by its name. With HALFSAFE_SEED
set, the seeds that tests and ComfyUI give to generators of torch and numpy are shifted by it; the product's own stay.
"""

from __future__ import annotations

import contextlib
import os
import sys
import zlib
from collections.abc import Callable, Iterator

SHIFT = int(os.environ.get("HALFSAFE_SEED") or 0)
PRODUCT = "halfsafe"


@contextlib.contextmanager
def own_draws(name: str) -> Iterator[None]:
    """Draws from torch's global generator as this name has them. Without torch there are none."""
    if "torch" not in sys.modules:
        yield
        return
    from torch import default_generator

    before = default_generator.get_state()
    default_generator.manual_seed(zlib.crc32(f"{SHIFT} {name}".encode()))
    try:
        yield
    finally:
        default_generator.set_state(before)


def shift_seeds() -> None:
    """Shift the seeds that generators are given from now on, once."""
    import numpy as np
    import torch

    drawn_by_torch = torch._C.Generator
    if torch.Generator is not drawn_by_torch:
        return

    class Kind(type(drawn_by_torch)):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, drawn_by_torch)

    class Generator(drawn_by_torch, metaclass=Kind):
        def manual_seed(self, seed: int) -> drawn_by_torch:
            return super().manual_seed(_shifted(seed))

    torch.Generator = Generator
    torch.manual_seed = _shifting(torch.manual_seed)
    np.random.default_rng = _shifting(np.random.default_rng)


def _shifting(seeded: Callable) -> Callable:
    def call(seed=None):
        return seeded(_shifted(seed) if isinstance(seed, int) else seed)

    return call


def _shifted(seed: int) -> int:
    asked_by = sys._getframe(2).f_globals["__name__"].partition(".")[0]
    return seed if asked_by == PRODUCT else seed + SHIFT
