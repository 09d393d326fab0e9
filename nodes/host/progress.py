"""ComfyUI's progress bar, in bytes, and its interrupt."""

from collections.abc import Callable, Iterable

import comfy.model_management
import comfy.utils

from ...precision.checkpoint import StoredWeight


def byte_progress(weights: Iterable[StoredWeight]) -> Callable[[int], None]:
    """A function to call with the bytes of these weights just dealt with; raises ComfyUI's interrupt when the user stops."""
    bar = comfy.utils.ProgressBar(max(1, sum(weight.data.nbytes for weight in weights)))

    def advance(done: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(done)

    return advance
