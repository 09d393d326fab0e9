"""Search for the largest set of layers whose noise stays below a bound, in as few trials as possible.

The rounding errors of different layers are independent, so their noise powers add up in the model's output. One trial
of a set therefore says something of its complement in a larger set too.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence

MAX_TRIALS = 32
RETRIALS = 10
DOUBT = 4.0
ADDITIVE = 1.1
FULL = 0.95
GUESSES = 3
_PROJECTION = re.compile(r"(^|_)(w?)(?:[qkv]|kv|query|key|value)(?=_|$)")

Group = tuple[str, ...]


class Search:
    """Trials of sets of layers.

    Args:
        measure: names -> SNR in dB.
        damage: the noise power expected of each layer, in any unit. It says where to try, and where trying ends: at
            segments of which no layer fits, should its share of their noise be ``DOUBT`` times less than expected.
    """

    def __init__(self, measure: Callable[[frozenset[str]], float], damage: Mapping[str, float]):
        self.measure = measure
        self.damage = damage
        self.trials = self.most = 0
        self.complete = True
        self.known: dict[frozenset[str], float] = {frozenset(): math.inf}

    def choose(self, ordered: Sequence[Group], target_db: float, trials: int = MAX_TRIALS) -> frozenset[str]:
        """Choose a set whose measured SNR is ``target_db`` or better, in at most so many more ``trials``.

        Takes the longest prefix of ``ordered`` that reaches it, or where none does the group of the least damage that
        does, then segments of the rest that still do on top, halving those that fail.
        """
        self.most = self.trials + trials
        bound = power(target_db)
        length = self._longest_prefix(ordered, bound)
        chosen, noise = list(ordered[:length]), self._between(ordered, length, len(ordered), bound)[0]
        if not length:
            chosen, noise = self._first(ordered, bound), 0.0
        rest = [group for group in ordered if group not in chosen]
        return _names(self._grown(chosen, rest, bound, noise) if chosen else [])

    def choose_one(self, groups: Sequence[Group], target_db: float) -> frozenset[str]:
        """Choose the group of the least damage that reaches ``target_db`` by itself, in the trials that are left."""
        return _names(self._first(groups, power(target_db)))

    def forget(self) -> None:
        """Measure every set anew from here on."""
        self.known = {frozenset(): math.inf}

    def noise(self, groups: Sequence[Group]) -> float:
        """Return the noise power of these layers together, relative to the signal's; inf where no trial is left."""
        names = _names(groups)
        if names not in self.known:
            if self.trials >= self.most:
                self.complete = False
                return math.inf
            self.trials += 1
            self.known[names] = self.measure(names)
        return power(self.known[names])

    def _longest_prefix(self, ordered: Sequence[Group], bound: float) -> int:
        if self.noise(ordered) <= bound:
            return len(ordered)
        low, high, turn = 0, len(ordered), 0
        while high - low > 1 and self._may_fit(
            ordered[:low], ordered[low:high], *self._between(ordered, low, high, bound)
        ):
            turn += 1
            guessing = turn % GUESSES and (low or turn < GUESSES)
            middle = self._crossing(ordered, low, high, bound) if guessing else (low + high) // 2
            low, high = (middle, high) if self.noise(ordered[:middle]) <= bound else (low, middle)
        return low

    def _between(self, ordered: Sequence[Group], low: int, high: int, bound: float) -> tuple[float, float]:
        """Return the noise of what is between two measured prefixes, and the room that the shorter one leaves."""
        start = self.noise(ordered[:low])
        return self.noise(ordered[:high]) - start, bound - start

    def _crossing(self, ordered: Sequence[Group], low: int, high: int, bound: float) -> int:
        """Guess the longest prefix within ``bound`` between two measured ones,
        their difference shared out by damage."""
        noise, room = self._between(ordered, low, high, bound)
        if not math.isfinite(noise):
            return (low + high) // 2
        within = room / noise * self._damage(ordered[low:high])
        fitting = sum(self._damage(ordered[low : end + 1]) <= within for end in range(low, high - 1))
        return low + max(1, fitting)

    def _first(self, groups: Sequence[Group], bound: float) -> list[Group]:
        by_damage = sorted(groups, key=lambda group: self._damage([group]))
        return next(([group] for group in by_damage if self.noise([group]) <= bound), [])

    def _grown(self, chosen: list[Group], segment: list[Group], bound: float, noise: float = 0.0) -> list[Group]:
        """Add what fits of a segment. ``noise``: of the segment, as far as trials of others tell it."""
        room = bound - self.noise(chosen)
        if not segment or not self._may_fit(chosen, segment, noise, room):
            return chosen
        together = self.noise([*chosen, *segment])
        if together <= bound:
            return [*chosen, *segment]
        noise = together - self.noise(chosen)
        if len(segment) == 1 or not self._may_fit(chosen, segment, noise, room):
            return chosen
        first, second = _halves(segment)
        grown = self._grown(chosen, first, bound)
        known = self.known.get(_names([*chosen, *first]), math.inf)
        rest = noise - power(known) + self.noise(chosen) if math.isfinite(noise) and known < math.inf else 0.0
        return self._grown(grown, second, bound, rest)

    def _may_fit(self, chosen: Sequence[Group], segment: Sequence[Group], noise: float, room: float) -> bool:
        """Tell whether the group of the least damage may fit, in doubt yes; ``noise`` is that of the whole segment."""
        if self.noise(chosen) > FULL * (self.noise(chosen) + room):
            return False
        if not math.isfinite(noise) or not chosen:
            return True
        if len(segment) == 1:
            return noise <= ADDITIVE * room
        gain = min(self.noise(chosen) / self._damage(chosen), noise / self._damage(segment))
        return gain * min(self._damage([group]) for group in segment) <= DOUBT * room

    def _damage(self, groups: Sequence[Group]) -> float:
        return sum(self.damage[name] for group in groups for name in group)


def power(decibels: float) -> float:
    """Return the noise power, relative to the signal's, of an SNR in dB."""
    return 10 ** (-decibels / 10)


def _names(groups: Sequence[Group]) -> frozenset[str]:
    return frozenset(name for group in groups for name in group)


def _halves(segment: list[Group]) -> tuple[list[Group], list[Group]]:
    middle = (len(segment) + 1) // 2
    return segment[:middle], segment[middle:]


def group_of(name: str) -> str:
    """Return the key of layers decided as one: q, k and v of an attention share it,
    any other layer has its own name."""
    *parent, last = name.split(".")
    return ".".join([*parent, _PROJECTION.sub(r"\1\2qkv", last, count=1)])
