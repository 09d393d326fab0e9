"""Values past fp16's range that ComfyUI's own model code replaces by 65504, or NaN by 0, without a word."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from ....precision.amax import amax
from ....precision.arithmetic.patching import SharedScope, patched

CLAMPING_MODULES = ("comfy.ldm.flux.", "comfy.ldm.lumina.", "comfy.ldm.chroma", "comfy.ldm.hunyuan_video.")


def clamps_in_fp16(model: torch.nn.Module) -> bool:
    """Tell whether the code of a diffusion model calls ``torch.nan_to_num`` on fp16 values (ComfyUI 0.29 to 0.38)."""
    return any(type(module).__module__.startswith(CLAMPING_MODULES) for module in model.modules())


@contextlib.contextmanager
def _nan_to_num_is_seen() -> Iterator[None]:
    original = torch.nan_to_num

    def run(input, *args, **kwargs):
        for watch in _watching_here():
            watch.see(input)
        return original(input, *args, **kwargs)

    with patched([(torch, "nan_to_num", run)]):
        yield


_seen = SharedScope(_nan_to_num_is_seen)
_of_thread = threading.local()


def _watching_here() -> list["ClampWatch"]:
    return _of_thread.__dict__.setdefault("watches", [])


class ClampWatch:
    """Record the largest magnitude, inf or NaN, that ``torch.nan_to_num`` of fp16 values is given on this thread; reads
    nothing back.

    It keeps nothing that a block allocates: its one number is made before the call, on ``device``.
    """

    def __init__(self, on: bool, device: torch.device):
        self.on = on
        self._largest = torch.zeros((), device=device) if on else None

    def __enter__(self) -> "ClampWatch":
        if self.on:
            _seen.__enter__()
            _watching_here().append(self)
        return self

    def __exit__(self, *error) -> None:
        if self.on:
            _watching_here().remove(self)
            _seen.__exit__(*error)

    def see(self, values: torch.Tensor) -> None:
        """Keep the largest magnitude."""
        if values.dtype == torch.float16:
            torch.maximum(self._largest, amax(values), out=self._largest)

    def sizes(self) -> list[torch.Tensor]:
        """Return the largest magnitude, 0-dim; 0 where nothing was clamped, and nothing where it is off."""
        return [] if self._largest is None else [self._largest]
