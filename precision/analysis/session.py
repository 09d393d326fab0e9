"""Find which layers of a model survive a lower precision, on the model's own calls.

Each layer is measured by itself first: the error of its weight, and of its output on its real inputs. Then layers are
added in order of damage per byte, and every set is tried end to end on the same calls. Segments that fail are halved,
as in ``onnxconverter_common.auto_convert_mixed_precision``. The choice then has to hold in a free run, whose calls get the
model's own results: there errors of early calls add up.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..arithmetic.linear import WeightProvider
from ..arithmetic.patching import Patch, patched
from ..errors import HalfsafeError
from .candidates import Candidate
from .measure import Measure, MeasuredForward, decibels, weight_error
from .search import FREE_TRIALS, MAX_TRIALS, Search, group_of

Run = Callable[[], Sequence[torch.Tensor]]
"""Makes all calls and returns the final latents."""

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
    """The figures of one layer. dB values are signal to noise ratios; None where nothing was measured.

    ``output_db``: of its output as a whole; ``channel_db``: the mean over its output channels, each by itself, which
    shows an error that larger channels hide. ``size``: parameters. ``flops``: of its matmuls in all calls of one run.
    ``sensitive``: the default preset keeps it. ``crest``: amax / rms of its input, the largest of its calls.
    """

    name: str
    cls: str
    size: int
    status: str
    reason: str = ""
    weight_db: float | None = None
    output_db: float | None = None
    channel_db: float | None = None
    flops: int = 0
    sensitive: bool = False
    crest: float | None = None

    @property
    def worst_db(self) -> float | None:
        return None if self.output_db is None else min(self.output_db, self.channel_db)


@dataclass
class Analysis:
    """The result of :func:`analyze`. ``snr_db``: end to end with the ``chosen`` layers, the worst call; inf for no error.

    ``all_db``: the same with all ``all_count`` layers that are not sensitive. ``calls``: model calls made, of them ``reference_calls``
    unchanged. ``complete``: the search ended by itself, not by its bound on trials. ``free_db``: the SNR of a free run's result with
    the ``chosen`` layers; ``free_runs`` were made, and ``dropped`` layers kept because of them.
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
    free_db: float = math.inf
    free_runs: int = 0
    dropped: int = 0

    def named(self, status: str) -> list[LayerResult]:
        return [layer for layer in self.layers if layer.status == status]

    @property
    def chosen(self) -> list[LayerResult]:
        return self.named(CHOSEN)


class Session:
    """Repeats the model's calls: once unchanged, to measure every layer, then with some layers changed.

    Every later run is given the outputs of the first, so that its calls have the same inputs.

    Args:
        subjects: the layers by name.
        weights: lends a layer's (weight, bias), see ``SafeOperation``.
        change: returns the patches that make a module compute as the candidate.
        advance: called before each call; may raise.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        candidate: Candidate,
        weights: WeightProvider,
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
        self.final: Sequence[torch.Tensor] = ()
        self.calls = 0
        self._index = 0
        self._changed: frozenset[str] | None = None
        self._floor = -math.inf
        self._worst = math.inf
        self._free = False

    def reference(self, run: Run) -> None:
        """Run the calls with nothing changed and measure every layer."""
        self._changed = None
        self.final = run()
        if not self.references:
            raise HalfsafeError("The model was not called, so nothing could be measured.", "Give it a latent and a prompt.")

    def snr(self, run: Run, changed: frozenset[str], floor: float = -math.inf) -> float:
        """Return the worst SNR in dB of the calls with the layers ``changed``; once below ``floor``, calls are skipped."""
        self._index, self._changed, self._floor, self._worst = 0, changed, floor, math.inf
        run()
        return self._worst

    def free_snr(self, run: Run, changed: frozenset[str]) -> float:
        """Return the SNR in dB of what ``run`` gives when its calls get the results of the changed model."""
        self._changed, self._free = changed, True
        try:
            found = run()
        finally:
            self._free = False
        return min(snr_db(ref, out) for ref, out in zip(self.final, found, strict=True))

    def step(self, base: torch.Tensor | float, call: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Make one call of the model by ``call``, which returns its outputs, and compare ``base`` minus each output."""
        if self._changed is not None and not self._free and self._worst < self._floor:
            return [output.clone() for output in self._next_reference()]
        self.advance()
        outputs = call()
        self.calls += 1
        if self._free:
            return list(outputs)
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
        """Patch the layers while modules run: to measure them in the reference run, else to change them."""
        with patched(self._measured() if self._changed is None else self._changes()):
            yield

    def _measured(self) -> Iterator[Patch]:
        for name, subject in self.subjects.items():
            if not subject.barred:
                forward = MeasuredForward(subject.module, self.measures[name], self.candidate, self.weights)
                yield subject.module, "forward", forward

    def _changes(self) -> Iterator[Patch]:
        for name in self._changed:
            yield from self.change(self.subjects[name].module, self.candidate)

    @torch.no_grad()
    def measure_unused_weights(self, device: torch.device, dtype: torch.dtype) -> None:
        """Measure the weights of the layers that never ran."""
        like = torch.empty(0, device=device, dtype=dtype)
        for name, subject in self.subjects.items():
            if not subject.barred and self.measures[name].weight_db is None:
                with self.weights(subject.module, like, dtype) as (weight, _):
                    self.measures[name].weight_db = weight_error(weight, self.candidate)


def snr_db(reference: torch.Tensor, result: torch.Tensor) -> float:
    """Compute the SNR of a result in dB: inf when equal, -inf when it holds NaN or inf."""
    noise = (result.double() - reference.double()).square().sum().item()
    if not math.isfinite(noise):
        return -math.inf
    return decibels(noise, reference.double().square().sum().item())


def analyze(session: Session, run: Run, target_db: float, pin: bool = True) -> Analysis:
    """Measure every layer and choose those that keep the model's output at ``target_db`` or better.

    Args:
        session: after its :meth:`Session.reference`.
        run: makes all calls of the model through ``session.step`` and ``session.inside``, and returns what they lead to.
        pin: keep layers with a sensitive role; else they are measured and chosen like the others.
    """
    layers = [_result(subject, session.measures[name], pin) for name, subject in session.subjects.items()]
    free = [layer for layer in layers if layer.status == KEPT]
    search = Search(lambda names, floor: session.snr(run, names, floor), target_db, MAX_TRIALS)
    plain = frozenset(layer.name for layer in free if not session.subjects[layer.name].role)
    analysis = Analysis(session.candidate, target_db, layers, all_db=search.measured(plain), all_count=len(plain))
    groups = ordered_groups(free, session.candidate)
    by_calls = search.choose(groups)
    chosen = _held_in_a_free_run(session, run, search, [group for group in groups if group[0] in by_calls], analysis)
    for layer in free:
        layer.status = CHOSEN if layer.name in chosen else KEPT
    analysis.snr_db, analysis.dropped = search.known[chosen], len(by_calls) - len(chosen)
    analysis.trials, analysis.complete = search.trials, search.complete
    analysis.calls, analysis.reference_calls = session.calls, len(session.references)
    return analysis


def _held_in_a_free_run(session: Session, run: Run, search: Search, groups: list, analysis: Analysis) -> frozenset[str]:
    """Choose those of the groups that hold the target in a free run too, all of them where they do."""
    found = {frozenset(): math.inf}

    def measure(names: frozenset[str], floor: float) -> float:
        by_calls = search.measured(names)
        if by_calls >= floor:
            analysis.free_runs += 1
            found[names] = session.free_snr(run, names)
        return min(by_calls, found.get(names, by_calls))

    chosen = Search(measure, search.target_db, FREE_TRIALS).choose(groups)
    analysis.free_db = found[chosen]
    return chosen


def ordered_groups(layers: Sequence[LayerResult], candidate: Candidate) -> list[tuple[str, ...]]:
    """Group the layers that are decided together, least damage per byte (per FLOP, for arithmetic) first.

    Groups with a layer that overflows are left out.
    """
    groups: dict[str, list[LayerResult]] = {}
    for layer in layers:
        groups.setdefault(group_of(layer.name), []).append(layer)

    def cost(group: list[LayerResult]) -> float:
        damage = sum(10 ** (-layer.worst_db / 10) for layer in group)
        return damage / sum(layer.size if candidate.stores else layer.flops for layer in group)

    usable = [group for group in groups.values() if all(layer.worst_db > -math.inf for layer in group)]
    return [tuple(layer.name for layer in group) for group in sorted(usable, key=cost)]


def _result(subject: Subject, measure: Measure, pin: bool) -> LayerResult:
    status, reason = KEPT, ""
    if subject.barred:
        status, reason = BARRED, subject.barred
    elif subject.role and pin:
        status, reason = PINNED, subject.role
    elif not measure.flops:
        status, reason = UNUSED, "never ran in the calls measured"
    figures = measure.weight_db, measure.output_db, measure.channel_db, measure.flops
    size = subject.module.weight.numel()
    return LayerResult(subject.name, subject.cls, size, status, reason, *figures, bool(subject.role), measure.crest)
