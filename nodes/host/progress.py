"""ComfyUI's progress bar, in bytes, and its interrupt."""

from collections.abc import Callable

import comfy.model_management
import comfy.utils


def byte_progress(total: int) -> Callable[[int], None]:
    """A function to call with the bytes done since the last call; raises ComfyUI's interrupt when the user stops."""
    bar = comfy.utils.ProgressBar(max(total, 1))

    def advance(done: int) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        bar.update(done)

    return advance
