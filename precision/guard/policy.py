"""The guard's decisions: what runs wider after a non-finite result, what is said about it, and what to try.

Nothing here runs a model. A call that failed is repeated with everything in fp32 but the operands of products
(``fp16_safe``), which cannot overflow and shows how large every value really is; from then on only what must be is wider.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..dtypes import FP16_MAX
from ..errors import HalfsafeError
from ..modes import FP16, FP16_WIDE, FP32, MODES, modes_named
from ..report.schema import GuardEvent, GuardReport
from .localize import Origin

ON_NAN = ("retry_higher", "stop", "report")
LIMIT = FP16_MAX / 2
STREAM = "residual stream"
WHOLE = "whole model"
EVENT = "halfsafe.guard"
CURED = ("clean", "recovered")
ADVICE = {
    "recovered": "Nothing to do. The rules in the report make the next run start that way.",
    "stopped": "Set on_nan to retry_higher, or put Compute Dtype with fp16_safe (or bf16, where the device has it) before the sampler.",
    "bad_weights": "Get the file again or leave it out: no precision repairs a weight that is NaN or Inf.",
    "bad_input": "Look at the node that made it; Check Finite behind that node names the first one that is not finite.",
    "not_precision": "No dtype cures this: try another sampler or scheduler, more steps, a lower cfg.",
    "device_fault": (
        "The device or its driver gave a wrong result, not the model: try another driver or torch, "
        "--disable-dynamic-vram, --disable-async-offload, or a device that is not overclocked."
    ),
}

COMPILED = (
    "torch.compile runs this model, and without it the same call is finite: leave the compile node out, or compile with "
    "another backend. Otherwise it is the device or its driver."
)
NO_MEMORY = (
    "There was not enough memory to repeat it in a higher precision: put Compute Dtype with fp16_safe (or bf16, where the "
    "device has it) before the sampler, or take a smaller picture or batch."
)


class NonFinite(HalfsafeError):
    """A model, VAE or text encoder gave NaN or Inf, and the run was stopped.

    Args:
        verdict: of the report's verdicts.
    """

    def __init__(self, problem: str, verdict: str, advice: str = ""):
        super().__init__(f"{problem} Verdict: {verdict}.", advice or ADVICE[verdict])
        self.verdict = verdict


@dataclass(frozen=True)
class Escalation:
    """What runs wider than the model would by itself.

    Args:
        layers: layer -> mode it runs in.
        spans: the top-level parts of the model whose values between layers are fp32; they return the stream's dtype.
        stream: all values between layers are fp32.
        whole: everything is fp32.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    spans: frozenset[str] = frozenset()
    stream: bool = False
    whole: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers or self.spans or self.stream or self.whole)

    def named(self) -> dict[str, str]:
        """What the report lists: layers with their modes, or the span, stream or model as a whole."""
        if self.whole:
            return {WHOLE: FP32.name}
        parts = {STREAM: FP32.name} if self.stream else {span: FP32.name for span in self.spans if not self._has_layer_in(span)}
        return {**self.layers, **parts}

    def _has_layer_in(self, span: str) -> bool:
        return any(layer == span or layer.startswith(f"{span}.") for layer in self.layers)

    def rules(self) -> str:
        """The same as lines for Layer Rules, for a model that is given to Compute Dtype."""
        if self.whole:
            return "* compute=fp32 stream=fp32"
        inner = sorted(self.spans - self.layers.keys())
        lines = ["* stream=fp32"] if self.stream else [f"{span}.* stream=fp32" for span in inner]
        return "\n".join([*lines, *(f"{layer} {MODES[mode].rule} stream=fp32" for layer, mode in self.layers.items())])


@dataclass(frozen=True)
class Seen:
    """What a call in which nothing could overflow has shown: the largest magnitudes.

    Args:
        layers: layer -> the larger of its largest input and result.
        spans: top-level part -> its largest result.
        attention: the top-level parts with an attention whose bound passes fp16's range.
    """

    layers: Mapping[str, float] = field(default_factory=dict)
    spans: Mapping[str, float] = field(default_factory=dict)
    attention: frozenset[str] = frozenset()


def escalate(present: Escalation, seen: Seen, origin: Origin | None, modes: Mapping[str, str]) -> Escalation:
    """The escalation after a failed call that came out finite with nothing in fp16 but the operands of products.

    A layer is made wide if a value it met passes half of fp16's range; if a value between the top-level parts does, the
    stream is. Where no magnitude explains the failure, the part it happened in is widened, then the stream, then all.

    Args:
        modes: layer -> mode so far, of those that multiply.
    """
    wide = {name: FP16_WIDE.name for name, size in seen.layers.items() if size > LIMIT}
    culprit = origin.layer if origin else ""
    if culprit in modes and origin.multiplies and culprit not in wide:
        wide[culprit] = _relieved(modes[culprit])
    spans = {span for span in (span_of(name, seen.spans) for name in [*wide, culprit]) if span}
    if origin and "attention" in origin.op:
        spans |= seen.attention
    grown = Escalation(
        {**present.layers, **wide},
        present.spans | spans,
        present.stream or any(size > LIMIT for size in seen.spans.values()) or not (wide or spans),
        present.whole,
    )
    if grown != present:
        return grown
    return Escalation(grown.layers, grown.spans, True, present.stream)


def escalate_to_fp32(present: Escalation, origin: Origin | None, modes: Mapping[str, str], spans) -> Escalation:
    """The escalation after a failed call that only fp32 cured: the part it happened in, else everything."""
    span = span_of(origin.layer, spans) if origin else ""
    if not span or span in present.spans:
        return Escalation(whole=True)
    inside = {name: FP32.name for name in modes if span_of(name, [span])}
    return Escalation({**present.layers, **inside}, present.spans | {span}, present.stream)


def _relieved(mode: str) -> str:
    """The mode of a layer that overflowed though all its values fit fp16: it is its sums or its 8-bit operands that do not."""
    lowered = any(known.sums_in_fp16 or known.is_8bit for known in modes_named([mode]))
    return (FP16 if lowered else FP16_WIDE).name


def span_of(layer: str, spans) -> str:
    """The top-level part a module is in; empty where it is in none."""
    inside = (span for span in spans if layer == span or layer.startswith(f"{span}."))
    return max(inside, key=len, default="")


@dataclass
class Where:
    """The call that failed: its place in the sampler's run, and which of the batch's images it spoils."""

    call: int
    step: int
    sigma: float
    batch_rows: list[int]
    images: int = 1

    @property
    def spoils_all(self) -> bool:
        return len(self.batch_rows) >= self.images


@dataclass
class GuardLog:
    """What the guard saw of one model in one prompt. ``given_up``: nothing cures this run, so no call is repeated."""

    prompt: str | None = None
    calls: int = 0
    extra_calls: int = 0
    verdict: str = "clean"
    events: list[GuardEvent] = field(default_factory=list)
    advice: str = ""
    given_up: bool = False

    def add(self, event: GuardEvent, verdict: str, advice: str = "") -> None:
        """Note an event. A verdict is never replaced by a milder one of the same run."""
        self.events.append(event)
        if self.verdict in CURED:
            self.verdict, self.advice = verdict, advice or ADVICE[verdict]

    def report(self, escalation: Escalation) -> GuardReport:
        return GuardReport(
            self.verdict, self.calls, self.extra_calls, escalation.named(), list(self.events), escalation.rules(), self.advice
        )


def event_of(where: Where, origin: Origin | None, from_mode: str, to_mode: str, recovered: bool) -> GuardEvent:
    """The report's entry for one failed call."""
    layer, op, kind = (origin.layer, origin.op, origin.kind) if origin else ("", "", "unknown")
    kind = "saturation" if origin and origin.hidden else kind
    return GuardEvent(where.call, where.step, where.sigma, layer, op, kind, where.batch_rows, from_mode, to_mode, recovered)


def sentence(event: GuardEvent, origin: Origin | None) -> str:
    """One line on an event, for the log, the page and errors."""
    op = f" ({event.op})" if event.op and event.op != event.layer else ""
    what = {"saturation": "values past fp16's range were clamped by the model's own code", "weights": "a weight is not finite"}
    place = f"in {event.layer or 'the model'}{op}"
    cause = what.get(event.kind, "the result became NaN or Inf")
    given = f", largest input {origin.largest:.4g}" if origin and origin.largest == origin.largest else ""
    rows = f", batch rows {', '.join(map(str, event.batch_rows))}" if event.batch_rows else ""
    line = f"Step {event.step}, sigma {event.sigma:.4g}: {cause} {place}, computed in {event.from_mode}{given}{rows}."
    return f"{line} Repeated in {event.to_mode}: finite." if event.recovered else line


def random_state_kept():
    """A context that leaves torch's random numbers as they were, on the CPU and the devices in use."""
    return torch.random.fork_rng(range(torch.cuda.device_count()) if torch.cuda.is_initialized() else [])
