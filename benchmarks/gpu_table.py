"""The rows of benchmarks/gpu.py as one table, which a screen of 80 columns and 45 lines holds."""

from __future__ import annotations

COLUMNS, LINES = 80, 45
NAME = 32
MODELS = ("SDXL, dynamic VRAM", "Flux, dynamic VRAM", "SDXL", "Flux")
HEADS = ("SDXL dyn.", "Flux dyn.", "SDXL", "Flux")
CORE = "core fp16"


def as_table(result: dict) -> str:
    """Of SDXL and Flux a line for each setting: time of a call and of its kernels alone against ComfyUI's own fp16, whose line has milliseconds,
    error against fp32 and MiB beyond the weights under dynamic VRAM. Of the others a line each. Then the targets that were missed."""
    rows = {row["row"]: row for row in result["rows"]}
    conditions = ("device", "driver", "torch", "comfyui", "date")
    lines = [", ".join(f"{name} {result[name]}" if name != "device" else result[name] for name in conditions)]
    settings = dict.fromkeys(name.partition(": ")[2] for name in rows if name.partition(": ")[0] in MODELS)
    if settings:
        lines.append(f"{'':14}" + "".join(f" {head:>9}" for head in HEADS) + f" {'error %':>11} {'MiB':>9}")
        lines.append(f"{'':14}" + f" {'wall busy':>9}" * 4 + f" {'SDXL':>5} {'Flux':>5} {'SDXL':>4} {'Flux':>4}")
        lines += [_of_models(setting, rows) for setting in settings]
    others = [row for name, row in rows.items() if name.partition(": ")[0] not in MODELS]
    if any("seconds" in row for row in others):
        lines.append(f"{'':{NAME}}{'ms':>8} {'wall':>6} {'busy':>6} {'err %':>6} {'MiB':>6}")
    lines += [_alone(row, _core_of(row, rows)) for row in others]
    missed = [
        f"{name} {one['measured']} > {one['limit']}"
        for name, one in result.get("targets", {}).items()
        if not one["met"]
    ]
    lines.append(f"missed: {'; '.join(missed) or 'none'}" if result.get("targets") else "no target was measured")
    lines += [
        f"{name}: {_problem(row)}"
        for name, row in rows.items()
        if "problem" in row and name.partition(": ")[0] in MODELS
    ][:4]
    return "\n".join(_short(line, COLUMNS) for line in lines)


def _of_models(setting: str, rows: dict[str, dict]) -> str:
    """Return the line of a setting: its rows in both models, each dynamic and static."""
    found = [rows.get(f"{model}: {setting}", {}) for model in MODELS]
    cores = [rows.get(f"{model}: {CORE}", {}) for model in MODELS]
    times = "".join(f" {_times(row, core, setting == CORE):>9}" for row, core in zip(found, cores, strict=True))
    errors, memory = (" ".join(form(row) for row in found[:2]) for form in (_error, _mib))
    return f"{setting:14}{times} {errors} {memory}"


def _times(row: dict, core: dict, is_core: bool) -> str:
    if "seconds" not in row:
        return "PROBLEM" if "problem" in row else "-"
    if is_core:
        return f"{1e3 * row['seconds']:4.0f} {row.get('busy_ms', 0):4.0f}"
    return f"{_wall(row):>4} {_busy(row, core):>4}"


def _alone(row: dict, core: dict) -> str:
    """Return the line of a row by itself."""
    name = _short(row["row"].replace("dynamic VRAM", "dyn."), NAME - 1)
    if "problem" in row:
        return f"{name:{NAME}}PROBLEM {_problem(row)}"
    if "seconds" not in row:
        return f"{name:{NAME}}{row.get('said', 'done')}"
    times = f"{1e3 * row['seconds']:8.1f} {_wall(row):>6} {_busy(row, core):>6}"
    return f"{name:{NAME}}{times} {_error(row):>6} {_mib(row):>6}"


def _core_of(row: dict, rows: dict[str, dict]) -> dict:
    """Return the row of ComfyUI's own fp16 that a row is held against: of its part, else of its model in the same state."""
    part = row["row"].partition(": ")[0]
    places = (part, part.removesuffix(", formats"), part.removesuffix(", compiled"))
    return next((rows[f"{place}: {CORE}"] for place in places if f"{place}: {CORE}" in rows), {})


def _wall(row: dict) -> str:
    """Return the larger of wall and device time against ComfyUI's."""
    ratios = [row[key] for key in ("seconds_to_core", "device_seconds_to_core") if key in row]
    return f"{max(ratios):.2f}" if ratios else "-"


def _busy(row: dict, core: dict) -> str:
    return f"{row['busy_ms'] / core['busy_ms']:.2f}" if row.get("busy_ms") and core.get("busy_ms") else "-"


def _error(row: dict) -> str:
    return f"{'-':>5}" if row.get("error") is None else f"{100 * row['error']:5.2f}"


def _mib(row: dict) -> str:
    return f"{row['peak_bytes'] / 2**20:4.0f}" if row.get("peak_bytes") else f"{'-':>4}"


def _problem(row: dict) -> str:
    return " ".join(row["problem"].split())


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "\u2026"
