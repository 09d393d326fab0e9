"""Keep calls of this pack apart from ComfyUI's model compiler, the "Comfy Compiler" (``comfy/model_prefetch.py``,
0.34).

The compiler records the allocations of a model's blocks and reuses their memory for the next blocks and calls: each
block has to allocate as the one before, and to free its memory before it ends.
"""

import comfy.model_prefetch
from comfy.cli_args import args

from ....precision.base.patching import SharedScope, patched
from ..comfyui.attributes import CLOSE_GRAPH, without_compiler

_off = SharedScope(lambda: patched(without_compiler(args)))


def compiler_off() -> SharedScope:
    """Context without the compiler, on every thread, for calls that allocate differently from the model's other calls.

    The compiler has to be off before ComfyUI calls the diffusion model: MiniMax H3 starts its graph before all inner
    wrappers.
    """
    return _off


def after_failure() -> None:
    """Clean up after a call that raised: the model's graph is still open (``forward`` of comfy/ldm/minimax/model.py),
    and a repeat would start another inside it; weights of the next block are prefetched, and a repeat would pin their
    pages again. ComfyUI does the same after a node."""
    comfy.model_prefetch.cleanup_prefetch_queues()
    getattr(comfy.model_prefetch, CLOSE_GRAPH, lambda: None)()
