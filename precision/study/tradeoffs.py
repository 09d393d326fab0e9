"""Settings to try on a model, what each costs and how close it comes, the best for a goal, and its
rules."""

import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.dtypes import QUANTIZED_NAMES
from ..base.errors import HalfsafeError
from ..base.message import Message, joined
from ..base.modes import MODES
from ..base.options import COMPUTE_OPTIONS, GOALS, STORAGE_OPTIONS, ComputeOption, Goal, StorageOption
from ..base.text import size_text
from ..devices.detect import Device
from ..formats.layer_plan import AS_FILE
from ..plan.auto import INT8_COMPUTE
from ..plan.compute import SAFE
from ..plan.facts import LayerSpec
from ..plan.layers import why_not_run
from ..plan.nvfp4 import NVFP4, kept_from_nvfp4
from ..plan.rules import MEASURED, Rules, numbered_lines, rules_from

DEFAULT_SETTINGS = """\
auto/auto
auto/fp16_safe
as_file/bf16
as_file/fp16
int8/auto
fp8_e4m3fn/auto
fp8_e4m3fn/fp8"""
FLOORS: dict[Goal, float] = {"balanced": 25.0, "speed": 20.0, "memory": 20.0}
"""Goal -> the SNR in dB that a setting needs for it: an error of 5.6 % or 10 %."""
NO_OPTION = "Candidates, line {0}, {1}: '{2}' is not a {3} option."
NOISE = 0.2
"""The spread of a row's timed steps, as a share of their median, above which its time ranks
nothing."""
CLOSE_DB = 1.0
CLOSE = 1.03
SAME_DB = 100.0
"""The SNR from which results of equal products differ by the order of sums alone: 0.001 % of the
latent."""


@dataclass(frozen=True)
class Setting:
    """A loader's two options: what weights are stored in, and what is computed in."""

    storage: StorageOption
    compute: ComputeOption

    def __str__(self) -> str:
        return f"{self.storage}/{self.compute}"

    def why_not(self, device: Device, formats: Container[str] = QUANTIZED_NAMES) -> str:
        """Return why a device, or a ComfyUI with these formats, cannot run this setting; empty where the
        setting can run.

        A CPU emulates 16 bit, slowly, and is measured all the same.
        """
        needed = {"fp8": "fp8_matmul", "int8": "int8_matmul"}.get(self.compute, "")
        if self.compute in ("fp16", "bf16", SAFE) and device.profile.type != "cpu":
            needed = self.compute.removesuffix("_safe")
        if needed and not device.capabilities[needed]:
            return Message("not on {0}: {1}", device.label, device.reason(needed))
        refused = device.refuses(self.storage) if self.storage in QUANTIZED_NAMES else ""
        return refused or why_not_run(self.storage, formats)


def settings_from(text: str) -> list[Setting]:
    """Read settings, one ``storage/compute`` per line, each once. Empty lines and ``#`` comments
    are skipped.

    Raises:
        HalfsafeError: lines cannot be read, all of which it names, or there is none.
    """
    lines = ((number, line.partition("#")[0].strip()) for number, line in numbered_lines(text))
    found, problems, advice = [], [], []
    for number, line in ((number, line) for number, line in lines if line):
        words: Iterator[Any] = (part.strip().lower() for part in line.partition("/"))
        storage, _, compute = words
        found.append(Setting(storage, compute))
        for value, options, kind in ((storage, STORAGE_OPTIONS, "storage"), (compute, COMPUTE_OPTIONS, "compute")):
            if value not in options:
                problems.append(Message(NO_OPTION, number, line, value, kind))
                advice.append(Message("Use one of: {0} as {1}.", ", ".join(options), kind))
    if problems:
        raise HalfsafeError(joined(problems), joined(dict.fromkeys(advice)))
    if not found:
        raise HalfsafeError("There is no candidate to measure.", "Write: <storage>/<compute>, e.g. int8/auto.")
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Tradeoff:
    """One setting with its figures.

    Attributes:
        storage: what a loader has to be asked for to hold the weights so.
        seconds: of one step, the median of those timed in both turns; ``spread``: the farthest of
            them from it;
            ``timed``: all of them.
        extra_bytes: the most that was allocated on the device beyond them; None where the device
            does not tell.
        snr_db: of the final latent against the reference, the least of all seeds; None where
            nothing was compared.
        cosines: of the final latent and that of the reference, one for each seed.
        pictures: of the reference and of this row, of the seed with the least cosine: uint8
            (height, width, 3), with a pixel for each of the latent; none where ComfyUI does not
            tell the colours of the latent.
        storages: storage -> bytes of weights; ``modes``: mode -> number of layers that multiplied
            so.
        problem: why it was not measured, or what is wrong with its result; empty where nothing is.
        same: other settings that come to the same here, and are not measured again.
        out_of_memory: the problem is that the device or host had no memory for it.
    """

    setting: Setting
    storage: str = ""
    seconds: float | None = None
    weight_bytes: int = 0
    extra_bytes: int | None = None
    snr_db: float | None = None
    storages: Mapping[str, int] = field(default_factory=dict)
    modes: Mapping[str, int] = field(default_factory=dict)
    problem: str = ""
    spread: float = 0.0
    timed: Sequence[float] = ()
    same: Sequence[Setting] = ()
    out_of_memory: bool = False
    cosines: Sequence[float] = ()
    pictures: Sequence[np.ndarray] = field(default=(), compare=False)

    @property
    def worst(self) -> int:
        """The place of the seed with the least cosine."""
        return min(range(len(self.cosines)), key=self.cosines.__getitem__)

    @property
    def names(self) -> str:
        """Name the setting and its equals."""
        return " = ".join(map(str, (self.setting, *self.same)))

    @property
    def computed_by(self) -> str:
        """Return the compute option that asks for what most layers multiplied in."""
        mode = max(self.modes, key=self.modes.__getitem__)
        return MODES[mode].compute if mode in MODES else mode

    @property
    def bytes(self) -> int:
        """Weights, and the peak beyond them where that is known."""
        return self.weight_bytes + (self.extra_bytes or 0)

    @property
    def is_noisy(self) -> bool:
        """True if the timed steps lie too far apart to rank the row by its time."""
        return self.seconds is not None and self.spread > NOISE * self.seconds

    def computes_as(self, other: "Tradeoff") -> bool:
        """True if two rows held the same weights, multiplied in the same modes and gave the same
        result: neither can be faster than the other."""
        same = self.storages == other.storages and self.modes == other.modes
        one, another = (math.inf if row.snr_db is None else row.snr_db for row in (self, other))
        return same and (one == another or min(one, another) >= SAME_DB)

    @property
    def works(self) -> bool:
        """True if it ran and its result is finite."""
        return not self.problem and self.snr_db is not None and self.snr_db > -math.inf

    def rules_for(self, automatic: str, layers: Sequence[LayerSpec], figures: str = "") -> Rules:
        """Write the row as rules for a loader, or for Compute Dtype, whose own options are ``auto``.

        The first line is for all layers, with ``figures`` in its comment, which a saved file's model
        card shows. Rules change layers of a model that computes as ``automatic``: where another dtype
        is asked for, what passes between them is fp32, so that the result is no less close than with
        the option. Where the line asks for 8 bits, lines for the sensitive layers of this model follow,
        as it would win over the preset's.
        """
        comment = f" # {MEASURED}{', '.join(filter(None, (str(self.setting), figures)))}"
        words = filter(None, (f"* storage={self.storage}", self.compute_rule(automatic), comment))
        lines = [" ".join(words)]
        if self.storage in QUANTIZED_NAMES:
            preset = rules_from().on(layers)
            matching = {rule for layer in layers for rule in preset.matching(layer.name, layer.cls)}
            lines += [str(rule) for rule in preset.presets if rule in matching]
            lines += [str(rule) for rule in kept_from_nvfp4(layers)] if self.storage == NVFP4 else []
        return rules_from("\n".join(lines))

    def compute_rule(self, automatic: str) -> str:
        """Write what the row computes in as settings of a rule; empty where ``auto`` computes so."""
        compute = self.setting.compute
        if compute in INT8_COMPUTE:
            return ""
        return f"compute={compute}" + ("" if compute in ("fp8", automatic) else " stream=fp32")


@dataclass(frozen=True)
class Measurements:
    """All settings that were tried on a model.

    Attributes:
        storage: of the weights that the settings are made from: the file's own.
        given: of the weights that the node was given; ``is_of_file``: False where their file is not
            known, so that they are what the settings are made from.
        machine: the card's own name, its driver, and torch.
        automatic: what compute ``auto`` stands for here.
        reference: what the others are compared with; it has no SNR.
        seeds: that were sampled, from ``seed`` on.
        took: seconds of the whole measurement, and of the sampler's runs in it; the rest makes and
            moves weights.
    """

    device: str
    model: str
    storage: str
    automatic: str
    layers: Sequence[LayerSpec]
    shape: tuple[int, ...]
    seed: int
    reference: Tradeoff
    rows: Sequence[Tradeoff]
    given: str
    is_of_file: bool
    machine: tuple[str, str, str]
    took: tuple[float, float] = (0.0, 0.0)
    seeds: int = 1

    @property
    def best(self) -> dict[Goal, Tradeoff]:
        """Goal -> its best row, without the goals that no row can be chosen for: see
        :func:`_best_for`."""
        held = [row for row in self.rows if self.given == (self.storage if self.is_as_file(row) else row.storage)]
        found = {goal: _best_for(goal, self.rows, self.reference, held, self.has_drifted) for goal in GOALS}
        return {goal: row for goal, row in found.items() if row is not None}

    @property
    def shown(self) -> Tradeoff | None:
        """The row whose pictures are shown: the best for balanced, or for quality where there is
        none."""
        best = self.best
        return best.get("balanced") or best.get("quality")

    @property
    def has_drifted(self) -> bool:
        """True if a row that computes as the reference took another time, by more than the spread
        of both: the noise of the measurement is larger than the spread of a row tells, and no time
        ranks."""
        twins = (row for row in self.rows if row.works and row.computes_as(self.reference))
        return any(abs(row.seconds - self.reference.seconds) > _margin(row, self.reference) for row in twins)

    @property
    def is_noisy(self) -> bool:
        """True if a time is too noisy to rank: without a fastest, no more is known than that."""
        return self.has_drifted or any(row.is_noisy for row in (self.reference, *self.rows))

    def is_as_file(self, row: Tradeoff) -> bool:
        """True if a row holds the weights as the file does."""
        return row.storage in (AS_FILE, self.storage)

    @property
    def beside(self) -> Tradeoff | None:
        """What the best for balanced is told beside: the fastest row of the file's own weights, or
        the reference; None if the best computes as that row."""
        own = [row for row in self.rows if row.works and self.is_as_file(row)]
        best = self.best.get("balanced")
        beside = self.reference if best in own or not own else min(own, key=lambda row: row.seconds)
        return None if best is None or best.computes_as(beside) else beside

    @property
    def rules(self) -> Rules:
        """The best row for balanced as rules, see :meth:`Tradeoff.rules_for`; the default preset's where
        there is none."""
        best = self.best.get("balanced")
        return best.rules_for(self.automatic, self.layers, self._figures(best)) if best else rules_from()

    def _figures(self, row: Tradeoff) -> str:
        """Write the figures of a row, the card, its software and the model."""
        card, driver, torch = self.machine
        figures = f"{row.seconds:.3g} s/step", size_text(row.bytes), f"{row.snr_db:.1f} dB"
        latent = " x ".join(map(str, self.shape))
        return ", ".join([*figures, card, f"driver {driver}", f"torch {torch}", self.model, f"latent {latent}"])


def _best_for(
    goal: Goal,
    rows: Iterable[Tradeoff],
    reference: Tradeoff,
    held: Collection[Tradeoff] = (),
    has_drifted: bool = False,
) -> Tradeoff | None:
    """Choose the best row for a goal; None where no row works, none is better than the reference,
    or the times are too noisy to tell.

    quality: of those within 1 dB of the highest SNR, those as fast as the fastest, within 3 % or
    the larger spread of both. memory: those within 3 % of the smallest. speed: those as fast as the
    fastest, if it is faster than the reference by more than that. balanced: the smallest of those
    as fast as the fastest, if they are faster than the reference, or smaller and no slower. All but
    quality among the rows that reach the goal's SNR (``FLOORS``); where none does, the choice is
    quality's. Of several the closest is chosen, or, within 1 dB of it, one that the model holds
    already. quality and memory need no time: where it is noisy, quality takes the smallest.

    ``held``: the rows with the storage that the model has. ``has_drifted``: all times are too
    noisy."""
    working = [row for row in rows if row.works]
    fair = [row for row in working if row.snr_db >= FLOORS.get(goal, math.inf)]
    if goal == "quality" or not fair:
        close = _close(working)
        is_noisy = has_drifted or any(row.is_noisy for row in close)
        return _closest(_smallest(close) if is_noisy or not close else _level(close), held)
    if goal == "memory":
        return _closest(_smallest(fair), held)
    calm = fair if len(fair) == 1 else [row for row in fair if not row.is_noisy and not has_drifted]
    calm = [row for row in calm if _gains(row, reference, goal)]
    level = _level(calm) if calm else []
    best = _closest(level if goal == "speed" else _smallest(level), held)
    noisy = (row for row in fair if row.is_noisy and row is not best)
    return None if best is None or any(row.seconds <= best.seconds for row in noisy) else best


def _gains(row: Tradeoff, reference: Tradeoff, goal: Goal) -> bool:
    """True if a row is faster than the reference by more than the noise; for balanced also if it is
    no slower, and smaller by more than 3 %."""
    gained, margin = reference.seconds - row.seconds, _margin(row, reference)
    is_smaller = goal == "balanced" and CLOSE * row.bytes < reference.bytes
    return gained > margin or (is_smaller and gained >= -margin)


def _close(rows: Sequence[Tradeoff]) -> list[Tradeoff]:
    """List the rows within 1 dB of the highest SNR."""
    highest = max((row.snr_db for row in rows), default=0.0)
    return [row for row in rows if row.snr_db >= highest - CLOSE_DB]


def _closest(rows: Sequence[Tradeoff], held: Collection[Tradeoff]) -> Tradeoff | None:
    """Return the row of the highest SNR, of those in ``held`` where some are as close."""
    close = _close(rows)
    return max([row for row in close if row in held] or close, key=lambda row: row.snr_db, default=None)


def _smallest(rows: Sequence[Tradeoff]) -> list[Tradeoff]:
    most = CLOSE * min((row.bytes for row in rows), default=0)
    return [row for row in rows if row.bytes <= most]


def _level(rows: Sequence[Tradeoff]) -> list[Tradeoff]:
    """List the rows as fast as the fastest, within 3 % or the larger spread of both."""
    fastest = min(rows, key=lambda row: row.seconds)
    return [row for row in rows if row.seconds <= fastest.seconds + _margin(row, fastest)]


def _margin(row: Tradeoff, other: Tradeoff) -> float:
    """Return the difference in seconds up to which two rows take the same time: 3 %, or the larger
    spread of both."""
    return max(row.spread, other.spread, (CLOSE - 1) * other.seconds)
