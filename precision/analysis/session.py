"""Find which layers of a model survive a lower precision, on the model's own calls.

Each layer is measured by itself first: the error of its weight, and of its output on its real inputs. Then layers are
added in order of damage per byte, and sets are tried end to end on one of the same calls, the weakest. Segments that
fail are halved, as in ``onnxconverter_common.auto_convert_mixed_precision``; layers are tried one by one where no
beginning of the order fits. The choice then has to hold on all calls, and in a free run, whose calls get the model's
own results: there errors of early calls add up.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ..arithmetic.linear import WeightProvider
from ..arithmetic.patching import Patch, patched
from ..errors import HalfsafeError
from ..snr import decibels
from .candidates import Candidate
from .layer_error import Measure, MeasuredForward, weight_error
from .results import BARRED, CHOSEN, KEPT, PINNED, UNUSED, Analysis, LayerResult
from .search import MAX_TRIALS, RETRIALS, Group, Search, group_of, power

CONFIRMATIONS = 4
STRIDE_DB = 6.0
SPARE_DB = 1.0
EXACT = 1e-20

Run = Callable[[], Sequence[torch.Tensor]]
"""Makes all calls and returns the final latents."""


@dataclass(frozen=True)
class Subject:
    """One layer. ``role``: what makes it sensitive, if it is; ``barred``: why the candidate cannot act on it."""

    name: str
    cls: str
    module: torch.nn.Module
    role: str = ""
    barred: str = ""


class Session:
    """Repeats the model's calls: once unchanged, to measure every layer, then with some layers changed.

    Every later run is given the outputs of the first, so that its calls have the same inputs.

    Args:
        subjects: the layers by name.
        weights: provides a layer's (weight, bias), see ``SafeOperation``.
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
        self.weakest = 0
        self.known: dict[frozenset[str], dict[int, float]] = {}
        self._index = 0
        self._changed: frozenset[str] | None = None
        self._only: frozenset[int] = frozenset()
        self._free = False
        self._began: tuple[frozenset[str], list[torch.Tensor]] = frozenset(), []

    def doing(self) -> str:
        """Say what the run that goes on is for."""
        if self._changed is None:
            return f"Measuring {len(self.subjects)} layers, step {len(self.references) + 1}"
        tried = f"{len(self._changed)} of {len(self.subjects)} layers in {self.candidate.name}"
        return f"Confirming {tried}" if self._free else f"Trying {tried}"

    def reference(self, run: Run) -> None:
        """Run the calls with nothing changed and measure every layer."""
        self._changed = None
        self.final = run()
        if not self.references:
            raise HalfsafeError(
                "The model was not called, so nothing could be measured.", "Give it a latent and a prompt."
            )
        self.known[frozenset()] = dict.fromkeys(range(len(self.references)), math.inf)

    def snr(self, run: Run, changed: frozenset[str]) -> float:
        """Return the worst SNR in dB of the calls with the layers ``changed``."""
        self._trial(run, changed, range(len(self.references)))
        return min(self.known[changed].values())

    def weakest_snr(self, run: Run, changed: frozenset[str]) -> float:
        """Return the SNR in dB of the ``weakest`` call alone with the layers ``changed``."""
        self._trial(run, changed, (self.weakest,))
        return self.known[changed][self.weakest]

    def weakest_with(self, changed: frozenset[str]) -> int:
        """Return the call of the lowest SNR among those measured with the layers ``changed``."""
        return min(self.known[changed], key=self.known[changed].__getitem__)

    def _trial(self, run: Run, changed: frozenset[str], calls: Sequence[int]) -> None:
        """Make those of the calls that were not made before;
        the sampler is given the reference's results for the others."""
        known = self.known.setdefault(changed, {})
        self._index, self._changed, self._only = 0, changed, frozenset(calls) - known.keys()
        if self._only:
            run()

    def free_snr(self, run: Run, changed: frozenset[str]) -> float:
        """Return the SNR in dB of what ``run`` gives when its calls get the results of the changed model."""
        self._index, self._changed, self._free = 0, changed, True
        try:
            found = run()
        finally:
            self._free = False
        return min(snr_db(ref, out) for ref, out in zip(self.final, found, strict=True))

    def step(self, base: torch.Tensor | float, call: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Make one call of the model by ``call``, which returns its outputs, and compare ``base`` minus each output."""
        index, self._index = self._index, self._index + 1
        if self._changed is None:
            return self._reference(self._made(call))
        if self._free:
            return self._first_again() if index == 0 and self._began[0] == self._changed else self._made(call)
        if index in self._only:
            self._compare(index, base, self._made(call))
        return [output.clone() for output in self.references[index]]

    def _made(self, call: Callable[[], Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        self.advance()
        outputs = list(call())
        self.calls += 1
        return outputs

    def _reference(self, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        if not all(torch.isfinite(output).all() for output in outputs):
            raise HalfsafeError(
                "The model gives NaN or Inf before anything is changed, so there is nothing to compare with.",
                "Compute it in fp16_safe, bf16 or fp32, and check its weights.",
            )
        self.references.append([output.clone() for output in outputs])
        return outputs

    def _compare(self, index: int, base: torch.Tensor | float, outputs: list[torch.Tensor]) -> None:
        pairs = zip(self.references[index], outputs, strict=True)
        self.known[self._changed][index] = min(snr_db(base - ref, base - out) for ref, out in pairs)
        if index == 0:
            self._began = self._changed, [output.clone() for output in outputs]

    def _first_again(self) -> list[torch.Tensor]:
        """Return what the first call gave in a trial: in a free run its input is the same."""
        return [output.clone() for output in self._began[1]]

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
    # On the host: Metal has no float64.
    exact = reference.cpu().double()
    noise = (result.cpu().double() - exact).square().sum().item()
    if not math.isfinite(noise):
        return -math.inf
    return decibels(noise, exact.square().sum().item())


def analyze(session: Session, run: Run, target_db: float, pin: bool = True) -> Analysis:
    """Measure every layer and choose those that keep the model's output at ``target_db`` or better.

    Args:
        session: after its :meth:`Session.reference`.
        run: makes all calls of the model through ``session.step`` and ``session.inside``,
            and returns what they lead to.
        pin: keep layers with a sensitive role; else they are measured and chosen like the others.
    """
    layers = [_result(subject, session.measures[name], pin) for name, subject in session.subjects.items()]
    free = [layer for layer in layers if layer.status == KEPT]
    plain = frozenset(layer.name for layer in free if not session.subjects[layer.name].role)
    analysis = Analysis(session.candidate, target_db, layers, all_db=session.snr(run, plain), all_count=len(plain))
    session.weakest = session.weakest_with(plain)
    search = Search(
        lambda names: session.weakest_snr(run, names), {layer.name: max(power(layer.worst_db), EXACT) for layer in free}
    )
    chosen = _confirmed(session, run, search, ordered_groups(free, session.candidate), analysis)
    for layer in free:
        layer.status = CHOSEN if layer.name in chosen else KEPT
    analysis.calls, analysis.reference_calls = session.calls, len(session.references)
    return analysis


def _confirmed(session: Session, run: Run, search: Search, groups: list[Group], analysis: Analysis) -> frozenset[str]:
    """Choose layers that hold the target on all calls and in a free run.

    Where a choice misses it on a call, some of its layers have to hold it there. Where it misses it in a free run, they
    have to be better on the weakest call by as much, and by less where that leaves some to spare. As long as nothing
    holds, groups are tried by themselves.
    """
    every, target = groups, analysis.target_db
    goal = target
    found: dict[frozenset[str], tuple[float, float]] = {frozenset(): (math.inf, math.inf)}
    for attempt in range(CONFIRMATIONS):
        chosen = search.choose(groups, goal, RETRIALS if attempt else MAX_TRIALS)
        if chosen in found:
            groups, goal = _possible(session, every, found, target), target
            if _best(found, target) or not groups:
                break
            chosen = search.choose_one(groups, goal)
            if not chosen:
                continue
        found[chosen] = _held(session, run, chosen, analysis)
        snr, free = found[chosen]
        if goal == target <= min(snr, free) or 0 <= min(snr, free) - target < SPARE_DB:
            break
        if min(snr, free) < target:
            groups = [group for group in groups if group[0] in chosen]
        if snr < target:
            session.weakest = session.weakest_with(chosen)
            search.forget()
        else:
            goal = max(target, session.weakest_snr(run, chosen) + min(target - free, STRIDE_DB))
    best = _best(found, target)
    analysis.snr_db, analysis.free_db = found[best]
    analysis.dropped = max(len(names) for names, (snr, _) in found.items() if snr >= target) - len(best)
    analysis.trials = search.trials
    analysis.complete = search.complete if best else not _possible(session, every, found, target)
    return best


def _best(found: Mapping[frozenset[str], tuple[float, float]], target: float) -> frozenset[str]:
    return max((names for names, snrs in found.items() if min(snrs) >= target), key=len)


def _possible(
    session: Session, groups: Sequence[Group], found: Mapping[frozenset[str], tuple[float, float]], target: float
) -> list[Group]:
    """Leave out the groups that missed the target by themselves."""

    def lowest(names: frozenset[str]) -> float:
        return min([*session.known.get(names, {}).values(), *found.get(names, ())], default=math.inf)

    return [group for group in groups if lowest(frozenset(group)) >= target]


def _held(session: Session, run: Run, names: frozenset[str], analysis: Analysis) -> tuple[float, float]:
    """Measure the SNR of all calls and, where it holds the target, of a free run."""
    snr = session.snr(run, names)
    if snr < analysis.target_db:
        return snr, snr
    analysis.free_runs += 1
    return snr, session.free_snr(run, names)


def ordered_groups(layers: Sequence[LayerResult], candidate: Candidate) -> list[Group]:
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
