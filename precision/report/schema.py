"""One report of what really runs: version 1 of the public JSON, and the same as text and as a picture."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePath

import torch

from ..arithmetic import flags
from ..devices.detect import Device
from ..dtypes import name_of
from ..plan.accumulation import PARTS
from .chart import chart
from .text import report_text

__all__ = [
    "MODES", "VERDICTS", "GuardEvent", "GuardReport", "KeptHigh", "LayerReport", "ModelReport", "Report",
    "WithoutEffect", "chart", "device_section", "flag_report", "flag_reports",
]  # fmt: skip

VERSION = 1
MODES = ("fp8", "int8", "fp16_acc16", "fp16", "fp16_wide", "fp16_scaled", "bf16", "fp32")
VERDICTS = (
    "clean", "recovered", "stopped", "bad_weights", "bad_input", "not_precision", "device_fault", "off",
)  # fmt: skip

JSON_NAMES = {"cls": "class", "from_mode": "from", "to_mode": "to"}
PART_NAMES = {
    "fp16_accumulation": "matmul", "fp16_reduced_precision_reduction": "fp16", "bf16_reduced_precision_reduction": "bf16",
    "tf32_matmul": "matmul", "tf32_convolution": "convolution",
}  # fmt: skip
NO_NODE = "No accumulation node is attached."


@dataclass
class LayerReport:
    """One layer: where its weight is kept and how it runs. ``mode`` is one of ``MODES``."""

    name: str
    cls: str
    storage: str
    mode: str
    accumulation: str
    stream: str
    reason: str = ""


@dataclass
class ModelReport:
    """The model: ``weight_bytes`` as loaded, and the same split by storage name."""

    cls: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    bytes_by_storage: dict[str, int] = field(default_factory=dict)


@dataclass
class WithoutEffect:
    """A setting that cannot act here, and why."""

    setting: str
    reason: str


@dataclass
class KeptHigh:
    """A layer that was not stored in fp8 though fp8 was asked for, and why."""

    name: str
    reason: str


@dataclass
class GuardEvent:
    """One non-finite result. ``kind``: overflow, nan ...; ``from_mode`` and ``to_mode`` are of ``MODES``."""

    call: int
    step: int
    sigma: float
    layer: str
    op: str
    kind: str
    batch_rows: list[int]
    from_mode: str
    to_mode: str
    recovered: bool


@dataclass
class GuardReport:
    """What the guard saw; ``verdict`` is one of ``VERDICTS``, "off" when no guard is attached.

    ``rules``: the escalations as lines for Layer Rules. ``advice``: what to do.
    """

    verdict: str = "off"
    calls: int = 0
    extra_calls: int = 0
    escalations: dict[str, str] = field(default_factory=dict)
    events: list[GuardEvent] = field(default_factory=list)
    rules: str = ""
    advice: str = ""


@dataclass
class Report:
    """Everything one model's report holds.

    Args:
        device: from ``device_section``.
        flags: setting -> entry of ``flag_report``.
        decisions: file, storage, compute, fp16 work -> one line each: what was chosen and why, what was measured.
        notes: what was repaired or assumed, and what may go wrong.
        ranges: layer -> the largest magnitude it was given so far, of the layers whose inputs are watched.
    """

    device: dict = field(default_factory=dict)
    model: ModelReport = field(default_factory=ModelReport)
    layers: list[LayerReport] = field(default_factory=list)
    flags: dict[str, dict] = field(default_factory=dict)
    without_effect: list[WithoutEffect] = field(default_factory=list)
    kept_high: list[KeptHigh] = field(default_factory=list)
    guard: GuardReport = field(default_factory=GuardReport)
    decisions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    ranges: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict:
        """Version 1 of the report, ready for ``json.dumps(allow_nan=False)``. A NaN or inf number becomes null."""
        return {"version": VERSION, **plain(self)}

    def to_text(self) -> str:
        """The report as plain text, 100 columns: what a person pastes into an issue."""
        return report_text(self.to_json())


def plain(value):
    """A value as JSON types: dataclasses, mappings and sequences are walked, scalars of torch and numpy unpacked."""
    if hasattr(value, "__dataclass_fields__"):
        return {JSON_NAMES.get(item.name, item.name): plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    return _plain_scalar(value)


def _plain_scalar(value):
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, torch.dtype):
        return name_of(value)
    if isinstance(value, (torch.device, PurePath)):
        return str(value)
    return value


def device_section(device: Device) -> dict:
    """The report's ``device`` entry."""
    return {
        "name": device.name,
        "profile": device.profile.name,
        "simulated": device.simulated,
        "capabilities": dict(device.capabilities),
    }


def flag_report(setting: str, requested: str = "unchanged", reason: str = NO_NODE, in_scope: bool | None = None) -> dict:
    """The report's entry for one accumulation setting, from torch's present flags; nothing is changed.

    Args:
        setting: fp16_accumulation, reduced_precision_reduction, tf32 or fp8_fast_accumulation.
        requested: what the workflow asked for.
        reason: why it is as it is.
        in_scope: what it is while the model runs; None where that is what it is outside.

    Returns:
        ``requested``, ``in_scope``, ``outside`` and ``reason``. The states are true when any part of the setting is on,
        null when torch has no such flag.
    """
    parts = {PART_NAMES[name]: flags.outside(name) for name in PARTS[setting]}
    known = [on for on in parts.values() if on is not None]
    value = any(known) if known else None
    if setting == "fp8_fast_accumulation":
        value = False
    inside = value if in_scope is None or value is None else in_scope
    return {"requested": requested, "in_scope": inside, "outside": value, "reason": _with_parts(reason, setting, parts)}


def _with_parts(reason: str, setting: str, parts: dict[str, bool | None]) -> str:
    if setting == "fp8_fast_accumulation":
        return f"{reason} It is no torch flag but an argument of each fp8 matmul, off unless asked for."
    missing = f"; torch {torch.__version__} has no such flag" if None in parts.values() else ""
    if len(parts) == 1 and not missing:
        return reason
    states = [f"{part} {_on_off(on)}" for part, on in parts.items()]
    return f"{reason} Outside: {', '.join(states)}{missing}.".strip()


def _on_off(value: bool | None) -> str:
    return "not known" if value is None else "on" if value else "off"


def flag_reports() -> dict[str, dict]:
    """An entry for every setting when no accumulation node is attached."""
    return {setting: flag_report(setting) for setting in PARTS}
