"""Keep calls of ours apart from ComfyUI's model compiler, the "Comfy Compiler" (``comfy/model_prefetch.py``, 0.34).

It records what a model's blocks allocate and gives the next blocks and calls the same memory: each has to allocate what
the one before it did, and to free it before it ends.
"""

import comfy.model_prefetch
from comfy.cli_args import args

from ....precision.base.patching import SharedScope, patched
from ..comfyui.attributes import CLOSE_GRAPH, without_compiler

_off = SharedScope(lambda: patched(without_compiler(args)))


def compiler_off() -> SharedScope:
    """Run calls that allocate otherwise than the model's other calls inside, on every thread without the compiler.

    It has to be off before ComfyUI calls the diffusion model: MiniMax H3 begins its graph before all wrappers in it.
    """
    return _off


def after_failure() -> None:
    """Clean up after a call that raised: models leave their graph open (``forward`` of comfy/ldm/minimax/model.py),
    in which a repeat would begin another, and weights of the next block prefetched, whose pages a repeat would pin
    anew; ComfyUI does so after a node."""
    comfy.model_prefetch.cleanup_prefetch_queues()
    getattr(comfy.model_prefetch, CLOSE_GRAPH, lambda: None)()
