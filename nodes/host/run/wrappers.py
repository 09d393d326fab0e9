"""Our wrappers on a ModelPatcher, and their order around a model's call, however their nodes stand in the workflow."""

from collections.abc import Callable

from comfy.patcher_extension import WrappersMP

GUARD = "halfsafe.guard"
ACCUMULATION = "halfsafe.accumulation"
COMPUTE = "halfsafe.compute"
GUARDED_LAYERS = "halfsafe.guard.layers"
PLACES = {GUARD: -1, ACCUMULATION: 1, COMPUTE: 2, GUARDED_LAYERS: 3}
"""From the outermost to the innermost; those of others are at 0.

The guard's check is around everything; a layer that compute casts meets its sums' bound in the dtype it multiplies in; what
the guard widens is widened last.
"""


def set_wrapper(patcher, key: str, wrapper: Callable, kind: str = WrappersMP.APPLY_MODEL) -> None:
    """Put a wrapper of ours on a patcher, in the place of an earlier one with that key."""
    patcher.remove_wrappers_with_key(kind, key)
    patcher.add_wrapper_with_key(kind, key, wrapper)
    around = patcher.wrappers.get(WrappersMP.APPLY_MODEL, {})
    for name in sorted(around, key=lambda name: PLACES.get(name, 0)):
        around[name] = around.pop(name)
