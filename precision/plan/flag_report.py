"""The state of torch's flags for each accumulation setting, in and outside of a model's calls."""

import torch

from ..arithmetic import flags
from .accumulation import PARTS

PART_NAMES = {
    "fp16_accumulation": "matmul",
    "fp16_reduced_precision_reduction": "fp16",
    "bf16_reduced_precision_reduction": "bf16",
    "tf32_matmul": "matmul",
    "tf32_convolution": "convolution",
}
NO_NODE = "No accumulation node is attached."


def flag_report(
    setting: str, requested: str = "unchanged", reason: str = NO_NODE, in_scope: bool | None = None
) -> dict:
    """Return the report's entry for one accumulation setting, from torch's present flags; nothing is changed.

    Args:
        setting: fp16_accumulation, reduced_precision_reduction, tf32 or fp8_fast_accumulation.
        requested: what the workflow asked for.
        reason: why it is as it is.
        in_scope: what it is while the model runs; None where that is what it is outside.

    Returns:
        ``requested``, ``in_scope``, ``outside`` and ``reason``. The states are true when any part of the setting is on,
        null when torch has no such flag.
    """
    parts = {PART_NAMES[name]: flags.outside(name) for name in PARTS[setting]}
    known = [on for on in parts.values() if on is not None]
    value = any(known) if known else None
    if setting == "fp8_fast_accumulation":
        value = False
    inside = value if in_scope is None or value is None else in_scope
    return {"requested": requested, "in_scope": inside, "outside": value, "reason": _with_parts(reason, setting, parts)}


def _with_parts(reason: str, setting: str, parts: dict[str, bool | None]) -> str:
    if setting == "fp8_fast_accumulation":
        return f"{reason} It is no torch flag but an argument of each fp8 matmul, off unless asked for."
    missing = f"; torch {torch.__version__} has no such flag" if None in parts.values() else ""
    if len(parts) == 1 and not missing:
        return reason
    states = [f"{part} {_on_off(on)}" for part, on in parts.items()]
    return f"{reason} Outside: {', '.join(states)}{missing}.".strip()


def _on_off(value: bool | None) -> str:
    return "not known" if value is None else "on" if value else "off"


def flag_reports() -> dict[str, dict]:
    """Return an entry for every setting when no accumulation node is attached."""
    return {setting: flag_report(setting) for setting in PARTS}
