"""The report of what really runs: version 1 of the public JSON, and the same as text."""

import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..base.modes import MODES
from ..devices.detect import Device
from ..plan.choice import WithoutEffect
from .report_text import report_text
from .view import MODE_COLOURS, STORAGE_COLOURS, rules_text, view_of

VERSION = 1
Sums = Literal["fp32", "fp16", "fp8_fast"]
EventKind = Literal["overflow", "nan", "weights", "unknown", "input", "saturation", "canary", "drift"]
Verdict = Literal["clean", "recovered", "stopped", "bad_weights", "bad_input", "not_precision", "device_fault"]
JSON_NAMES = {"cls": "class", "from_mode": "from", "to_mode": "to"}


@dataclass
class LayerReport:
    """A layer: the storage of its weight and its arithmetic.

    ``mode``: a name in ``modes.MODES``. ``accumulation``: int8 products are added exactly in int32,
    which is listed as fp32. ``kernel``: for a quantized weight ``native``, a kernel of the device
    for its format; ``eager``, torch's general operations; or ``dequantized``, the weight is
    unpacked and the product runs in ``mode``. ``called_in_fp32``: the model's own code casts its
    input to fp32, which no rule has to repeat.
    """

    name: str
    cls: str
    storage: str
    mode: str
    accumulation: Sums
    stream: str
    reason: str = ""
    kernel: str = ""
    called_in_fp32: bool = field(default=False, metadata={"json": False})


@dataclass
class ModelReport:
    """The model: ``weight_bytes`` as loaded, and the same split by storage name."""

    cls: str = ""
    parameters: int = 0
    weight_bytes: int = 0
    bytes_by_storage: dict[str, int] = field(default_factory=dict)


@dataclass
class KeptHigh:
    """A layer that was not stored in fp8 though fp8 was asked for, and why."""

    name: str
    reason: str


@dataclass
class GuardEvent:
    """A result with NaN or Inf, or farther from fp32 than its arithmetic explains (``kind`` drift,
    with an SNR).

    ``from_mode`` and ``to_mode``: names in ``modes.MODES``; ``evidence``: what the verdict rests
    on; ``fell_back``: the model's plan runs in its fallback from this event on; ``ended``: the
    guard ended the run with this event's error; ``brief``: the event in one line, without sigma,
    operation, magnitude and batch rows.
    """

    call: int
    step: int
    sigma: float
    layer: str
    op: str
    kind: EventKind
    batch_rows: list[int]
    from_mode: str
    to_mode: str
    recovered: bool
    evidence: str = ""
    snr_db: float | None = None
    threshold_db: float | None = None
    advice: str = ""
    fell_back: bool = False
    ended: bool = False
    brief: str = field(default="", metadata={"json": False})


@dataclass
class CheckReport:
    """One call compared with itself in fp32.

    ``snr_db``: None where it was ``left_out``, which says why; ``threshold_db``: what
    ``arithmetic`` gives at least; ``blocks``: ``name`` and ``snr_db`` of the blocks whose results
    are farthest from fp32's, errors of earlier blocks included.
    """

    call: int
    step: int
    sigma: float
    arithmetic: str
    snr_db: float | None = None
    threshold_db: float | None = None
    blocks: list[dict[str, Any]] = field(default_factory=list)
    repeats: int = 0
    left_out: str = ""


@dataclass
class GuardReport:
    """What the guard saw; ``verdict``: of ``guard/verdicts.py``, "off" when no guard is
    attached; ``about``: what the page decides by, of that table."""

    verdict: Verdict | Literal["off"] = "off"
    calls: int = 0
    extra_calls: int = 0
    escalations: dict[str, str] = field(default_factory=dict)
    events: list[GuardEvent] = field(default_factory=list)
    rules: str = ""
    advice: str = ""
    checks: list[CheckReport] = field(default_factory=list)
    about: dict[str, str | bool] = field(default_factory=dict)


@dataclass
class EncoderReport:
    """What the guard of a VAE or text encoder saw in the prompt; ``node``: its id, ``messages``: a
    line per event, ``calls``: those that gave a finite result at once;
    ``about``: as of a model's guard."""

    node: str
    kind: str
    verdict: Verdict = "clean"
    messages: list[str] = field(default_factory=list)
    advice: str = ""
    calls: int = 0
    about: dict[str, str | bool] = field(default_factory=dict)


@dataclass
class ControlReport:
    """A ControlNet of the Load ControlNet node; ``cls``: ComfyUI's class.

    ``calls``: how often it ran; None, without layers, for a kind that ComfyUI runs with custom
    code.
    """

    file: str
    cls: str
    calls: int | None = None
    decisions: dict[str, str] = field(default_factory=dict)
    layers: list[LayerReport] = field(default_factory=list)
    kept_high: list[KeptHigh] = field(default_factory=list)
    without_effect: list[WithoutEffect] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass
class Report:
    """Everything a model's report holds.

    Args:
        flags: setting -> entry of ``flag_report``.
        decisions: file, storage, compute, fp16 work -> what was chosen and why, what was measured.
        ranges: layer -> the largest magnitude it was given so far, of the layers whose inputs are
            watched.
        attention_in_fp32: the blocks whose attention ran in fp32 by a rule.
        file: the name of the model's file; empty where another loader loaded it.
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
    encoders: list[EncoderReport] = field(default_factory=list)
    control_nets: list[ControlReport] = field(default_factory=list)
    attention_in_fp32: list[str] = field(default_factory=list)
    file: str = ""

    def to_json(self) -> dict:
        """Return version 1 of the report, ready for ``json.dumps(allow_nan=False)``. A NaN or inf
        number becomes null.

        Besides the fields: ``modes`` and ``storages``, their labels and colours; ``rules``, lines
        for Layer Rules that repeat what ran; ``view``, see :func:`~.view.view_of`.
        """
        data = {"version": VERSION, **plain(self)}
        modes = {name: {"label": mode.label, "colour": MODE_COLOURS[name]} for name, mode in MODES.items()}
        legends = {"modes": modes, "storages": {name: {"colour": it} for name, it in STORAGE_COLOURS.items()}}
        fixed = {layer.name for layer in self.layers if layer.called_in_fp32}
        return {**data, **legends, "rules": rules_text(data, fixed), "view": view_of(data)}

    def to_text(self) -> str:
        """Write the report as plain text of 80 columns, to paste into an issue."""
        return report_text(self.to_json())


def plain(value):
    """Convert a value to JSON types: walk dataclasses, mappings and sequences, unpack scalars of
    torch and numpy."""
    if hasattr(value, "__dataclass_fields__"):
        written = (item for item in fields(value) if item.metadata.get("json", True))
        return {JSON_NAMES.get(item.name, item.name): plain(getattr(value, item.name)) for item in written}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def device_section(device: Device) -> dict:
    """Make the report's ``device`` entry. ``host``: the machine's network name, to tell the workers
    of one service."""
    return {
        "name": device.name,
        "label": device.label,
        "profile": device.profile.name,
        "simulated": device.simulated,
        "capabilities": dict(device.capabilities),
        "host": platform.node(),
    }
