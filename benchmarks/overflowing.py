"""Models that overflow fp16, in each storage and compute under the guard: `python -m benchmarks overflowing [--family F] [--save]`.

A small model of a family whose sizes ComfyUI fixes, clean and overflowing: two steps in a real ComfyUI against the same in fp32 with the
weights of the file, so that the errors of 8-bit storage are in the figures. Plain fp16 is that of one step without a guard. The target is
the error of fp16_safe to that of bf16.
"""

from __future__ import annotations

import sys

from . import reporting
from .host import load_comfy

LIMIT = 0.6


def main() -> int:
    """Print the table, and save it where asked."""
    parser = reporting.parser(__doc__)
    parser.add_argument("--family", default="minimax_h3", help="one of tests/support/rare_families.py (default: minimax_h3)")
    args = parser.parse_args()
    rows = rows_of(load_comfy(args), args.family)
    ratio = max(row["ways"]["fp16_safe"]["error"] / row["ways"]["bf16"]["error"] for row in rows)
    targets = {"fp16_safe_to_bf16": reporting.target(round(ratio, 3), LIMIT)}
    result = {"benchmark": "overflowing", "rows": rows, "targets": targets}
    if args.save:
        reporting.save(result)
    print(table(rows))
    return reporting.exit_code(result)


def rows_of(comfy, family: str) -> list[dict]:
    """What became of a family's model, clean and of each kind of overflow."""
    from support import families, rare_families

    clean, rows = rare_families.write(family, comfy.folder / "clean.safetensors"), []
    for kind, factors in {"clean": {}, **rare_families.OVERFLOWS[family]}.items():
        path = families.write_scaled(clean, comfy.folder / "overflowing.safetensors", factors)
        rows.append({"family": family, "kind": kind, **measured(comfy, family, path)})
        print(family, kind, file=sys.stderr, flush=True)
    return rows


def measured(comfy, family: str, path) -> dict:
    """Whether plain fp16 is finite; the error and the verdict of each way."""
    import torch
    from support import overflowing, rare_families, small_sizes
    from support.families import load

    with small_sizes.small_sizes(), torch.inference_mode():
        plain = rare_families.sample(load(comfy, path, "fp16", "fp16"), family, 1)
        found = overflowing.found(comfy, family, path)
    ways = {way: {"error": float(f"{error:.2e}"), "verdict": verdict} for way, (error, verdict) in found.items()}
    return {"plain_fp16_finite": bool(torch.isfinite(plain).all()), "ways": ways}


def table(rows: list[dict]) -> str:
    """Model by storage and compute: the error, and the guard's verdict where it is not "clean"."""
    names = list(rows[0]["ways"])
    lines = [f"| family | overflow | plain fp16 | {' | '.join(names)} |", f"|{'---|' * (len(names) + 3)}"]
    for row in rows:
        cells = [f"{way['error']:.1e}" + (f" ({way['verdict']})" if way["verdict"] != "clean" else "") for way in row["ways"].values()]
        lines.append(f"| {row['family']} | {row['kind']} | {'finite' if row['plain_fp16_finite'] else 'NaN'} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
