"""Decide what runs in higher precision after a repeat that was finite. Nothing here runs a model.

A repeat in ``fp16_safe`` (fp16 matmul operands, everything else fp32) cannot overflow and shows the amax of every
layer; later calls upcast only the layers that need it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """The parts of a model that run in a wider dtype than planned.

    Args:
        layers: layer -> mode.
        patches: patches of other nodes that run in fp32, by their names in events.
        stream: the residual stream (all values between layers) is fp32.
        whole: everything is fp32.
    """

    layers: Mapping[str, ModeName] = field(default_factory=dict)
    stream: bool = False
    whole: bool = False
    patches: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.layers or self.everywhere or self.patches)

    def __or__(self, other: "Escalation") -> "Escalation":
        """Return the union. A layer that both name gets the mode nearer to fp32."""
        order = list(MODES).index
        nearer = {layer: max(self.layers.get(layer, mode), mode, key=order) for layer, mode in other.layers.items()}
        stream, whole = self.stream or other.stream, self.whole or other.whole
        return Escalation({**self.layers, **nearer}, stream, whole, self.patches | other.patches)

    @property
    def everywhere(self) -> bool:
        """True if all values between layers are fp32."""
        return self.stream or self.whole

    def named(self) -> dict[str, str]:
        """Return part -> mode for the report: layers and patches, and the residual stream or the whole model."""
        if self.whole:
            return {WHOLE_MODEL: FP32.name}
        wide = sorted(self.patches)
        if self.stream:
            wide.append(STREAM)
        return {**self.layers, **dict.fromkeys(wide, FP32.name)}

    def parts(self) -> list[str]:
        """List the names of the parts for the page: the model, the stream, or the layers and patches."""
        if self.everywhere:
            return [WHOLE_MODEL if self.whole else STREAM]
        return sorted([*self.layers, *self.patches])

    def rules(self) -> str:
        """Return the escalation as lines for Layer Rules."""
        if self.whole:
            return "* compute=fp32 stream=fp32"
        lines = ["* stream=fp32"] if self.stream else []
        return "\n".join([*lines, *(f"{layer} {MODES[mode].rule}" for layer, mode in self.layers.items())])


ALL_IN_FP32 = Escalation(whole=True)


def safe_escalation(modes: Mapping[str, str]) -> Escalation:
    """Return the escalation that cannot overflow: fp32 between layers, products of fp16 operands scaled to fit."""
    return Escalation(dict.fromkeys(modes, FP16_WIDE.name), stream=True)


def escalation_after(
    repeat: Escalation,
    present: Escalation,
    largest: Mapping[str, float],
    origin: Origin | None,
    modes: Mapping[str, str],
) -> Escalation:
    """Return the escalation of later calls after a repeat with escalation ``repeat`` was finite.

    A repeat with patches in fp32 changed nothing else. Any other repeat had fp16 operands of products and nothing else
    in fp16, so it shows every amax. If one exceeds half of
    fp16's range, or if no magnitude explains the failure, all values between layers become fp32. A layer whose values
    all fit fp16 failed by its sums or its 8-bit operands: that layer alone is widened.

    Args:
        repeat: the escalation of the finite repeat.
        present: the escalation the call failed in.
        largest: layer or top-level part -> amax of its inputs and results in the repeat.
        origin: the operation that failed; None if unknown.
        modes: layer -> mode of the failed call, for layers that multiply.
    """
    if repeat.whole:
        return ALL_IN_FP32
    if repeat.patches:
        return repeat
    too_large = {name for name, size in largest.items() if size > LIMIT}
    wide = {name: FP16_WIDE.name for name in modes if name in too_large}
    if origin and origin.multiplies and origin.layer in modes and origin.layer not in wide:
        lowered = any(mode.sums_in_fp16 or mode.is_8bit for mode in modes_named([modes[origin.layer]]))
        wide[origin.layer] = (FP16 if lowered else FP16_WIDE).name
    stream = present.stream or bool(too_large) or not wide
    grown = replace(present, layers={**present.layers, **wide}, stream=stream)
    return grown if grown != present else replace(grown, stream=True, whole=present.stream)
