"""Put Halfsafe's wrappers on a ModelPatcher in one fixed order, wherever their nodes stand in the workflow."""

from collections.abc import Callable

from comfy.patcher_extension import WrappersMP

GUARD = "halfsafe.guard"
REPORT = "halfsafe.report"
ACCUMULATION = "halfsafe.accumulation"
COMPUTE = "halfsafe.compute"
GUARDED_LAYERS = "halfsafe.guard.layers"
ANALYSIS = "halfsafe.analysis"
LOW_RANK = "halfsafe.low_rank"
LOW_RANK_OF_TEXT = "halfsafe.low_rank.text"
PLACES = {
    REPORT: -3,
    LOW_RANK_OF_TEXT: -2,
    GUARD: -1,
    ACCUMULATION: 2,
    COMPUTE: 3,
    GUARDED_LAYERS: 4,
    ANALYSIS: 5,
    LOW_RANK: 6,
}
"""The order of our wrappers around a model's call, from the outermost in; wrappers of others are at 0.

Around a sampler's run, where what is set first runs last (``execution.conditions_through``), the wrapper of LoRAs is
the outermost as it is the innermost here, but for the report, which is made when a run has ended.

The order of wrappers decides the order of a layer's forwards the other way round. Each wrapper patches
``module.forward`` for the length of the call, around the forward it finds, so what an outer wrapper puts on a module
runs inside of what an inner one puts there. Each is behind a gate (``gate.py``) where ComfyUI folds more than an input
into a layer's call: the outermost gate computes what is folded, and all behind it take the plain input. From the
outside in, these run a layer:

0. ``LowRankLayer``, the LoRAs of an 8-bit weight (``lora/low_rank.py``), which calls the next one and adds to its
   result;
1. ``CastResult`` of the guard's escalation (``guard/escalation.py``); it is made outside of the other two and calls
   neither. Else:
2. ``CastResult`` of compute (``PlannedLayers``) around ``SafeOperation`` or ``Fp8Linear``, which multiply by
   themselves, or around ``CastOperation``, which casts the input and calls
3. ``Fp16AccumulationLinear`` of accumulation, so an fp16 bound is checked on the input as it is multiplied; and that
   calls
4. the module's own: ComfyUI's, or one that a LoRA in bypass mode put on the module.

``PlannedLayers`` and accumulation read ``module.forward`` once, when they are made: during a call, inside of the
wrappers around them. When a forward below is exchanged later, ``per_model.PerModel`` finds another state and makes
another run.

A wrapper that another node adds after the last of ours stands innermost (``WrapperExecutor`` in ComfyUI's
``comfy/patcher_extension.py`` calls wrappers in the order of the dict).
"""


def set_wrapper(patcher, key: str, wrapper: Callable, kind: str = WrappersMP.APPLY_MODEL) -> None:
    """Put a wrapper of ours on a patcher, in place of an earlier one with that key, and sort all by ``PLACES``."""
    patcher.remove_wrappers_with_key(kind, key)
    patcher.add_wrapper_with_key(kind, key, wrapper)
    around = patcher.wrappers.get(kind, {})
    for name in sorted(around, key=lambda name: PLACES.get(name, 0)):
        around[name] = around.pop(name)
