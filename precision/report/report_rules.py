"""A report as lines for Layer Rules: what runs in another mode than most, and what the guard has changed."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from ..base.layer_names import pattern_of
from ..base.modes import MODES
from ..plan.facts import multiplies
from ..plan.rules import compile_pattern


def rules_text(report: Mapping, fixed: Collection[str] = ()) -> str:
    """Write rules that repeat the modes and escalations of a report in its JSON form; empty where all layers run alike.

    First the layers whose mode is not the most common one, then the blocks with attention in fp32 by a rule, then the
    guard's escalations, which win. ``fixed``: the layers whose mode the model's own code sets whatever is asked for.
    """
    asked = (layer for layer in report["layers"] if multiplies(layer["class"]) and layer["name"] not in fixed)
    modes = {layer["name"]: layer["mode"] for layer in asked}
    guard, usual = report["guard"], Counter(modes.values()).most_common(1)
    escalations = guard["escalations"]
    others = {name: mode for name, mode in modes.items() if mode != usual[0][0] and name not in escalations}
    escalated = [f"{line}  # escalated by the guard" for line in guard["rules"].splitlines()]
    attention = [f"{block} attention=fp32" for block in report["attention_in_fp32"]]
    return "\n".join([*_mode_lines(others, [layer["name"] for layer in report["layers"]]), *attention, *escalated])


def _mode_lines(modes: Mapping[str, str], names: list[str]) -> list[str]:
    """Write a line per layer, or a single line for the layers of a pattern where no other of ``names`` matches."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, mode in modes.items():
        if mode in MODES and MODES[mode].rule:
            groups[pattern_of(name), mode].append(name)
    lines = []
    for (pattern, mode), members in groups.items():
        match = compile_pattern(pattern)
        one_line = len(members) > 1 and sum(bool(match(name, "")) for name in names) == len(members)
        lines += [f"{glob} {MODES[mode].rule}" for glob in ([pattern] if one_line else members)]
    return lines
