"""Write the settings that were measured as a table, with the best for each goal and its rules."""

import json
import math

from ..base.message import Message, joined
from ..base.modes import label_of
from ..base.options import GOALS, Goal
from ..base.text import paragraph, size_text, table
from ..report import result
from ..report.result import BAD, GOOD, WARN, Result
from ..report.view import shares
from .analysis_text import decibel_text, error_text, whole_decibel_text
from .tradeoffs import CLOSE, FLOORS, Measurements, Setting, Tradeoff

TABLE = ("setting", "s/step", "memory", "SNR dB")
SHARED = ("card", "driver", "torch", "model", *TABLE)
REFERENCE = "(reference)"
NOISY = "too noisy to rank"
NOT_FASTER = "no gain over the reference"
CHOICES: tuple[Goal, ...] = ("speed", "memory", "quality")
"""The goals that the page offers, in the order of its rows: the fastest, the smallest, the
closest."""
HEADER = ("  setting", "s/step", "memory", "weights", "SNR dB", "what ran")


def tradeoffs_result(found: Measurements) -> Result:
    """Sum the measurements up: the best for balanced in a sentence, a table of all with the best
    first, and a text with the best for each goal and its rules."""
    text = _text(found)
    best = found.best.get("balanced")
    rows = [_shown(row, found, row.names) for row in sorted(found.rows, key=lambda row: row is not best)]
    rows.append(_shown(found.reference, found, f"{found.reference.setting} {REFERENCE}"))
    if best is None:
        return _without_best(found, rows, text)
    copied, choices = _shared_rows(found), _choices(found)
    values = {
        "name": _name(best, found),
        "time": _time(best, found.beside),
        "memory": _memory(best, found.beside),
        "close": _closeness(best, found),
    }
    if best.snr_db < FLOORS["balanced"]:
        values["floor"] = error_text(FLOORS["balanced"])
        told, tone, use = [result.CLOSEST, result.IS_CLOSEST, result.FIGURES], WARN, None
    else:
        told, tone, use = [result.BEST, result.FIGURES], GOOD, _use(best, found)
    message = joined(Message(sentence, **values) for sentence in told)
    return Result(message, tone, TABLE, rows, 0, text, toast=True, use=use, copied=copied, best=choices)


def _text(found: Measurements) -> str:
    """Write the measurements: a head, one line per setting, notes, the best for each goal, and
    rules for balanced.

    Columns are two or more spaces apart.
    """
    head = f"{found.device}: {found.model}, {_weights(found)}; latent {_size(found)}, seed {found.seed}"
    rows = [_cells(row, found, f"{number} {row.names}") for number, row in enumerate(found.rows, 1)]
    rows.append(_cells(found.reference, found, f"  {found.reference.setting} {REFERENCE}"))
    written = table(rows, HEADER, math.inf)
    return "\n".join(["Halfsafe: precisions measured", head, "", written, "", *_notes(found), "", *_best(found)])


def _use(row: Tradeoff, found: Measurements) -> dict[str, str]:
    """Return the options of a loader for a row, and the rule that computes so."""
    return {"storage": row.storage, "compute": row.setting.compute, "rules": row.compute_rule(found.automatic)}


def _choices(found: Measurements) -> list[dict[str, object]]:
    """List the fastest, the smallest and the closest row with their figures as numbers; once if
    they are the same."""
    chosen: dict[Setting, tuple[Tradeoff, list[Goal]]] = {}
    for goal in CHOICES:
        if row := found.best.get(goal):
            chosen.setdefault(row.setting, (row, []))[1].append(goal)
    return [
        {
            "goals": goals,
            "name": "/".join(dict.fromkeys((found.storage if found.is_as_file(row) else row.storage, row.computed_by))),
            "seconds": row.seconds,
            "spread": row.spread,
            "bytes": row.bytes,
            "error": 0.0 if math.isinf(row.snr_db) else 10 ** (-row.snr_db / 20),
            "use": _use(row, found),
        }
        for row, goals in chosen.values()
    ]


def _shared_rows(found: Measurements) -> str:
    """Write what worked, and the reference, as rows of the table in docs/devices.md, and the same
    as JSON, for others to read. Times have their spread."""
    about = (*found.machine, f"{found.model}, latent {_size(found)}")
    named = [(str(row.setting), row) for row in found.rows if row.works]
    named += [(f"{found.reference.setting} {REFERENCE}", found.reference)] if named else []
    rows = [(*about, name, _seconds(row), size_text(row.bytes), decibel_text(row.snr_db, "NaN")) for name, row in named]
    lines = [f"| {' | '.join(cells)} |" for cells in (SHARED, ["---"] * len(SHARED), *rows)]
    return "\n".join([*lines, "", json.dumps([dict(zip(SHARED, cells, strict=True)) for cells in rows])])


def _without_best(found: Measurements, rows: list[list[str]], text: str) -> Result:
    """Return the smallest and the most accurate setting, which need no times, and why none is best;
    no setting where none works."""
    smallest, closest = (found.best.get(goal) for goal in ("memory", "quality"))
    if smallest is None:
        return Result(result.NONE_WORKS, BAD, TABLE, rows, text=text)
    values = {
        "small": joined([_name(smallest, found), size_text(smallest.bytes)], ", "),
        "closest": joined([_name(closest, found), _closeness(closest, found)], ", "),
    }
    values |= {} if found.is_noisy else {"reference": str(found.reference.setting)}
    told = (result.UNRANKED if found.is_noisy else result.NO_GAIN, result.SMALLEST, result.NEAREST)
    message, copied = joined(Message(sentence, **values) for sentence in told), _shared_rows(found)
    return Result(message, WARN, TABLE, rows, None, text, toast=True, copied=copied, best=_choices(found))


def _name(row: Tradeoff, found: Measurements) -> str:
    """Name the formats of a row: "int8, computed in bf16", or one where both are the same."""
    stored = found.storage if found.is_as_file(row) else row.storage
    return stored if stored == row.computed_by else Message(result.COMPUTED_IN, stored, row.computed_by)


def _time(row: Tradeoff, beside: Tradeoff | None) -> str:
    if beside is None:
        return Message(result.A_STEP, seconds_text(row.seconds))
    return Message(result.A_STEP_BESIDE, seconds_text(row.seconds), beside.computed_by, seconds_text(beside.seconds))


def _memory(row: Tradeoff, beside: Tradeoff | None) -> str:
    own = size_text(row.bytes)
    other = own if beside is None else size_text(beside.bytes)
    return own if own == other else f"{own} ({other})"


def _closeness(row: Tradeoff, found: Measurements) -> str:
    error = Message(result.ERROR if found.is_of_file else result.ERROR_AS_LOADED, error_text(row.snr_db))
    return joined([_cosines(row, found), error], ", ")


def _cosines(row: Tradeoff, found: Measurements) -> str:
    """Return the mean and the least cosine of a row over several seeds; empty for one seed."""
    if found.seeds == 1 or not row.cosines:
        return ""
    mean = f"{sum(row.cosines) / len(row.cosines):.4f}"
    least = f"{row.cosines[row.worst]:.4f}"
    return Message(result.COSINES, mean=mean, count=found.seeds, least=least, seed=found.seed + row.worst)


def _cells(row: Tradeoff, found: Measurements, name: str) -> list[str]:
    if not row.modes:
        return [name, "-", "-", "-", "-", row.problem]
    weights = ", ".join(f"{storage} {100 * share:.0f} %" for storage, share, _ in shares(row.storages))
    modes = ", ".join(f"{count} in {label_of(mode)}" for mode, _, count in shares(row.modes))
    cosines = _cosines(row, found)
    snr, ran = decibel_text(row.snr_db, "NaN"), row.problem or f"weights {weights}; layers {modes}"
    ran = joined([ran, cosines], "; ")
    return [name, _seconds(row), size_text(row.bytes), size_text(row.weight_bytes), snr, ran]


def _seconds(row: Tradeoff) -> str:
    """Write the time of a step, and how far the timed steps lie from it where that is 1 % or
    more."""
    share = row.spread / row.seconds if row.seconds else 0.0
    return seconds_text(row.seconds) + (f" \u00b1{share * 100:.0f} %" if share >= 0.01 else "")


def _shown(row: Tradeoff, found: Measurements, name: str) -> list[str]:
    """Return the cells that the page shows: without the weights' size, with a word on a time that
    ranks nothing."""
    if "auto" in (row.setting.storage, row.setting.compute) and row.modes:
        name = f"{name} = {row.storage}/{row.computed_by}"
    name, seconds, memory, _, snr, ran = _cells(row, found, name)
    return [name, joined([seconds, NOISY if row.is_noisy else ""], "\n"), memory, snr, ran]


def _size(found: Measurements) -> str:
    return " x ".join(map(str, found.shape))


def _weights(found: Measurements) -> str:
    """Return the source of the settings."""
    if not found.is_of_file:
        return f"weights as loaded, in {found.storage}: their file is not known"
    other = "" if found.given == found.storage else f" (loaded in {found.given}, measured from the file)"
    return f"weights of the file in {found.storage}{other}"


def seconds_text(seconds: float | None) -> str:
    """Write a time in seconds to three digits: 0.00123, 1.23, 123."""
    return "-" if seconds is None else f"{seconds:.0f}" if seconds >= 100 else f"{seconds:#.3g}"


def _notes(found: Measurements) -> list[str]:
    has_peak = any(row.extra_bytes is not None for row in (found.reference, *found.rows))
    beyond = "plus the peak of other device memory" if has_peak else "alone: this device reports no peak"
    return paragraph((
        "s/step: the median of four euler steps, three in a first turn of all settings and one in a second turn, in "
        "reverse order; the first step of each run is a warm-up. \u00b1: the farthest of the four.",
        f"memory: weights {beyond}. as_file: the weights as in the file.",
        f"SNR: of the final latent against {found.reference.setting}; 20 dB is an error of 10 %, 30 dB of 3.2 %.",
        *_twins(found),
        "It took {:.0f} s: {:.0f} s in the sampler, the rest made and moved weights.".format(*found.took),
    ))  # fmt: skip


def _twins(found: Measurements) -> list[str]:
    twins = [str(row.setting) for row in found.rows if row.works and row.computes_as(found.reference)]
    if not twins:
        return []
    differ = "differ by more than the spread: the times rank nothing." if found.has_drifted else "agree."
    return [f"{', '.join(twins)} and the reference compute the same; their times {differ}"]


def _best(found: Measurements) -> list[str]:
    if not found.best:
        return ["No setting gave a finite result."]
    floors = ", ".join(f"{goal} {floor:g} dB" for goal, floor in FLOORS.items())
    return [
        f"best per goal (at least {floors}; within {100 * (CLOSE - 1):.0f} % or the spread counts as equal):",
        *(f"  {goal + ':':10}{_choice(found.best.get(goal), goal, found)}" for goal in GOALS),
        "",
        "# balanced as rules, for a loader or Compute Dtype with options on auto:",
        *map(str, found.rules.own),
    ]


def verdicts(found: Measurements) -> list[str]:
    """Name the best for each goal, as the chart does: the goals that the text has one for."""
    lines = (f"best for {goal}: {_name(row, found)}" for goal, row in found.best.items())
    return [*lines, *(f"best for {goal}: {_none(found)}" for goal in GOALS if found.best and goal not in found.best)]


def _none(found: Measurements) -> str:
    """Return why a goal has no best."""
    return NOISY if found.is_noisy else NOT_FASTER


def _choice(row: Tradeoff | None, goal: Goal, found: Measurements) -> str:
    if row is None:
        return _none(found)
    short = "" if row.snr_db >= FLOORS.get(goal, -math.inf) else ", below the goal's minimum: the closest setting"
    figures = f"{seconds_text(row.seconds)} s/step, {size_text(row.bytes)}, {whole_decibel_text(row.snr_db)}{short}"
    compute = " = ".join(dict.fromkeys((row.setting.compute, row.computed_by)))
    return f"storage {row.storage}, compute {compute} ({figures})"
