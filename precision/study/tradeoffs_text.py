"""Write the settings that were measured as a table, with the best for each goal and its rules."""

import math

from ..base.modes import label_of
from ..base.options import GOALS, Goal
from ..base.text import paragraph, size_text, table
from ..formats.comfy_format import AS_FILE
from ..report import result
from ..report.result import BAD, GOOD, WARN, Result
from ..report.view import shares
from .analysis_text import decibel_text, whole_decibel_text
from .tradeoffs import CLOSE, FLOORS, Measurements, Tradeoff

TABLE = ("setting", "s/step", "memory", "SNR dB")
REFERENCE = "(reference)"
NOISY = "too noisy to rank"
HEADER = ("  setting", "s/step", "memory", "weights", "SNR dB", "what ran")


def table_text(found: Measurements) -> str:
    """Write the measurements: a head, one line per setting, notes, the best for each goal, and rules for balanced.

    Columns are two or more spaces apart.
    """
    size = " x ".join(map(str, found.shape))
    head = f"{found.device}: {found.model}, weights loaded in {found.storage}; latent {size}, seed {found.seed}"
    rows = [_cells(row, f"{number} {row.names}") for number, row in enumerate(found.rows, 1)]
    rows.append(_cells(found.reference, f"  {found.reference.setting} {REFERENCE}"))
    written = table(rows, HEADER, math.inf)
    return "\n".join(["Halfsafe: precisions measured", head, "", written, "", *_notes(found), "", *_best(found)])


def tradeoffs_result(found: Measurements, text: str) -> Result:
    """Sum the measurements up: the best for balanced in a sentence, and a table of all with the best first."""
    best = found.best.get("balanced")
    rows = [_shown(row, row.names) for row in sorted(found.rows, key=lambda row: row is not best)]
    rows.append(_shown(found.reference, f"{found.reference.setting} {REFERENCE}"))
    if best is None:
        return Result(result.NONE_WORKS, {}, BAD, TABLE, rows, text=text)
    as_loaded = best.storage in (AS_FILE, found.storage)
    values = {
        "weights": result.AS_LOADED if as_loaded else result.HELD_IN.format(best.storage),
        "computed": best.computed,
        "seconds": seconds_text(best.seconds),
        "memory": size_text(best.bytes),
        "close": _closeness(best.snr_db),
    }
    if not found.is_ranked:
        return Result(result.UNRANKED, values, WARN, TABLE, rows, None, text, toast=True)
    if best.snr_db < FLOORS["balanced"]:
        values["floor"] = f"{FLOORS['balanced']:g} dB"
        return Result(result.CLOSEST, values, WARN, TABLE, rows, 0, text, toast=True)
    values["less"] = f"{100 * found.less_memory:.0f} %"
    sentence = result.BEST_SMALL if found.less_memory else result.BEST
    return Result(sentence, values, GOOD, TABLE, rows, 0, text, toast=True)


def _closeness(snr_db: float) -> str:
    return result.SAME_AS_FP32 if snr_db == math.inf else result.FROM_FP32.format(whole_decibel_text(snr_db))


def _cells(row: Tradeoff, name: str) -> list[str]:
    if not row.modes:
        return [name, "-", "-", "-", "-", row.problem]
    weights = ", ".join(f"{storage} {100 * share:.0f} %" for storage, share, _ in shares(row.storages))
    modes = ", ".join(f"{count} in {label_of(mode)}" for mode, _, count in shares(row.modes))
    snr, ran = decibel_text(row.snr_db, "NaN"), row.problem or f"weights {weights}; layers {modes}"
    return [name, seconds_text(row.seconds), size_text(row.bytes), size_text(row.weight_bytes), snr, ran]


def _shown(row: Tradeoff, name: str) -> list[str]:
    """Return the cells that the page shows: without the weights' size, with how far the timed steps lie apart."""
    if "auto" in (row.setting.storage, row.setting.compute) and row.modes:
        name = f"{name} = {row.storage}/{row.computed_by}"
    name, seconds, memory, _, snr, ran = _cells(row, name)
    share = row.spread / row.seconds if row.seconds else 0.0
    spread = f" \u00b1{share * 100:.0f} %" if share >= 0.01 else ""
    noisy = f"\n{NOISY}" if row.is_noisy else ""
    return [name, seconds + spread + noisy, memory, snr, ran]


def seconds_text(seconds: float | None) -> str:
    """Write a time in seconds to three digits: 0.00123, 1.23, 123."""
    return "-" if seconds is None else f"{seconds:.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def _notes(found: Measurements) -> list[str]:
    has_peak = any(row.extra_bytes is not None for row in (found.reference, *found.rows))
    beyond = "and the peak of the device beyond them" if has_peak else "alone: this device does not tell its peak"
    return paragraph((
        "s/step: the median of three euler steps; the first of four, which prepares, is not timed.",
        f"memory: weights {beyond}. as_file: the weights as they are loaded.",
        f"SNR: of the final latent against {found.reference.setting}; 20 dB is an error of 10 %, 30 dB of 3.2 %.",
    ))  # fmt: skip


def _best(found: Measurements) -> list[str]:
    best = found.best
    if not best:
        return ["No setting gave a finite result."]
    floors = ", ".join(f"{goal} {floor:g} dB" for goal, floor in FLOORS.items())
    return [
        f"best per goal (at least {floors}; within {100 * (CLOSE - 1):.0f} % or the spread counts as equal):",
        *(f"  {goal + ':':10}{_choice(best[goal], goal)}" for goal in GOALS),
        "",
        "# balanced as rules, for a loader or Compute Dtype with options on auto:",
        *map(str, found.rules.own),
    ]


def _choice(row: Tradeoff, goal: Goal) -> str:
    short = "" if row.snr_db >= FLOORS.get(goal, -math.inf) else ", below what the goal asks: the closest there is"
    short += f", {NOISY}" if row.is_noisy else ""
    figures = f"{seconds_text(row.seconds)} s/step, {size_text(row.bytes)}, {whole_decibel_text(row.snr_db)}{short}"
    compute = " = ".join(dict.fromkeys((row.setting.compute, row.computed_by)))
    return f"storage {row.storage}, compute {compute} ({figures})"
