"""The plan that a model's calls run under, and the wider plans that a failed call is repeated
in."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..base.modes import FP16_WIDE, FP32, MODES, ModeName

STREAM = "residual stream"
WHOLE_MODEL = "whole model"


@dataclass(frozen=True)
class PlanInUse:
    """The arithmetic of a model's calls: as planned, and the parts that run in a wider dtype than
    planned.

    Attributes:
        modes: layer -> planned mode, for layers that multiply.
        dtype: the planned dtype of the values between layers.
        layers: layer -> mode, for layers wider than planned.
        stream: the residual stream (all values between layers) is fp32.
        whole: everything is fp32.
        patches: patches of other nodes that run in fp32, by their names in events.
    """

    modes: Mapping[str, str] = field(default_factory=dict)
    dtype: str = ""
    layers: Mapping[str, ModeName] = field(default_factory=dict)
    stream: bool = False
    whole: bool = False
    patches: frozenset[str] = frozenset()

    def safe(self) -> "PlanInUse":
        """Return the plan that cannot overflow: fp32 between layers, products of fp16 operands
        scaled to fit."""
        return PlanInUse(self.modes, self.dtype, dict.fromkeys(self.modes, FP16_WIDE.name), stream=True)

    def fp32(self) -> "PlanInUse":
        """Return the plan with everything in fp32."""
        return PlanInUse(self.modes, self.dtype, dict.fromkeys(self.modes, FP32.name), whole=True)

    def wider(
        self, layers: Mapping[str, ModeName], stream: bool = False, patches: frozenset[str] = frozenset()
    ) -> "PlanInUse":
        """Return the plan with more parts in a wider dtype."""
        return self | PlanInUse(layers=layers, stream=stream, patches=patches)

    def __or__(self, other: "PlanInUse") -> "PlanInUse":
        """Return the plan with the parts that either plan widens. A layer that both widen has the
        mode nearer to fp32."""
        order = list(MODES).index
        nearer = {layer: max(self.layers.get(layer, mode), mode, key=order) for layer, mode in other.layers.items()}
        layers = {**self.layers, **nearer}
        stream = self.stream or other.stream
        whole = self.whole or other.whole
        return PlanInUse(self.modes, self.dtype, layers, stream, whole, self.patches | other.patches)

    @property
    def is_wider(self) -> bool:
        """True if any part runs in a wider dtype than planned."""
        return bool(self.layers or self.everywhere or self.patches)

    @property
    def everywhere(self) -> bool:
        """True if all values between layers are fp32 although planned otherwise."""
        return self.stream or self.whole

    def exchanged(self) -> dict[str, str]:
        """Return layer -> mode for the layers that do not run under the model's compute plan."""
        modes = {name: self.layers.get(name, mode) for name, mode in self.modes.items()}
        return modes if self.everywhere else {name: modes[name] for name in modes if name in self.layers}

    def named(self) -> dict[str, str]:
        """Return part -> mode for the report: layers and patches, and the residual stream or the
        whole model."""
        if self.whole:
            return {WHOLE_MODEL: FP32.name}
        wide = sorted(self.patches)
        if self.stream:
            wide.append(STREAM)
        return {**self.layers, **dict.fromkeys(wide, FP32.name)}

    def parts(self) -> list[str]:
        """List the names of the wider parts for the page: the model, the stream, or the layers and
        patches."""
        if self.everywhere:
            return [WHOLE_MODEL if self.whole else STREAM]
        return sorted([*self.layers, *self.patches])

    def rules(self) -> str:
        """Return the difference to the planned arithmetic as lines for Layer Rules."""
        if self.whole:
            return "* compute=fp32 stream=fp32"
        lines = ["* stream=fp32"] if self.stream else []
        return "\n".join([*lines, *(f"{layer} {MODES[mode].rule}" for layer, mode in self.layers.items())])
