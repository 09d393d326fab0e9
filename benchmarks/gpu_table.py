"""The rows of benchmarks/gpu.py as one table, which a screen of 80 columns and 40 lines holds."""

from __future__ import annotations

COLUMNS, LINES = 80, 40
NAME, REST = 33, 46
HEAD = f"{'':{NAME}} {'ms':>8} {'to core':>8} {'error':>8} {'MiB':>7}"


def as_table(result: dict) -> str:
    """A line for each row: milliseconds of a call, what ComfyUI's own takes of it, error against fp32 and device memory beyond the weights;
    or what a row without them says; or its problem. Then the targets that were missed."""
    missed = [
        f"{name} {held['measured']} > {held['limit']}"
        for name, held in result.get("targets", {}).items()
        if not held["met"]
    ]
    lines = [
        _short(
            f"{result['device']}, driver {result['driver']}, torch {result['torch']}, ComfyUI {result['comfyui']}, {result['date']}",
            COLUMNS,
        ),
        HEAD,
    ]
    lines += [_line(row) for row in result["rows"]]
    lines.append(
        _short(
            f"missed: {'; '.join(missed) or 'none'}"
            if result.get("targets") and not result["dry_run"]
            else "no target was measured",
            COLUMNS,
        )
    )
    return "\n".join(lines)


def _line(row: dict) -> str:
    name = _short(row["row"].replace("dynamic VRAM", "dynamic"), NAME)
    if "problem" in row:
        return f"{name:{NAME}} {_short('PROBLEM ' + ' '.join(row['problem'].split()), REST)}"
    if "seconds" not in row:
        return f"{name:{NAME}} {_short(row.get('said', 'done'), REST)}"
    ratio = max((row[key] for key in ("seconds_to_core", "device_seconds_to_core") if key in row), default=None)
    peak = row.get("peak_bytes")
    cells = [
        f"{1e3 * row['seconds']:8.1f}",
        _or_dash(ratio, "8.2f", 8),
        _or_dash(row.get("error"), "8.1e", 8),
        _or_dash(peak and peak / 2**20, "7.0f", 7),
    ]
    held = f" {100 * row['held_share']:.0f} % held" if "held_share" in row else ""
    return f"{name:{NAME}} {' '.join(cells)}{held}"


def _or_dash(value: float | None, form: str, width: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"
