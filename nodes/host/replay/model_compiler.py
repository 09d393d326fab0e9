"""Keep calls of this pack apart from what ComfyUI records of a model's blocks
(``comfy/model_prefetch.py``).

Its model compiler (the "Comfy Compiler", 0.34) records the allocations of blocks and reuses their
memory for the next blocks and calls: each block has to allocate as the one before, and to free its
memory before it ends. Its CUDA graphs (0.33; the decode blocks of text encoders) are replayed in
place of a block as long as the pages of its weights are the same, whatever the block would do now.
ComfyUI drops both when a node ends.
"""

import contextlib
from collections.abc import Iterator

import comfy.model_prefetch
from comfy.cli_args import args

from ....precision.base.patching import SharedScope, patched
from ..comfyui.attributes import CLOSE_GRAPH, without_compiler

compiler_off = SharedScope(lambda: patched(without_compiler(args)))
"""Context without the compiler and CUDA graphs, on every thread, for calls that allocate or compute
differently from the model's other calls.

The compiler has to be off before ComfyUI calls the diffusion model: MiniMax H3 starts its graph
before all inner wrappers."""


def after_failure() -> None:
    """Drop what ComfyUI recorded of a call that failed. After an error the model's graph is still
    open (``forward`` of comfy/ldm/minimax/model.py), and a repeat would start another inside it;
    weights of the next block are prefetched, and a repeat would pin their pages again. ComfyUI does
    the same after a node."""
    comfy.model_prefetch.cleanup_prefetch_queues()
    getattr(comfy.model_prefetch, CLOSE_GRAPH, lambda: None)()


@contextlib.contextmanager
def repeating(is_alone: bool = True) -> Iterator[None]:
    """Context of a repeated call: nothing that was recorded of the failed one runs in its place.

    ``is_alone``: False while other threads call copies of the model on other devices, whose
    prefetched weights stay.
    """
    if is_alone:
        after_failure()
    with compiler_off:
        yield
