"""Write the measurements of `precision/devices/measurements.py` into the table of `docs/devices.md`, in each language.

.venv/bin/python scripts/assets/devices_table.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).absolute().parents[2]
LINE = "\n|---|---|---|---|---|---|\n"


def measurement_rows() -> list[str]:
    """One row of markdown a measurement: profile, card and model, setting, ratio and what it is beside, conditions, source."""
    from halfsafe.precision.devices.measurements import MEASURED

    rows = []
    for profile, measurements in MEASURED.items():
        for row in measurements:
            what = ", ".join(filter(None, (row.card, row.model)))
            conditions = ", ".join(filter(None, (row.torch and f"torch {row.torch}", row.date, row.remark)))
            name = "/".join(row.source.split("/")[-4:]) if "github.com" in row.source else row.source.split("/", 3)[-1]
            source = (
                f"[Halfsafe 1.2.0](../{row.source})"
                if row.source.startswith("benchmarks/")
                else f"[{name}]({row.source})"
            )
            rows.append(f"| `{profile}` | {what} | {row.setting} | {row.times} of {row.to} | {conditions} | {source} |")
    return rows


def main() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    import conftest  # noqa: F401  # makes the pack importable as halfsafe

    for path in (ROOT / "docs").glob("devices*.md"):
        head, rest = path.read_text("utf-8").split(LINE, 1)
        rest = re.sub(r"\A(\|.*\n)*", "", rest)
        path.write_text(head + LINE + "".join(f"{row}\n" for row in measurement_rows()) + rest, "utf-8")


if __name__ == "__main__":
    main()
