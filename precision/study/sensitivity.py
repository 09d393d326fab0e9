"""Find which layers of a model survive a lower precision, in short runs of its own sampler.

One run measures each layer by itself: the error of its weight, and of its output on its real inputs. Then layers, least
damage per byte first, are changed together in further runs, whose results are compared with the first run's. Sets that
miss the target are halved, as in ``onnxconverter_common.auto_convert_mixed_precision``.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..arithmetic.linear import WeightProvider
from ..base.amax import decibels
from ..base.errors import HalfsafeError
from ..base.patching import Patch, patched
from .candidates import Candidate
from .layer_error import LayerResult, MeasuredForward

CHOSEN, KEPT, PINNED, BARRED, UNUSED = "chosen", "kept", "pinned", "not possible", "never ran"
MAX_TRIALS = 12
"""The most sets of layers that are run; about half as many mostly come within ``NEAR_DB`` of the target."""
NEAR_DB = 0.5
_PROJECTION = re.compile(r"(^|_)(w?)(?:[qkv]|kv|query|key|value)(?=_|$)")

Group = tuple[str, ...]
Run = Callable[[], Sequence[torch.Tensor]]
"""Samples a few steps and returns the final latents."""


@dataclass
class Analysis:
    """The result of :func:`analyze`. ``snr_db``: of the final latent with the ``chosen`` layers; inf for no error.

    ``all_db``: the same with all ``all_count`` layers that are not sensitive. ``steps``: of the sampler, in all runs.
    ``trials``: sets of layers that were run. ``complete``: every set that the search asks for was run.
    """

    candidate: Candidate
    target_db: float
    layers: list[LayerResult] = field(default_factory=list)
    snr_db: float = math.inf
    all_db: float = math.inf
    all_count: int = 0
    trials: int = 0
    steps: int = 0
    complete: bool = True

    def named(self, status: str) -> list[LayerResult]:
        return [layer for layer in self.layers if layer.status == status]

    @property
    def chosen(self) -> list[LayerResult]:
        return self.named(CHOSEN)

    @property
    def weakest_first(self) -> list[LayerResult]:
        """List the measured layers, lowest SNR first."""
        measured = (layer for layer in self.layers if layer.worst_db is not None)
        return sorted(measured, key=lambda layer: layer.worst_db)


class Session:
    """Runs of a model's sampler: the first measures every layer, later ones change some layers.

    Args:
        subjects: each layer, ``KEPT`` or ``BARRED``, and its module.
        run: samples with the model, each call of which is inside of :meth:`inside`.
        weights: provides a layer's (weight, bias), see ``SafeOperation``.
        change: returns the patches that make a module compute as the candidate.

    Raises:
        HalfsafeError: the model was not called, or its own result is not finite.
    """

    def __init__(
        self,
        subjects: Sequence[tuple[LayerResult, torch.nn.Module]],
        candidate: Candidate,
        run: Run,
        weights: WeightProvider,
        change: Callable[[torch.nn.Module, Candidate], list[Patch]],
    ):
        self.candidate = candidate
        self.layers = [layer for layer, _ in subjects]
        self.steps = 0
        self._modules = {layer.name: module for layer, module in subjects}
        self._run = run
        self._weights = weights
        self._change = change
        self._changed: frozenset[str] | None = None
        self._final: Sequence[torch.Tensor] = ()
        self._snrs: dict[frozenset[str], float] = {frozenset(): math.inf}

    @property
    def trials(self) -> int:
        """Count the sets of layers that were run."""
        return len(self._snrs) - 1

    def begin_step(self) -> str:
        """Count a step of the sampler, and say in words what runs."""
        self.steps += 1
        if self._changed is None:
            return f"measuring {len(self.layers)} layers"
        return f"trying {len(self._changed)} of {len(self.layers)} layers in {self.candidate.name}"

    def measure(self) -> None:
        """Run the sampler with nothing changed and measure every layer."""
        self._final = self._run()
        if not self.steps:
            raise HalfsafeError(
                "The model was not called, so nothing could be measured.", "Give it a latent and a prompt."
            )
        if not all(torch.isfinite(latent).all() for latent in self._final):
            raise HalfsafeError(
                "The model gives NaN or Inf before anything is changed, so there is nothing to compare with.",
                "Compute it in fp16_safe, bf16 or fp32, and check its weights.",
            )

    def snr(self, changed: frozenset[str]) -> float:
        """Return the SNR in dB of the final latents with the layers ``changed``."""
        if changed not in self._snrs:
            self._changed = changed
            self._snrs[changed] = min(map(snr_db, self._final, self._run()))
        return self._snrs[changed]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Patch the layers during a call of the model: to measure them in the first run, else to change them."""
        with patched(self._measured() if self._changed is None else self._changes()):
            yield

    def _measured(self) -> Iterator[Patch]:
        for layer in self.layers:
            if layer.status != BARRED:
                module = self._modules[layer.name]
                yield module, "forward", MeasuredForward(module, layer, self.candidate, self._weights)

    def _changes(self) -> Iterator[Patch]:
        for name in self._changed:
            yield from self._change(self._modules[name], self.candidate)


def snr_db(reference: torch.Tensor, result: torch.Tensor) -> float:
    """Compute the SNR of a result in dB: inf when equal, -inf when it holds NaN or inf."""
    # On the host: Metal has no float64.
    exact = reference.cpu().double()
    noise = (result.cpu().double() - exact).square().sum().item()
    return decibels(noise, exact.square().sum().item())


def analyze(session: Session, target_db: float, pin: bool = True) -> Analysis:
    """Measure every layer and choose layers with which the final latent stays at ``target_db`` or better.

    ``pin``: keep layers with a sensitive role; else they are chosen like the others.
    """
    session.measure()
    layers = session.layers
    for layer in layers:
        if layer.status == KEPT and layer.sensitive and pin:
            layer.status = PINNED
        elif layer.status == KEPT and not layer.flops:
            layer.status, layer.reason = UNUSED, "not met in the steps measured"
    free = [layer for layer in layers if layer.status == KEPT]
    plain = frozenset(layer.name for layer in free if not layer.sensitive)
    analysis = Analysis(session.candidate, target_db, layers, all_db=session.snr(plain), all_count=len(plain))
    search = Search(session, target_db)
    chosen = search.grown(frozenset(), ordered_groups(free, session.candidate))
    for layer in free:
        layer.status = CHOSEN if layer.name in chosen else KEPT
    analysis.snr_db, analysis.complete = session.snr(chosen), search.complete
    analysis.trials, analysis.steps = session.trials, session.steps
    return analysis


class Search:
    """Trials of sets of layers against a target in dB. ``complete``: no trial was left out for their number."""

    def __init__(self, session: Session, target_db: float):
        self.session = session
        self.target_db = target_db
        self.complete = True

    def grown(self, chosen: frozenset[str], segment: Sequence[Group]) -> frozenset[str]:
        """Add a segment of groups to the chosen layers, or parts of the segment, while the target holds."""
        if not segment or self._ends(chosen):
            return chosen
        together = chosen.union(*segment)
        if self.session.snr(together) >= self.target_db:
            return together
        if len(segment) == 1:
            return chosen
        middle = (len(segment) + 1) // 2
        return self.grown(self.grown(chosen, segment[:middle]), segment[middle:])

    def _ends(self, chosen: frozenset[str]) -> bool:
        """Tell whether the target is reached closely, or the trials are used up."""
        if self.session.snr(chosen) < self.target_db + NEAR_DB:
            return True
        if self.session.trials == MAX_TRIALS:
            self.complete = False
        return not self.complete


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


def group_of(name: str) -> str:
    """Return the key of layers decided as one: q, k and v of an attention share it,
    any other layer has its own name."""
    *parent, last = name.split(".")
    return ".".join([*parent, _PROJECTION.sub(r"\1\2qkv", last, count=1)])
