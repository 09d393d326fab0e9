"""Which layers of a model survive which precision, measured on the model's own calls.

Each layer is measured by itself: the error of its weight, and the error of its output on inputs it met in real calls.
Then layers are taken in order of damage per byte, and every choice is tried end to end on the same calls. Segments that
fail are halved, as ``onnxconverter_common.auto_convert_mixed_precision`` does it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..arithmetic.linear import Weights
from ..arithmetic.patching import Patch, patched
from ..errors import HalfsafeError
from .candidates import Candidate
from .measure import Measure, Probe, decibels, weight_error
from .search import MAX_TRIALS, Search, group_of

CHOSEN, KEPT, PINNED, BARRED, UNUSED = "chosen", "kept", "pinned", "not possible", "never ran"


@dataclass(frozen=True)
class Subject:
    """One layer. ``role``: what makes it sensitive, if it is; ``barred``: why the candidate cannot act on it."""

    name: str
    cls: str
    module: torch.nn.Module
    role: str = ""
    barred: str = ""


@dataclass
class LayerResult:
    """What was found of one layer. dB figures are signal to noise ratios; None where nothing was measured.

    ``output_db``: of its output as a whole; ``channel_db``: the mean over its output channels, each by itself, which
    shows an error that larger channels hide. ``size``: parameters. ``work``: products of one run of all calls.
    ``sensitive``: the default preset keeps it.
    """

    name: str
    cls: str
    size: int
    status: str
    reason: str = ""
    weight_db: float | None = None
    output_db: float | None = None
    channel_db: float | None = None
    work: int = 0
    sensitive: bool = False

    @property
    def worst_db(self) -> float | None:
        return None if self.output_db is None else min(self.output_db, self.channel_db)


@dataclass
class Analysis:
    """The outcome. ``snr_db``: end to end, with the ``chosen`` layers, the worst of the calls; inf for no error.

    ``all_db``: the same with all ``all_count`` layers that are not sensitive. ``calls``: model calls made, of them ``reference_calls``
    unchanged. ``complete``: the search ended by itself, not by its bound on trials.
    """

    candidate: Candidate
    target_db: float
    layers: list[LayerResult] = field(default_factory=list)
    snr_db: float = math.inf
    all_db: float = math.inf
    all_count: int = 0
    trials: int = 0
    calls: int = 0
    reference_calls: int = 0
    complete: bool = True

    def named(self, status: str) -> list[LayerResult]:
        return [layer for layer in self.layers if layer.status == status]

    @property
    def chosen(self) -> list[LayerResult]:
        return self.named(CHOSEN)


class Session:
    """The model's calls, made again and again: first as they are, then with some layers changed.

    Every later run gets the outputs of the first one handed back, so that its calls have the same inputs.

    Args:
        subjects: the layers by name.
        weights: gives a layer's (weight, bias), see ``SafeOperation``.
        change: the patches that make a module compute as the candidate.
        advance: called before each call; may raise.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        candidate: Candidate,
        weights: Weights,
        change: Callable[[torch.nn.Module, Candidate], list[Patch]],
        advance: Callable[[], None] = lambda: None,
    ):
        self.subjects = {subject.name: subject for subject in subjects}
        self.candidate = candidate
        self.weights = weights
        self.change = change
        self.advance = advance
        self.measures = {name: Measure() for name in self.subjects}
        self.references: list[list[torch.Tensor]] = []
        self.calls = 0
        self._index = 0
        self._changed: frozenset[str] | None = None
        self._floor = -math.inf
        self._worst = math.inf

    def reference(self, run: Callable[[], object]) -> None:
        """Make the calls with nothing changed and every layer measured."""
        self._changed = None
        run()
        if not self.references:
            raise HalfsafeError("The model was not called, so nothing could be measured.", "Give it a latent and a prompt.")

    def snr(self, run: Callable[[], object], changed: frozenset[str], floor: float = -math.inf) -> float:
        """The worst SNR in dB over the calls with the layers ``changed``; once below ``floor``, no more calls are made."""
        self._index, self._changed, self._floor, self._worst = 0, changed, floor, math.inf
        run()
        return self._worst

    def step(self, base: torch.Tensor | float, call: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """One call of the model: ``call`` makes it and gives its outputs. ``base`` minus an output is what is compared."""
        if self._changed is not None and self._worst < self._floor:
            return [output.clone() for output in self._next_reference()]
        self.advance()
        outputs = call()
        self.calls += 1
        if self._changed is None:
            if not all(torch.isfinite(output).all() for output in outputs):
                raise HalfsafeError(
                    "The model gives NaN or Inf before anything is changed, so there is nothing to compare with.",
                    "Compute it in fp16_safe, bf16 or fp32, and check its weights.",
                )
            self.references.append([output.clone() for output in outputs])
            return list(outputs)
        references = self._next_reference()
        found = [snr_db(base - ref, base - out) for ref, out in zip(references, outputs, strict=True)]
        self._worst = min(self._worst, *found)
        return [output.clone() for output in references]

    def _next_reference(self) -> list[torch.Tensor]:
        self._index += 1
        return self.references[self._index - 1]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Around the part of a call in which modules run: probes while measuring, else the changed layers."""
        with patched(self._probes() if self._changed is None else self._changes()):
            yield

    def _probes(self) -> Iterator[Patch]:
        for name, subject in self.subjects.items():
            if not subject.barred:
                probe = Probe(subject.module, self.measures[name], self.candidate, self.weights)
                yield subject.module, "forward", probe

    def _changes(self) -> Iterator[Patch]:
        for name in self._changed:
            yield from self.change(self.subjects[name].module, self.candidate)

    @torch.no_grad()
    def weigh(self, device: torch.device, dtype: torch.dtype) -> None:
        """Measure the weights of the layers that never ran."""
        like = torch.empty(0, device=device, dtype=dtype)
        for name, subject in self.subjects.items():
            if not subject.barred and self.measures[name].weight_db is None:
                with self.weights(subject.module, like, dtype) as (weight, _):
                    self.measures[name].weight_db = weight_error(weight, self.candidate)


def snr_db(reference: torch.Tensor, result: torch.Tensor) -> float:
    """SNR of a result in dB: inf when equal, -inf when it holds NaN or inf."""
    noise = (result.double() - reference.double()).square().sum().item()
    if not math.isfinite(noise):
        return -math.inf
    return decibels(noise, reference.double().square().sum().item())


def analyze(
    session: Session, run: Callable[[], object], target_db: float, pin: bool = True, max_trials: int = MAX_TRIALS
) -> Analysis:
    """Measure every layer and choose those that keep the model's output at ``target_db`` or better.

    Args:
        session: has been through :meth:`Session.reference`.
        run: makes all calls of the model through ``session.step`` and ``session.inside``.
        pin: layers with a sensitive role stay high; else they are measured and chosen like the others.
    """
    layers = [_result(subject, session.measures[name], pin) for name, subject in session.subjects.items()]
    free = [layer for layer in layers if layer.status == KEPT]
    search = Search(lambda names, floor: session.snr(run, names, floor), target_db, max_trials)
    plain = frozenset(layer.name for layer in free if not session.subjects[layer.name].role)
    analysis = Analysis(session.candidate, target_db, layers, all_db=search.measured(plain), all_count=len(plain))
    chosen = search.choose(ordered_groups(free, session.candidate))
    for layer in free:
        layer.status = CHOSEN if layer.name in chosen else KEPT
    analysis.snr_db = search.known[chosen]
    analysis.trials, analysis.complete = search.trials, search.complete
    analysis.calls, analysis.reference_calls = session.calls, len(session.references)
    return analysis


def ordered_groups(layers: Sequence[LayerResult], candidate: Candidate) -> list[tuple[str, ...]]:
    """Layers that are decided together, least damage per byte (per product, for arithmetic) first; none that overflows."""
    groups: dict[str, list[LayerResult]] = {}
    for layer in layers:
        groups.setdefault(group_of(layer.name), []).append(layer)

    def cost(group: list[LayerResult]) -> float:
        damage = sum(10 ** (-layer.worst_db / 10) for layer in group)
        return damage / sum(layer.size if candidate.stores else layer.work for layer in group)

    usable = [group for group in groups.values() if all(layer.worst_db > -math.inf for layer in group)]
    return [tuple(layer.name for layer in group) for group in sorted(usable, key=cost)]


def _result(subject: Subject, measure: Measure, pin: bool) -> LayerResult:
    status, reason = KEPT, ""
    if subject.barred:
        status, reason = BARRED, subject.barred
    elif subject.role and pin:
        status, reason = PINNED, subject.role
    elif not measure.work:
        status, reason = UNUSED, "never ran in the calls measured"
    figures = measure.weight_db, measure.output_db, measure.channel_db, measure.work
    return LayerResult(subject.name, subject.cls, subject.module.weight.numel(), status, reason, *figures, bool(subject.role))
