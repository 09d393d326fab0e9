"""Find which layers of a model survive a lower precision, in short runs of its own sampler.

One run measures each layer by itself: the error of its weight, and of its output on its real
inputs. Then layers, least damage per byte first, are changed together in further runs, whose
results are compared with the first run's. Sets that miss the target are halved, as in
``onnxconverter_common.auto_convert_mixed_precision``.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from ..arithmetic.linear import WeightProvider
from ..base.amax import decibels
from ..base.errors import HalfsafeError
from ..base.message import Message
from ..base.modes import MODES
from ..base.patching import Patch, PutsWatch, patched, watched_forward
from ..formats.comfy_format import can_be_quantized
from ..plan.rules import Rules, patterns, rules_from
from .candidates import Candidate
from .layer_error import LayerResult, MeasuredForward

CHOSEN, KEPT, PINNED, BARRED, UNUSED = "chosen", "kept", "pinned", "not possible", "never ran"
MAX_TRIALS = 12
"""The most sets of layers that are run; about half as many mostly come within ``NEAR_DB`` of the
target."""
NEAR_DB = 0.5

Run = Callable[[], Sequence[torch.Tensor]]
"""Samples a few steps and returns the final latents."""


@dataclass
class Analysis:
    """The result of :meth:`Session.analyze`. ``snr_db``: of the final latent with the ``chosen`` layers;
    inf for no error.

    ``all_db``: the same with all ``all_count`` layers that are not sensitive. ``steps``: of the
    sampler, in all runs. ``trials``: sets of layers that were run; with ``MAX_TRIALS`` the search
    may have ended early.
    """

    candidate: Candidate
    target_db: float
    layers: list[LayerResult] = field(default_factory=list)
    snr_db: float = math.inf
    all_db: float = math.inf
    all_count: int = 0
    trials: int = 0
    steps: int = 0

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

    @property
    def rules(self) -> Rules:
        """The choice as rules on top of the default preset: of a storage the layers to keep, else those
        chosen."""
        return rules_from("\n".join(self.rule_lines()))

    def rule_lines(self) -> list[str]:
        """Write the lines of :attr:`rules`. No pattern matches a layer with another outcome."""
        high = [layer.name for layer in self.layers if layer.status != CHOSEN]
        if self.candidate.stores:
            # A loader would store these as the candidate by itself.
            free = (layer for layer in self.layers if layer.status != CHOSEN and not layer.sensitive)
            kept = [layer for layer in free if can_be_quantized(layer.cls)]
            raised = [layer for layer in self.chosen if layer.sensitive]
            lines = _lines(kept, "storage=as_file", [layer.name for layer in self.chosen])
            return lines + _lines(raised, f"storage={self.candidate.name}", high)
        return _lines(self.chosen, MODES[self.candidate.name].rule, high)


def _lines(layers: list[LayerResult], setting: str, others: Iterable[str]) -> list[str]:
    by_name, lines = {layer.name: layer for layer in layers}, []
    for pattern, names in patterns(by_name, others):
        measured = [snr for name in names if (snr := by_name[name].worst_db) is not None]
        count = f"{len(names)} layers, " if len(names) > 1 else ""
        reason = f"{count}output {min(measured):.1f} dB" if measured else by_name[names[0]].reason
        lines.append(f"{pattern} {setting}  # {reason}")
    return lines


class Session:
    """Runs of a model's sampler: the first measures every layer, later ones change some layers.

    Args:
        subjects: each layer, ``KEPT`` or ``BARRED``, and its module.
        run: samples with the model, each call of which is inside of :meth:`inside`.
        change: returns the patches that make a module compute as the candidate.
        measuring: returns the patches by which a layer's products are measured.

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
        measuring: PutsWatch = watched_forward,
    ):
        self.candidate = candidate
        self.layers = [layer for layer, _ in subjects]
        self.steps = 0
        self._modules = {layer.name: module for layer, module in subjects}
        self._run = run
        self._weights = weights
        self._change = change
        self._measuring = measuring
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
            return Message("measuring {0} layers", len(self.layers))
        return Message("trying {0} of {1} layers in {2}", len(self._changed), len(self.layers), self.candidate.name)

    def measure(self) -> None:
        """Run the sampler with nothing changed and measure every layer."""
        self._final = self._run()
        if not self.steps:
            problem = "The model was not called, so nothing could be measured."
            raise HalfsafeError(problem, "Connect a latent and a prompt.")
        if not all(torch.isfinite(latent).all() for latent in self._final):
            problem = "The model gives NaN or Inf before anything is changed, so there is nothing to compare with."
            raise HalfsafeError(problem, "Compute it in fp16_safe, bf16 or fp32, and check its weights.")

    def snr(self, changed: frozenset[str]) -> float:
        """Return the SNR in dB of the final latents with the layers ``changed``."""
        if changed not in self._snrs:
            self._changed = changed
            self._snrs[changed], _ = closeness(self._final, self._run())
        return self._snrs[changed]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Patch the layers during a call of the model: to measure them in the first run, else to
        change them."""
        with patched(self._patches()):
            yield

    def analyze(self, target_db: float, pin: bool = True) -> Analysis:
        """Measure every layer and choose layers with which the final latent stays at ``target_db`` or
        better.

        ``pin``: keep layers with a sensitive role; else they are chosen like the others.
        """
        self.measure()
        layers = self.layers
        for layer in layers:
            if layer.status == KEPT and layer.sensitive and pin:
                layer.status = PINNED
            elif layer.status == KEPT and not layer.flops:
                layer.status, layer.reason = UNUSED, "not called in the measured steps"
        free = [layer for layer in layers if layer.status == KEPT]
        plain = frozenset(layer.name for layer in free if not layer.sensitive)
        all_db = self.snr(plain)
        chosen = self._grown(target_db, frozenset(), self.ordered(free))
        for layer in free:
            layer.status = CHOSEN if layer.name in chosen else KEPT
        snr = self.snr(chosen)
        return Analysis(self.candidate, target_db, layers, snr, all_db, len(plain), self.trials, self.steps)

    def ordered(self, layers: Sequence[LayerResult]) -> list[str]:
        """Name the layers that do not overflow, least damage per byte (per FLOP, for arithmetic)
        first."""

        def cost(layer: LayerResult) -> float:
            return 10 ** (-layer.worst_db / 10) / (layer.size if self.candidate.stores else layer.flops)

        return [layer.name for layer in sorted((layer for layer in layers if layer.worst_db > -math.inf), key=cost)]

    def _grown(self, target_db: float, chosen: frozenset[str], segment: Sequence[str]) -> frozenset[str]:
        if not segment or self.snr(chosen) < target_db + NEAR_DB:
            return chosen
        if self.trials >= MAX_TRIALS:
            return chosen
        together = chosen.union(segment)
        if self.snr(together) >= target_db:
            return together
        if len(segment) == 1:
            return chosen
        middle = (len(segment) + 1) // 2
        return self._grown(target_db, self._grown(target_db, chosen, segment[:middle]), segment[middle:])

    def _patches(self) -> Iterator[Patch]:
        if self._changed is not None:
            for name in self._changed:
                yield from self._change(self._modules[name], self.candidate)
            return
        for layer in self.layers:
            if layer.status != BARRED:
                module = self._modules[layer.name]
                yield from self._measuring(module, MeasuredForward(module, layer, self.candidate, self._weights))


def _snr_db(reference: torch.Tensor, result: torch.Tensor) -> float:
    """Compute the SNR of a result in dB: inf when equal, -inf when it holds NaN or inf."""
    # On the host: Metal has no float64.
    exact = reference.cpu().double()
    noise = (result.cpu().double() - exact).square().sum().item()
    return decibels(noise, exact.square().sum().item())


def closeness(reference: Sequence[torch.Tensor], result: Sequence[torch.Tensor]) -> tuple[float, float]:
    """Compare the final latents of two runs: the SNR in dB and the cosine, the least of several
    latents."""
    pairs = [*zip(reference, result, strict=True)]
    return min(_snr_db(*pair) for pair in pairs), min(_cosine(*pair) for pair in pairs)


def _cosine(reference: torch.Tensor, result: torch.Tensor) -> float:
    """Compute the cosine of two results: 1 if one is a multiple of the other, 0 if one is zero
    everywhere."""
    exact, other = (tensor.cpu().double().flatten() for tensor in (reference, result))
    size = (exact.norm() * other.norm()).item()
    return (exact @ other).item() / size if size else 0.0
