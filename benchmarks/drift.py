"""How far clean runs are from the thresholds of the guard's check: `python -m benchmarks drift [--save]`.

Every small model family of the tests in every arithmetic, in a real ComfyUI: the check of the first and the sixth of six steps, of
which the one of the lowest SNR counts. Random weights, but for the model of tests/assets. A margin below 0 would be a false alarm.
Prints a row for each family; docs/internals/drift.md has the closest run of each arithmetic.
"""

from __future__ import annotations

import sys

from . import reporting
from .host import load_comfy

STEPS = 6


def main() -> int:
    """Print the table, and save it where asked."""
    args = reporting.parser(__doc__).parse_args()
    comfy = load_comfy(args)
    import torch
    from support import clean_runs, tiny_models

    rows: dict[str, dict] = {}
    for family in clean_runs.FAMILIES:
        with tiny_models.small_sizes(), torch.inference_mode():
            rows[family] = measured(comfy, family)
        print(family, file=sys.stderr, flush=True)
    lowest = min(found["margin_db"] for row in rows.values() for found in row["arithmetics"].values())
    targets = {"lowest_margin_db": reporting.target(lowest, 0.0, at_least=True)}
    result = {"benchmark": "drift", "steps": STEPS, "rows": rows, "targets": targets}
    if args.save:
        reporting.save(result)
    print(table(rows))
    return reporting.exit_code(result)


def measured(comfy, family: str) -> dict:
    """The number of layers of a family's model, and its check in each arithmetic that rounds."""
    from support import clean_runs
    from support.guarding import modes_of

    path = clean_runs.write(family, comfy.folder)
    models = {
        name: clean_runs.checked(comfy, family, path, name, STEPS) for name in clean_runs.ARITHMETICS if name != "fp32"
    }
    path.unlink()
    return {
        "layers": len(modes_of(models["bf16"])),
        "arithmetics": {name: lowest(model) for name, model in models.items()},
    }


def lowest(model) -> dict:
    """The check of the lowest SNR of a run, which has to be clean."""
    from support.guarding import report_of

    report = report_of(model)
    check = min(report.checks, key=lambda check: check.snr_db)
    margin = round(check.snr_db - check.threshold_db, 1)
    found = {"snr_db": round(check.snr_db, 1), "threshold_db": check.threshold_db, "margin_db": margin}
    return {"as": check.arithmetic, **found, "verdict": report.verdict, "events": len(report.events)}


def table(rows: dict[str, dict]) -> str:
    """Family by arithmetic: the SNR, and in brackets how far it is above its threshold."""
    names = list(next(iter(rows.values()))["arithmetics"])
    lines = [f"| family | layers | {' | '.join(names)} |", f"|{'---|' * (len(names) + 2)}"]
    for family, row in rows.items():
        cells = (f"{found['snr_db']:.1f} ({found['margin_db']:+.1f})" for found in row["arithmetics"].values())
        lines.append(f"| {family} | {row['layers']} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
