"""What was decided when a model was loaded: kept with the model, read by the report."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Choice:
    """A setting as asked for, as resolved on this device, and why."""

    requested: str
    used: str
    reason: str = ""

    def __str__(self) -> str:
        asked = "" if self.requested == self.used else f" (asked: {self.requested})"
        return f"{self.used}{asked}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class LoadRecord:
    """One load. ``reasons``, ``kept`` and ``asked`` (the storage a rule names) are keyed by layer name.

    ``without_effect`` holds (setting, reason).
    """

    file: str
    dialect: str
    storage: Choice
    reasons: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    asked: dict[str, str] = field(default_factory=dict)
    without_effect: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
