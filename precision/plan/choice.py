"""Settings as asked for and as resolved, and what one load came to: kept with the model, read by the report."""

from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

ATTACHMENT = "halfsafe"
"""The key of a loaded model's :class:`LoadRecord` in ComfyUI's ``attachments``."""
Value = TypeVar("Value")
Option = TypeVar("Option", bound=str)


def frozen(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return a copy of a mapping that cannot be changed."""
    return MappingProxyType(dict(values))


@dataclass(frozen=True)
class Choice(Generic[Option]):
    """A setting as asked for, as resolved on this device, and why."""

    requested: Option
    used: Option
    reason: str = ""

    def __str__(self) -> str:
        asked = "" if self.requested == self.used else f" (asked: {self.requested})"
        return f"{self.used}{asked}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class WithoutEffect:
    """A setting that cannot act on a model here, and why.

    Attributes:
        setting: as it is written: ``tf32=on``, or a line of the rules.
        unmatched: it is a rule whose pattern matches no layer.
    """

    setting: str
    reason: str
    unmatched: bool = field(default=False, metadata={"json": False})


@dataclass(frozen=True)
class LoadRecord:
    """One load.

    Attributes:
        reasons: layer name -> why it is stored as it is.
        kept: layer name -> why it is not in fp8 though fp8 was asked for.
        asked: layer name -> the storage that was decided, for the layers that are not left as in the file.
        native_fp8: as of :class:`~halfsafe.precision.plan.facts.ModelFacts`.
        below_16_bit: the bytes that the file's quantized weights take less than in 16 bit.
    """

    file: str
    dialects: tuple[str, ...]
    storage: Choice
    reasons: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    without_effect: tuple[WithoutEffect, ...] = ()
    notes: tuple[str, ...] = ()
    native_fp8: Container[str] = frozenset()
    below_16_bit: int = 0
