"""torch.compile switched off for a while, so that a call may read numbers back or watch every operation."""

import sys
from contextlib import AbstractContextManager, nullcontext

import torch

from .patching import SharedScope

# torch's stance is one for the process, and each ``set_stance`` puts back what it found: threads that overlap would
# leave the other's.
_disabled = SharedScope(lambda: torch.compiler.set_stance("force_eager"))


def compile_disabled() -> AbstractContextManager[object]:
    """Run compiled code as plain torch inside, on every thread. Changes nothing before torch 2.6."""
    # torch has ``set_stance`` from 2.6 on. It imports torch._dynamo, which takes seconds; whoever compiled has it.
    can = hasattr(torch.compiler, "set_stance") and "torch._dynamo" in sys.modules
    return _disabled if can else nullcontext()


def plain_name(name: str) -> str:
    """Give a module's name without what torch.compile puts into it."""
    # torch.compile holds the module it compiled as ``_orig_mod`` (torch/_dynamo/eval_frame.py, OptimizedModule).
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")
