"""Which share of each model's weights the default rules keep in 16 bit in an fp8 file: `python -m benchmarks kept [--save]`.

ComfyUI's own classes at their published sizes on the meta device (tests/support/real_models.py), so names and shapes alone.
The parts of the share: linear layers outside the repeated blocks, modulation in the blocks, and what fp8 does not hold
(convolutions, embeddings). `by name` is the share without the rules on structure.
"""

from __future__ import annotations

import sys
from math import prod

from . import reporting
from .host import load_comfy

COLUMNS = ("billions", "outside", "modulation", "no_linear", "kept", "by_name")


def main() -> int:
    """Print the table, and save it where asked."""
    args = reporting.parser(__doc__).parse_args()
    load_comfy(args)
    from support import real_models

    rows = {name: shares(real_models.layers(name)) for name in real_models.MODELS}
    result = {"benchmark": "kept", "unit": "% of the weights", "rows": rows, "targets": {}}
    if args.save:
        reporting.save(result)
    print(table(rows))
    return reporting.exit_code(result)


def shares(layers: list) -> dict[str, float]:
    """Return what is kept of a model, in % of its weights, and their number in billions."""
    from halfsafe.precision.plan.rules import Rules, rules_from
    from halfsafe.precision.plan.storage import plan_storage
    from halfsafe.precision.plan.structure import OUTSIDE, roles_of

    rules, roles = rules_from(), roles_of(layers)
    total = sum(prod(layer.shape) for layer in layers)

    def kept(with_rules: Rules) -> list:
        decisions = plan_storage(layers, "fp8_e4m3fn", with_rules)
        return [layer for layer in layers if decisions[layer.name].kept]

    def share(of: list) -> float:
        return round(100 * sum(prod(layer.shape) for layer in of) / total, 1)

    high = kept(rules)
    linear = [layer for layer in high if layer.cls == "Linear"]
    inside = [layer for layer in linear if roles.get(layer.name) != OUTSIDE]
    figures = (
        round(total / 1e9, 2),
        share([layer for layer in linear if layer not in inside]),
        share(inside),
        share([layer for layer in high if layer.cls != "Linear"]),
        share(high),
        share(kept(Rules(presets=tuple(rule for rule in rules.presets if not rule.asks_for_role)))),
    )
    return dict(zip(COLUMNS, figures, strict=True))


def table(rows: dict[str, dict[str, float]]) -> str:
    """Write the rows as the table of benchmarks/README.md."""
    head = ("model", "billion weights", "outside the blocks", "modulation", "not Linear", "kept", "by name alone")
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {name} | " + " | ".join(f"{row[key]:g}" for key in COLUMNS) + " |" for name, row in rows.items())])


if __name__ == "__main__":
    sys.exit(main())
