"""What the page draws of a report, ready to show: sizes as text, shares, rows of layers, colours,
lines of rules."""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping

from ..base.layer_names import count_patterns, group_name, pattern_of
from ..base.modes import FP8, FP16_ACC16, FP32, MODES
from ..base.text import count_text, size_text
from ..formats.registry import FORMAT_OF_STORAGE
from ..plan.facts import multiplies
from ..plan.rules import patterns


def _hex_of(colour: tuple[int, int, int]) -> str:
    """Write an RGB colour as CSS does: #eea52a."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


OTHER = "#b0a05a"
MODE_COLOURS = {name: _hex_of(mode.colour) for name, mode in MODES.items()}
STORAGE_COLOURS = {
    **{row.storage: _hex_of(row.colour) for row in FORMAT_OF_STORAGE.values()},
    **{name: MODE_COLOURS[name] for name in ("fp16", "bf16", "fp32")},
}
SUM_COLOURS = {"fp32": _hex_of(FP32.colour), "fp16": _hex_of(FP16_ACC16.colour), "fp8_fast": _hex_of(FP8.colour)}


def view_of(report: Mapping) -> dict:
    """Derive what the page shows from a report in its JSON form.

    ``stored`` and ``computed``: shares of storages (by bytes) and modes (by layers that multiply),
    largest first. ``rows``: layers that differ in their block number alone, by their places in
    ``layers``.
    """
    model = report["model"]
    modes = Counter(layer["mode"] for layer in report["layers"] if multiplies(layer["class"]))
    sizes = shares(model["bytes_by_storage"])
    return {
        "parameters": count_text(model["parameters"]),
        "size": size_text(model["weight_bytes"]),
        "stored": [{"name": name, "share": share, "size": size_text(size)} for name, share, size in sizes],
        "computed": [{"name": name, "share": share, "layers": count} for name, share, count in shares(modes)],
        "rows": _rows(report["layers"]),
    }


def shares(amounts: Mapping[str, int]) -> list[tuple[str, float, int]]:
    """Return (name, share of the whole, amount), largest first."""
    total = sum(amounts.values()) or 1
    return [(name, amount / total, amount) for name, amount in Counter(amounts).most_common()]


def _rows(layers: list[dict]) -> list[dict]:
    totals = count_patterns(layer["name"] for layer in layers)
    groups: dict[tuple, list[int]] = defaultdict(list)
    for place, layer in enumerate(layers):
        setup = tuple(value for key, value in layer.items() if key != "name")
        groups[(pattern_of(layer["name"]), *setup)].append(place)
    return [
        {"name": group_name(pattern, [layers[place]["name"] for place in places], totals[pattern]), "layers": places}
        for (pattern, *_), places in groups.items()
    ]


def rules_text(report: Mapping, fixed: Collection[str] = ()) -> str:
    """Write rules that repeat the modes and escalations of a report in its JSON form; empty where
    all layers run alike.

    First the layers whose mode is not the most common one, then the blocks with attention in fp32
    by a rule, then the guard's escalations, which win. ``fixed``: the layers whose mode the model's
    own code sets whatever is asked for.
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
    ruled: dict[str, list[str]] = defaultdict(list)
    for name, mode in modes.items():
        if mode in MODES:
            ruled[MODES[mode].rule].append(name)
    found = ((rule, patterns(members, {*names} - {*members})) for rule, members in ruled.items())
    return [f"{pattern} {rule}" for rule, several in found for pattern, _ in several]
