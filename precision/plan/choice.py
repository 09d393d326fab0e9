"""Requested and resolved settings, and settings that have no effect."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, TypeVar

from ..base.message import Message, joined

ATTACHMENT = "halfsafe"
"""The key of a loaded model's :class:`~halfsafe.precision.plan.load.ModelPlan` in ComfyUI's
``attachments``."""
Value = TypeVar("Value")
Option = TypeVar("Option", bound=str)


def frozen(values: Mapping[str, Value]) -> Mapping[str, Value]:
    """Return a copy of a mapping that cannot be changed."""
    return MappingProxyType(dict(values))


@dataclass(frozen=True)
class Choice(Generic[Option]):
    """A setting as requested, as resolved on this device, and the reason."""

    requested: Option
    used: Option
    reason: str = ""

    def __str__(self) -> str:
        used = self.used if self.requested == self.used else Message("{0} (asked: {1})", self.used, self.requested)
        return joined([used, self.reason], ": ")


@dataclass(frozen=True)
class WithoutEffect:
    """A setting that has no effect on a model here, and the reason.

    Attributes:
        setting: the setting as written: ``tf32=on``, or a line of the rules.
        unmatched: the setting is a rule whose pattern matches no layer.
    """

    setting: str
    reason: str
    unmatched: bool = field(default=False, metadata={"json": False})
