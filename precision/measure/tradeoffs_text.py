"""Write the settings that were measured as a table, with the best for each goal and its rules."""

import math
from collections.abc import Mapping

from ..analysis.analysis_rules import whole_decibel_text
from ..plan.goal import GOALS
from ..report.result import BAD, BEST, NONE_WORKS, Result
from ..text import size_text, wrapped
from .tradeoffs import CLOSE, FLOORS, Measurements, Row, pareto_front

TABLE = ("setting", "s/step", "memory", "SNR dB", "what ran")
HEADER = ("    setting", "s/step", "memory", "weights", "SNR dB", "what ran")
FRONT = "*"


def table_text(found: Measurements) -> str:
    """Write the measurements: a head, one line per setting, notes, the best for each goal, and rules for balanced.

    Columns are two or more spaces apart.
    """
    return "\n".join([*_head(found), "", *_table(found), "", *_notes(found), "", *_best(found)])


def result_of(found: Measurements, text: str) -> Result:
    """Sum the measurements up: the best for balanced in a sentence, and a table of all."""
    best = found.best.get("balanced")
    rows = [_shown(row, row.names, snr_text(row)) for row in found.rows]
    rows.append(_shown(found.reference, f"{found.reference.setting} (reference)", "-"))
    if best is None:
        return Result(NONE_WORKS, {}, BAD, TABLE, rows, text=text)
    values = {
        "setting": f"{best.storage}/{_used(best)}",
        "seconds": seconds_text(best.seconds),
        "memory": size_text(best.bytes),
        "snr": whole_decibel_text(best.snr_db),
    }
    return Result(BEST, values, head=TABLE, rows=rows, marked=list(found.rows).index(best), text=text)


def _used(row: Row) -> str:
    """Name what most layers multiply in: what ``auto`` stood for."""
    return max(row.modes, key=lambda mode: row.modes[mode], default=row.setting.compute)


def _shown(row: Row, name: str, snr: str) -> list[str]:
    _, seconds, memory, _, snr, ran = _cells(row, name, snr)
    return [name, seconds + spread_text(row), memory, snr, ran]


def spread_text(row: Row) -> str:
    """Write how far the timed steps lie from their median, " ±4 %"; empty below 1 %."""
    share = row.spread / row.seconds if row.seconds else 0.0
    return f" \u00b1{share:.0%}".replace("%", " %") if share >= 0.01 else ""


def _head(found: Measurements) -> list[str]:
    size = " x ".join(map(str, found.shape))
    return [
        "Halfsafe: precisions measured",
        f"{found.device}: {found.model}, weights loaded in {found.storage}; latent {size}, seed {found.seed}",
    ]


def _table(found: Measurements) -> list[str]:
    front = {row.setting for row in pareto_front(found.rows)}
    rows: list[tuple[str, ...]] = [HEADER]
    for number, row in enumerate(found.rows, 1):
        rows.append(_cells(row, f"{FRONT if row.setting in front else ' '} {number} {row.names}", snr_text(row)))
    rows.append(_cells(found.reference, f"    {found.reference.setting} (reference)", "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER) - 1)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:-1], widths[1:]), row[-1]]) for row in rows]


def _cells(row: Row, name: str, snr: str) -> tuple[str, ...]:
    if not row.modes:
        return name, "-", "-", "-", "-", str(row.problem or "")
    ran = f"weights {shares_text(row.storages)}; layers {counts_text(row.modes)}"
    return (
        name,
        seconds_text(row.seconds),
        size_text(row.bytes),
        size_text(row.weight_bytes),
        snr,
        str(row.problem or ran),
    )


def seconds_text(seconds: float | None) -> str:
    """Write a time in seconds to three digits: 0.00123, 1.23, 123."""
    return "-" if seconds is None else f"{seconds:.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def snr_text(row: Row) -> str:
    """Write an SNR in dB: 31.5, "exact" for no error, "NaN" for a result that is not finite, "-" for none."""
    if row.snr_db is None:
        return "-"
    return f"{row.snr_db:.1f}" if math.isfinite(row.snr_db) else "exact" if row.snr_db > 0 else "NaN"


def shares_text(sizes: Mapping[str, int]) -> str:
    """Write shares of a whole, largest first: "int8 93 %, bf16 7 %"."""
    total = sum(sizes.values()) or 1
    return ", ".join(
        f"{name} {size / total:.0%}".replace("%", " %")
        for name, size in sorted(sizes.items(), key=lambda item: -item[1])
    )


def counts_text(counts: Mapping[str, int]) -> str:
    """Write counts, largest first: "int8 40, bf16 21"."""
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))


def _notes(found: Measurements) -> list[str]:
    has_peak = any(row.extra_bytes is not None for row in (found.reference, *found.rows))
    memory = (
        "weights and the peak of the device beyond them"
        if has_peak
        else "weights alone: this device does not tell its peak"
    )
    notes = (
        "s/step: the median of three euler steps; the first of four, which prepares, is not timed.",
        f"memory: {memory}. as_file: the weights as they are loaded.",
        f"SNR: of the final latent against {found.reference.setting}; 20 dB is an error of 10 %, 30 dB of 3.2 %.",
        f"{FRONT}: no other setting here is as fast, as small and as close.",
    )
    return [line for note in notes for line in wrapped(note, "")]


def _best(found: Measurements) -> list[str]:
    best = found.best
    if not best:
        return ["No setting gave a finite result."]
    floors = ", ".join(f"{goal} {floor:g} dB" for goal, floor in FLOORS.items())
    lines = [f"best per goal (at least {floors}; within {CLOSE - 1:.0%} counts as equal):".replace("%", " %")]
    lines += [f"  {goal + ':':10}{_choice(best[goal], goal)}" for goal in GOALS]
    return [
        *lines,
        "",
        "# balanced as rules, for a loader or Compute Dtype with options on auto:",
        *map(str, found.rules.own),
    ]


def _choice(row: Row, goal: str) -> str:
    short = "" if row.snr_db >= FLOORS.get(goal, -math.inf) else ", below what the goal asks: the closest there is"
    figures = f"{seconds_text(row.seconds)} s/step, {size_text(row.bytes)}, {whole_decibel_text(row.snr_db)}{short}"
    return f"storage {row.storage}, compute {row.setting.compute} ({figures})"
