"""Decide what runs in higher precision after a repeat that was finite. Nothing here runs a model.

A repeat in ``fp16_safe`` (fp16 matmul operands, everything else fp32) cannot overflow and shows the amax of every
layer; later calls upcast only the layers that need it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from ..base.dtypes import FP16_MAX
from ..base.modes import FP16, FP16_WIDE, FP32, MODES, ModeName, modes_named
from .localize import Origin

OnNan = Literal["retry_higher", "stop", "report", "off"]
OFF: Final = "off"
ON_NAN: tuple[OnNan, ...] = get_args(OnNan)[:-1]
"""What a guard can do: all but ``OFF``."""
LIMIT = FP16_MAX / 2
STREAM = "residual stream"
WHOLE_MODEL = "whole model"
EVENT = "halfsafe.guard"


@dataclass(frozen=True)
class Escalation:
    """What runs wider than the model would by itself.

    Args:
        layers: layer -> mode it runs in.
        stream: all values between layers are fp32.
        whole: everything is fp32.
    """

    layers: Mapping[str, ModeName] = field(default_factory=dict)
    stream: bool = False
    whole: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers or self.everywhere)

    def __or__(self, other: "Escalation") -> "Escalation":
        """Merge what runs wider in either: of a layer that both name, the mode that is nearer to fp32."""
        order = list(MODES).index
        nearer = {layer: max(self.layers.get(layer, mode), mode, key=order) for layer, mode in other.layers.items()}
        return Escalation({**self.layers, **nearer}, self.stream or other.stream, self.whole or other.whole)

    @property
    def everywhere(self) -> bool:
        """Tell whether all values between layers are fp32."""
        return self.stream or self.whole

    def named(self) -> dict[str, str]:
        """Return what the report lists: layers with their modes, and the stream or the model as a whole."""
        if self.whole:
            return {WHOLE_MODEL: FP32.name}
        return {**self.layers, STREAM: FP32.name} if self.stream else dict(self.layers)

    def parts(self) -> list[str]:
        """List what the page names: the model, the stream, or the layers."""
        if self.everywhere:
            return [WHOLE_MODEL if self.whole else STREAM]
        return sorted(self.layers)

    def rules(self) -> str:
        """Write the same as lines for Layer Rules, for a model that is given to Compute Dtype."""
        if self.whole:
            return "* compute=fp32 stream=fp32"
        lines = ["* stream=fp32"] if self.stream else []
        return "\n".join([*lines, *(f"{layer} {MODES[mode].rule}" for layer, mode in self.layers.items())])


ALL_IN_FP32 = Escalation(whole=True)


def safe_escalation(modes: Mapping[str, str]) -> Escalation:
    """Return the escalation that cannot overflow: fp32 between layers, products with fp16 operands scaled to fit."""
    return Escalation(dict.fromkeys(modes, FP16_WIDE.name), stream=True)


def escalation_after(
    repeat: Escalation,
    present: Escalation,
    largest: Mapping[str, float],
    origin: Origin | None,
    modes: Mapping[str, str],
) -> Escalation:
    """Decide what runs wider from now on, after ``repeat`` gave a finite result.

    A repeat with nothing in fp16 but the operands of products has shown the largest values. If one of them passes half
    of fp16's range, or if no magnitude explains the failure, all values between layers become fp32. A layer whose own
    values all fit fp16 fails by its sums or its 8-bit operands: that layer alone is widened.

    Args:
        repeat: the escalation of the finite repeat.
        present: the escalation the call failed in.
        largest: layer or top-level part -> the largest magnitude of its inputs and results in the repeat.
        modes: layer -> mode so far, of those that multiply.
    """
    if repeat.whole:
        return ALL_IN_FP32
    too_large = {name for name, size in largest.items() if size > LIMIT}
    wide = {name: FP16_WIDE.name for name in modes if name in too_large}
    if origin and origin.multiplies and origin.layer in modes and origin.layer not in wide:
        lowered = any(mode.sums_in_fp16 or mode.is_8bit for mode in modes_named([modes[origin.layer]]))
        wide[origin.layer] = (FP16 if lowered else FP16_WIDE).name
    grown = Escalation({**present.layers, **wide}, present.stream or bool(too_large) or not wide)
    if grown != present:
        return grown
    return Escalation(grown.layers, stream=True, whole=present.stream)
