"""ComfyUI's progress bar and its interrupt."""

from collections.abc import Callable, Iterable

import comfy.model_management
import comfy.utils

from ....precision.formats.checkpoint import StoredWeight


def byte_progress(weights: Iterable[StoredWeight]) -> Callable[[int], None]:
    """Return a function to call with the bytes of these weights just dealt with."""
    return advancing(comfy.utils.ProgressBar(max(1, sum(weight.data.nbytes for weight in weights))))


def advancing(bar: comfy.utils.ProgressBar) -> Callable:
    """Return a function that moves the bar on, by one or its argument, and raises ComfyUI's interrupt."""

    def advance(done: int = 1) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(done)

    return advance
