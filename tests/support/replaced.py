"""ComfyUI's own code replaced by a pack's, as a decorator of the pack leaves it."""

from __future__ import annotations

import functools
from collections.abc import Callable


def of_pack(counted: list, own: Callable) -> Callable:
    """A pack's function in place of ``own``, with its name and module, as ``functools.wraps`` gives them; each call adds to ``counted``."""

    def replaced(*args, **kwargs):
        counted.append(1)
        return own(*args, **kwargs)

    replaced.__code__ = replaced.__code__.replace(co_filename="/custom_nodes/replacing/nodes.py")
    return functools.wraps(own)(replaced)
