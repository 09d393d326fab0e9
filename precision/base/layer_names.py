"""Names of repeated layers: patterns, and groups of layers that share one."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

BLOCK_WORDS = ("block", "blocks", "layer", "layers")


def pattern_of(name: str) -> str:
    """Replace block numbers in a layer name by ``*``: the first number, and any after a word like blocks or layers."""
    parts, seen = name.split("."), False
    for place, part in enumerate(parts):
        if part.isdecimal() and len(part) < 10 and (not seen or parts[place - 1].split("_")[-1] in BLOCK_WORDS):
            parts[place], seen = "*", True
    return ".".join(parts)


def block_of(name: str) -> str:
    """Return the outermost numbered block a layer is in, its name up to the first number; "" outside of them."""
    parts = name.split(".")
    ends = [place for place, part in enumerate(parts, 1) if part.isdecimal()]
    return ".".join(parts[: ends[0]]) if ends else ""


def count_patterns(names: Iterable[str]) -> Counter[str]:
    """Count the names that share each pattern."""
    return Counter(map(pattern_of, names))


def by_pattern(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by their pattern, in the order given."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[pattern_of(name)].append(name)
    return groups


def are_alike(kinds: Mapping[str, object], names: Iterable[str]) -> bool:
    """True if layers that share a pattern have the same kind; a name missing from ``kinds`` has none."""
    return all(len({kinds.get(name) for name in members}) == 1 for members in by_pattern(names).values())


def group_name(pattern: str, members: list[str], total: int) -> str:
    """Name some of the ``total`` layers that share a pattern:
    ``blocks.*.ffn.0``, or ``blocks.[0-2,39].ffn.0`` for a part."""
    if len(members) == 1:
        return members[0]
    if len(members) == total or pattern.count("*") != 1:
        return pattern
    number = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    numbers = (int(found[1]) for member in members if (found := number.fullmatch(member)))
    return pattern.replace("*", f"[{_number_ranges(numbers)}]")


def grouped(names: Iterable[str], totals: Counter[str]) -> list[str]:
    """Join names by pattern, with their number: ``blocks.*.ffn.0 x30``,
    or ``... x2 of 6`` where the numbers do not show."""
    return [_counted(pattern, members, totals[pattern]) for pattern, members in by_pattern(names).items()]


def _counted(pattern: str, members: list[str], total: int) -> str:
    name = group_name(pattern, members, total)
    if len(members) == 1:
        return name
    return f"{name} x{len(members)}" + (f" of {total}" if name == pattern and len(members) < total else "")


def _number_ranges(numbers: Iterable[int]) -> str:
    """Write numbers as ranges: [0, 1, 2, 39] -> "0-2,39"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def plain_name(name: str) -> str:
    """Return a module's name without the parts that torch.compile adds."""
    # torch.compile holds the module it compiled as ``_orig_mod`` (torch/_dynamo/eval_frame.py, OptimizedModule).
    return name.replace("_orig_mod.", "").removesuffix("._orig_mod")
