"""Search for the largest set of layers that keeps the model's output at the target, in a bounded number of trials."""

import re
from collections.abc import Callable, Sequence

MAX_TRIALS = 32
FREE_TRIALS = 8
_PROJECTION = re.compile(r"(^|_)(w?)(?:[qkv]|kv|query|key|value)(?=_|$)")

Group = tuple[str, ...]


class Search:
    """Trials of sets of layers against a target.

    Args:
        measure: (names, floor) -> SNR in dB end to end; below ``floor`` it may stop early and give any value below.
        target_db: the SNR that a set has to reach.
        max_trials: the most trials to make. The empty set needs none: it is the reference.
    """

    def __init__(self, measure: Callable[[frozenset, float], float], target_db: float, max_trials: int = MAX_TRIALS):
        self.measure = measure
        self.target_db = target_db
        self.max_trials = max_trials
        self.trials = 0
        self.complete = True
        self.known: dict[frozenset[str], float] = {frozenset(): float("inf")}

    def measured(self, names: frozenset[str]) -> float:
        """Measure the SNR of a set in dB, over all calls."""
        return self._trial(names, -float("inf"))

    def _trial(self, names: frozenset[str], floor: float) -> float:
        if names not in self.known:
            self.trials += 1
            self.known[names] = self.measure(names, floor)
        return self.known[names]

    def meets_target(self, groups: Sequence[Group]) -> bool:
        """Tell whether these layers together reach the target; False also when no trial is left."""
        names = frozenset(name for group in groups for name in group)
        if names not in self.known and self.trials >= self.max_trials:
            self.complete = False
            return False
        return self._trial(names, self.target_db) >= self.target_db

    def choose(self, ordered: Sequence[Group]) -> frozenset[str]:
        """Choose a set that met the target in a trial of its own.

        Takes the longest prefix of ``ordered`` that meets the target, then segments of the rest that still meet it on top,
        halving those that fail.
        """
        chosen = list(ordered[: self._longest_prefix(ordered)])
        segments = _halves(list(ordered[len(chosen) :])) if len(ordered) - len(chosen) > 1 else []
        while segments:
            segment = segments.pop(0)
            if self.meets_target([*chosen, *segment]):
                chosen += segment
            elif len(segment) > 1:
                segments[:0] = _halves(segment)
        return frozenset(name for group in chosen for name in group)

    def _longest_prefix(self, ordered: Sequence[Group]) -> int:
        if self.meets_target(ordered):
            return len(ordered)
        low, high = 0, len(ordered)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.meets_target(ordered[:middle]) else (low, middle)
        return low


def _halves(segment: list[Group]) -> list[list[Group]]:
    middle = (len(segment) + 1) // 2
    return [segment[:middle], segment[middle:]]


def group_of(name: str) -> str:
    """Return the key of layers decided as one: q, k and v of an attention share it, any other layer has its own name."""
    *parent, last = name.split(".")
    return ".".join([*parent, _PROJECTION.sub(r"\1\2qkv", last, count=1)])
