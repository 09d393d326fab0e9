"""A failed call of something that ComfyUI runs."""

from ....precision.guard.failed_call import FailedCall, Given, Result, Step
from ..page import show_progress
from ..run.oom import is_oom


class HostCall(FailedCall[Given, Step, Result]):
    """A failed call on a device whose memory ComfyUI manages."""

    def tell(self, doing: str) -> None:
        """Show what is being done on the node that runs."""
        show_progress(doing)

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Tell whether an error means that a repeat found no memory, in ComfyUI's words too."""
        return is_oom(error)
