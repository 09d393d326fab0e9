"""The order of our wrappers around a model's call, in whatever order their nodes stand in the workflow."""

from comfy.patcher_extension import WrappersMP

OUTERMOST = "halfsafe.guard"
INNERMOST = ("halfsafe.accumulation", "halfsafe.compute", "halfsafe.guard.layers")


def order_wrappers(patcher) -> None:
    """The guard's check is around everything; a layer that compute casts meets its sums' bound in the dtype it
    multiplies in; what the guard widens is widened last."""
    wrappers = patcher.wrappers.get(WrappersMP.APPLY_MODEL, {})
    for key in INNERMOST:
        if key in wrappers:
            wrappers[key] = wrappers.pop(key)
    if OUTERMOST in wrappers:
        others = {key: value for key, value in wrappers.items() if key != OUTERMOST}
        guard = wrappers[OUTERMOST]
        wrappers.clear()
        wrappers |= {OUTERMOST: guard, **others}
