"""The decisions on one layer of a model: its storage, its arithmetic, and the reason of each."""

from dataclasses import dataclass, replace
from typing import Final, Literal

from ..base.modes import ModeName
from ..base.options import RuledSums, Stream
from ..files.safetensors_header import TensorSpec

AS_FILE: Final = "as_file"


@dataclass(frozen=True)
class LayerPlan:
    """The plan of a layer; also of a tensor that is no layer's weight, which has no arithmetic.

    Attributes:
        storage: the storage to convert the weight to; ``as_file`` if the weight is not converted.
        why_stored: why ``storage`` is not the storage requested for the model; empty if it is.
        kept: a rule or the layer's class kept the weight from 8 bits although requested.
        quantizable: ComfyUI's module for this layer can hold a quantized weight.
        asked: the storage that the option and the rules request, before the tensor was looked at.
        note: why the tensor is not stored as ``asked``; empty if it is.
        stored: the storage of the weight after conversion.
        declared: the weight has a ``comfy_quant`` then: ComfyUI holds it quantized.
        changes: the values or the scale differ from the source.
        again: the quantized storage whose numbers are rounded once more; empty for a weight that keeps its numbers, or
            was not quantized.
        specs: the tensors that hold the weight.
        mode: the arithmetic of the layer; empty if the layer computes in the dtype of the model.
        stream: the dtype of the result: ``fp32``, or ``same`` as the input.
        sums: the accumulation dtype that a rule sets, which overrides the Accumulation node; empty without such a rule.
        reason: why the layer has this arithmetic.
    """

    storage: str = AS_FILE
    why_stored: str = ""
    kept: bool = False
    quantizable: bool = False
    asked: str = AS_FILE
    note: str = ""
    stored: str = ""
    declared: bool = False
    changes: bool = False
    again: str = ""
    specs: tuple[TensorSpec, ...] = ()
    mode: ModeName | Literal[""] = ""
    stream: Stream = "same"
    sums: RuledSums | Literal[""] = ""
    reason: str = ""

    def with_arithmetic(self, other: "LayerPlan") -> "LayerPlan":
        """Return the plan with the arithmetic of another one."""
        return replace(self, mode=other.mode, stream=other.stream, sums=other.sums, reason=other.reason)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors that hold the weight."""
        return sum(spec.bytes for spec in self.specs)
