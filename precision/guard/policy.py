"""Decide what runs in higher precision after a repeat that was finite. Nothing here runs a model.

A repeat in ``fp16_safe`` (fp16 matmul operands, everything else fp32) cannot overflow and shows the
amax of every layer; later calls upcast only the layers that need it.
"""

from collections.abc import Mapping
from typing import Final, Literal, get_args

from ..base.dtypes import FP16_MAX
from ..base.modes import FP16, FP16_WIDE, ModeName, modes_named
from ..plan.in_use import PlanInUse
from .localize import Origin

OnNan = Literal["retry_higher", "stop", "report", "off"]
OFF: Final = "off"
ON_NAN: tuple[OnNan, ...] = get_args(OnNan)[:-1]
"""What a guard can do: all but ``OFF``."""
LIMIT = FP16_MAX / 2
EVENT = "halfsafe.guard"


def plan_after(repeat: PlanInUse, present: PlanInUse, largest: Mapping[str, float], origin: Origin | None) -> PlanInUse:
    """Return the plan of later calls after a repeat under the plan ``repeat`` was finite.

    A repeat with patches in fp32 changed nothing else. Any other repeat had fp16 operands of
    products and nothing else in fp16, so it shows every amax. If one exceeds half of
    fp16's range, or if no magnitude explains the failure, all values between layers become fp32. A
    layer whose values all fit fp16 failed by its sums or its 8-bit operands: that layer alone is
    widened.

    Args:
        repeat: the plan of the finite repeat.
        present: the plan that the call failed in.
        largest: layer or top-level part -> amax of its inputs and results in the repeat.
        origin: the operation that failed; None if unknown.
    """
    if repeat.whole or repeat.patches:
        return repeat
    modes = present.modes
    too_large = {name for name, size in largest.items() if size > LIMIT}
    wide: dict[str, ModeName] = {name: FP16_WIDE.name for name in modes if name in too_large}
    if origin and origin.multiplies and origin.layer in modes and origin.layer not in wide:
        lowered = any(mode.sums_in_fp16 or mode.is_8bit for mode in modes_named([modes[origin.layer]]))
        wide[origin.layer] = (FP16 if lowered else FP16_WIDE).name
    grown = present.wider(wide, stream=bool(too_large) or not wide)
    if grown == present:
        return present.fp32() if present.stream else present.wider({}, stream=True)
    return grown
