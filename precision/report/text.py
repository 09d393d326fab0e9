"""The report as plain text: repeated layers are told once, with the blocks they are in."""

import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable

WIDTH = 100
NAME_WIDTH = 44
BLOCK_WORDS = ("block", "blocks", "layer", "layers")
SETUP = ("class", "storage", "mode", "accumulation", "stream")
HEADINGS = ("class", "storage", "mode", "sums", "stream")


def report_text(report: dict) -> str:
    """The text of a report in its JSON form. No line is longer than 100 columns, unless one word is."""
    sections = (
        _head(report), _without_effect(report["without_effect"]), _notes(report["notes"]), _storage(report),
        _layers(report["layers"]), _kept(report), _flags(report["flags"]), _guard(report["guard"]),
    )  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _head(report: dict) -> list[str]:
    device, model = report["device"], report["model"]
    lines = ["Halfsafe report", "==============="]
    if device:
        simulated = " (simulated)" if device["simulated"] else ""
        lines.append(f"Device  {device['name']}, profile {device['profile']}{simulated}")
        lines += wrapped(capability_line(device["capabilities"]), "        ")
    size = f"{amount(model['parameters'])} parameters, {size_text(model['weight_bytes'])}"
    lines.append(f"Model   {model['class'] or 'unknown class'}, {size} of weights")
    for name, decision in report["decisions"].items():
        lines += wrapped(f"{name}: {decision}", "        ")
    return lines


def _notes(notes: list[str]) -> list[str]:
    return ["Notes", *(line for note in notes for line in wrapped(note, "  "))] if notes else []


def capability_line(capabilities: dict[str, bool]) -> str:
    """ "can: bf16, fp8_storage; cannot: fp8_matmul"."""
    can = [name for name, on in capabilities.items() if on]
    cannot = [name for name, on in capabilities.items() if not on]
    return f"can: {', '.join(can) or 'nothing'}; cannot: {', '.join(cannot) or 'nothing'}"


def _storage(report: dict) -> list[str]:
    by_storage = report["model"]["bytes_by_storage"]
    if not by_storage:
        return []
    total = sum(by_storage.values()) or 1
    counts = defaultdict(int)
    for layer in report["layers"]:
        counts[layer["storage"]] += 1
    lines = [f"{'Storage':<16}{'layers':>8}{'bytes':>14}{'share':>8}"]
    for storage, size in sorted(by_storage.items(), key=lambda item: -item[1]):
        lines.append(f"{storage:<16}{counts[storage] or '-':>8}{size_text(size):>14}{size / total:>8.1%}")
    return lines


def _layers(layers: list[dict]) -> list[str]:
    if not layers:
        return []
    setups: dict[tuple, list[str]] = defaultdict(list)
    for layer in layers:
        setups[(*(layer[key] for key in SETUP), layer["reason"])].append(layer["name"])
    totals = count_patterns(layer["name"] for layer in layers)
    lines = [f"Layers ({len(layers)})".ljust(NAME_WIDTH + 2) + _columns(HEADINGS)]
    for (*setup, reason), names in setups.items():
        for group in grouped(names, totals):
            lines += _layer_lines(group, setup)
        lines += wrapped(reason, "      ")
    return lines


def _columns(values: Iterable[str]) -> str:
    return " ".join(f"{value:<{width}}" for value, width in zip(values, (12, 12, 11, 5, 6), strict=True)).rstrip()


def _layer_lines(name: str, setup: list[str]) -> list[str]:
    columns = _columns(value[:12] for value in setup)
    if len(name) <= NAME_WIDTH - 2:
        return [f"  {name:<{NAME_WIDTH}}{columns}"]
    return [f"  {name}", " " * (NAME_WIDTH + 2) + columns]


def pattern_of(name: str) -> str:
    """The name with block numbers as ``*``: the first number, and any that follows a word like blocks or layers."""
    parts, seen = name.split("."), False
    for place, part in enumerate(parts):
        if part.isdecimal() and len(part) < 10 and (not seen or parts[place - 1].split("_")[-1] in BLOCK_WORDS):
            parts[place], seen = "*", True
    return ".".join(parts)


def count_patterns(names: Iterable[str]) -> dict[str, int]:
    """How many of the names have each pattern."""
    totals: dict[str, int] = defaultdict(int)
    for name in names:
        totals[pattern_of(name)] += 1
    return totals


def grouped(names: list[str], totals: dict[str, int]) -> list[str]:
    """Names joined by pattern: ``blocks.*.ffn.0 x30``, or ``blocks.[0-2,39].ffn.0 x4`` when others differ."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[pattern_of(name)].append(name)
    return [_group_name(pattern, members, totals[pattern]) for pattern, members in groups.items()]


def _group_name(pattern: str, members: list[str], total: int) -> str:
    if len(members) == 1:
        return members[0]
    if len(members) == total:
        return f"{pattern} x{total}"
    if pattern.count("*") == 1:
        return f"{pattern.replace('*', f'[{ranges(_numbers(pattern, members))}]')} x{len(members)}"
    return f"{pattern} x{len(members)} of {total}"


def _numbers(pattern: str, members: list[str]) -> list[int]:
    number = re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
    return [int(number.fullmatch(member)[1]) for member in members]


def ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 39] -> "0-2,39"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _kept(report: dict) -> list[str]:
    kept = report["kept_high"]
    if not kept:
        return []
    reasons: dict[str, list[str]] = defaultdict(list)
    for entry in kept:
        reasons[entry["reason"]].append(entry["name"])
    totals = count_patterns({entry["name"] for entry in (*kept, *report["layers"])})
    lines = [f"Kept in high precision ({len(kept)})"]
    for reason, names in reasons.items():
        lines += wrapped(", ".join(grouped(names, totals)), "  ")
        lines += wrapped(reason, "      ")
    return lines


def _flags(flags: dict[str, dict]) -> list[str]:
    """The flags somebody asked for; the JSON has them all."""
    flags = {name: flag for name, flag in flags.items() if flag["requested"] != "unchanged"}
    if not flags:
        return []
    lines = [f"{'Flags':<32}{'requested':<12}{'in scope':<10}{'outside'}"]
    for name, flag in flags.items():
        states = f"{switch(flag['in_scope']):<10}{switch(flag['outside']):<10}"
        lines += [f"  {name:<30}{flag['requested']:<12}{states}".rstrip(), *wrapped(flag["reason"], "      ")]
    return lines


def switch(value: bool | None) -> str:
    """on, off, or "-" when torch does not say."""
    return "-" if value is None else "on" if value else "off"


def _without_effect(entries: list[dict]) -> list[str]:
    lines = ["Without effect here"] if entries else []
    for entry in entries:
        lines += wrapped(f"{entry['setting']}: {entry['reason']}", "  ")
    return lines


def _guard(guard: dict) -> list[str]:
    if guard["verdict"] == "off":
        return []
    lines = [f"Guard: {guard['verdict']} ({guard['calls']} calls, {guard['extra_calls']} repeated)"]
    for layer, mode in guard["escalations"].items():
        lines += wrapped(f"{layer} -> {mode}", "  ")
    for event in guard["events"]:
        lines += wrapped(_event(event), "  ")
    if guard["rules"]:
        lines += ["  As rules for Layer Rules and Compute Dtype:", *(f"      {rule}" for rule in guard["rules"].splitlines())]
    return [*lines, *wrapped(guard["advice"], "  ")] if guard["advice"] else lines


def _event(event: dict) -> str:
    sigma = "unknown" if event["sigma"] is None else f"{event['sigma']:.4g}"
    rows = ", ".join(str(row) for row in event["batch_rows"])
    outcome = "recovered" if event["recovered"] else "not recovered"
    op = f" ({event['op']})" if event["op"] else ""
    where = f"step {event['step']}, sigma {sigma}, call {event['call']}: {event['kind']} in {event['layer']}{op}"
    return f"{where}, batch rows {rows or 'all'}, {event['from']} -> {event['to']}, {outcome}"


def wrapped(text: str, indent: str) -> list[str]:
    """Lines of at most 100 columns; none for an empty text."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def size_text(count: int) -> str:
    """Bytes as GiB, MiB or KiB."""
    for unit, size in (("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def amount(count: int) -> str:
    """A count in billions or millions: 1.42 B, 35 M."""
    if count >= 1e9:
        return f"{count / 1e9:.2f} B"
    return f"{count / 1e6:.1f} M" if count >= 1e6 else f"{count}"
