"""Write a report as plain text, repeated layers once with the blocks they are in."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from ..base.layer_names import count_patterns, grouped
from ..base.text import WIDTH, count_text, hanging, on_off, paragraph, size_text, table, wrapped
from .view import shares

LONGEST = 12
SETUP = ("class", "storage", "mode", "accumulation", "stream", "kernel")
HEADINGS = ("class", "storage", "mode", "sums", "stream", "kernel")


def report_text(report: dict) -> str:
    """Write a report, given in its JSON form, in lines of at most 80 columns unless one word is
    longer."""
    sections = (
        _head(report), _without_effect(report["without_effect"]), _notes(report["notes"]), _storage(report),
        _layers(report["layers"]), _kept(report), _flags(report["flags"]), _guard(report["guard"]),
        _encoders(report["encoders"]), *map(_control, report["control_nets"]),
    )  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _head(report: dict) -> list[str]:
    device, model = report["device"], report["model"]
    lines = ["Halfsafe report", "==============="]
    if device:
        lines += hanging("Device  ", _device(device))
        can, cannot = (
            ", ".join(name for name, on in device["capabilities"].items() if on is wanted) or "nothing"
            for wanted in (True, False)
        )
        lines += wrapped(f"in hardware: {can}; emulated or absent: {cannot}", "        ")
    size = f"{count_text(model['parameters'])} parameters, {size_text(model['weight_bytes'])}"
    lines += hanging("Model   ", f"{model['class'] or 'unknown class'}, {size} of weights")
    return lines + paragraph((f"{name}: {why}" for name, why in report["decisions"].items()), "        ")


def _device(device: dict) -> str:
    host = f", host {device['host']}" if device.get("host") else ""
    if not device["simulated"]:
        return f"{device['name']}, profile {device['profile']}{host}"
    return f"{device['label']}, profile {device['profile']}, simulated on {device['name']}{host}"


def _notes(notes: list[str]) -> list[str]:
    return ["Notes", *paragraph(notes, "  ")] if notes else []


def _storage(report: dict) -> list[str]:
    by_storage = report["model"]["bytes_by_storage"]
    if not by_storage:
        return []
    counts = Counter(layer["storage"] for layer in report["layers"])
    rows = [
        (storage, f"{counts[storage] or '-'}", size_text(size), f"{share:.1%}")
        for storage, share, size in shares(by_storage)
    ]
    return [table(rows, ("Storage", "layers", "bytes", "share"))]


def _layers(layers: list[dict]) -> list[str]:
    if not layers:
        return []
    setups: dict[tuple, list[str]] = defaultdict(list)
    for layer in layers:
        setups[(*(layer[key] for key in SETUP), layer["reason"])].append(layer["name"])
    totals = count_patterns(layer["name"] for layer in layers)
    widths = [max(map(len, column)) for column in zip(HEADINGS, *(_cells(setup) for setup in setups), strict=True)]
    lines = [_row(f"Layers ({len(layers)})", HEADINGS, widths)]
    for setup, names in setups.items():
        for name in grouped(names, totals):
            fits = len(name) + 3 <= WIDTH - sum(widths) - len(widths)
            lines += [] if fits else [f"  {name}"]
            lines.append(_row(f"  {name}" if fits else "", _cells(setup), widths))
        lines += wrapped(setup[-1], "      ")
    return lines


def _cells(setup: tuple) -> list[str]:
    return [value[:LONGEST] for value in setup[: len(SETUP)]]


def _row(name: str, cells: Iterable[str], widths: Sequence[int]) -> str:
    columns = " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{name:<{WIDTH - len(columns)}}{columns}".rstrip()


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
    flags = {name: flag for name, flag in flags.items() if flag["requested"] != "unchanged"}
    if not flags:
        return []
    rows = [
        (f"  {name}", flag["requested"], on_off(flag["in_scope"]), on_off(flag["outside"]), flag["reason"])
        for name, flag in flags.items()
    ]
    return [table(rows, ("Flags", "requested", "in scope", "outside", ""))]


def _without_effect(entries: list[dict]) -> list[str]:
    lines = paragraph((f"{entry['setting']}: {entry['reason']}" for entry in entries), "  ")
    return ["Without effect here", *lines] if entries else []


def _guard(guard: dict) -> list[str]:
    if guard["verdict"] == "off":
        return []
    verdict = verdict_shown(guard["verdict"], [event["kind"] for event in guard["events"]], guard["calls"])
    lines = [f"Guard: {verdict} ({guard['calls']} calls, {guard['extra_calls']} repeated)"]
    lines += paragraph((f"{layer} -> {mode}" for layer, mode in guard["escalations"].items()), "  ")
    lines += paragraph([*map(_event_text, guard["events"]), *map(check_text, guard["checks"])], "  ")
    if guard["rules"]:
        lines.append("  As rules for Layer Rules and Compute Dtype:")
        lines += [f"      {rule}" for rule in guard["rules"].splitlines()]
    return [*lines, *wrapped(guard["advice"], "  ")] if guard["advice"] else lines


def verdict_shown(verdict: str, kinds: Sequence[str] = (), calls: int = 1) -> str:
    """Return what people read as the verdict of a guard, given the kinds of its events and the
    calls that it checked.

    "not run yet" where nothing was checked; "drift" where nothing was NaN and an event's kind is
    drift; "no result" where a run ended without NaN before its result; "not cured" where a guard
    may have been to tell alone, and nothing was stopped.
    """
    if verdict == "clean":
        return "drift" if "drift" in kinds else verdict if calls else "not run yet"
    if verdict == "stopped":
        return "no result" if {*kinds} <= {"drift"} else "not cured"
    return verdict.replace("_", " ")


def _encoders(encoders: list[dict]) -> list[str]:
    lines = ["Guards of VAEs and text encoders in this prompt"] if encoders else []
    for encoder in encoders:
        is_idle = encoder["verdict"] == "clean" and not encoder["calls"]
        verdict = verdict_shown("clean", calls=0) if is_idle else encoder["verdict"]
        lines += wrapped(f"{encoder['kind']} (node {encoder['node']}): {verdict}", "  ")
        lines += paragraph([*encoder["messages"], encoder["advice"]], "      ")
    return lines


def _control(control: dict) -> list[str]:
    ran = "" if control["calls"] is None else f", ran {control['calls']} times"
    decided = (f"{name}: {why}" for name, why in control["decisions"].items())
    lines = wrapped(f"ControlNet {control['file']}: {control['class']}{ran}", "")
    lines += paragraph([*decided, *control["notes"]], "  ")
    return [*lines, *_without_effect(control["without_effect"]), *_layers(control["layers"]), *_kept(control)]


def check_text(check: dict) -> str:
    """Describe one comparison with fp32 in a line. An infinite SNR is null in the JSON."""
    if check["left_out"]:
        return f"{_when(check)}not compared with fp32. {check['left_out']}"
    blocks = ", ".join(f"{block['name']} {_decibels(block['snr_db'])}" for block in check["blocks"])
    expected = f"{check['arithmetic']}, at least {_decibels(check['threshold_db'])} expected"
    lowest = f"; lowest after {blocks}" if blocks else ""
    return f"{_when(check)}{_decibels(check['snr_db'])} from fp32 ({expected}){lowest}"


def _decibels(value: float | None) -> str:
    return "equal" if value in (None, math.inf) else f"{value:.1f} dB"


def _event_text(event: dict) -> str:
    """Describe an event of the guard in a line."""
    if event["kind"] == "drift":
        where = " in ".join(filter(None, [event["op"], event["layer"]]))
        return f"{_when(event)}drift: {where}. {event['evidence']} {event['advice']}"
    rows = ", ".join(str(row) for row in event["batch_rows"])
    op = f" ({event['op']})" if event["op"] and event["op"] != event["layer"] else ""
    modes = f"{event['from']} -> {event['to']}" if event["from"] else ""
    outcome = "recovered" if event["recovered"] else "not recovered"
    what = f"{_when(event)}{event['kind']} in {event['layer'] or 'the model'}{op}"
    parts = [what, f"batch rows {rows or 'all'}", modes, outcome]
    return ", ".join(filter(None, parts)) + (f". {event['evidence']}" if event["evidence"] else "")


def _when(event: dict) -> str:
    if event["sigma"] is None:
        return f"call {event['call']}: " if event["call"] else ""
    return f"step {event['step']}, sigma {event['sigma']:.4g}, call {event['call']}: "
