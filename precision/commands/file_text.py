"""Inspections, scans and conversions as text."""

from ..formats.card import card_lines
from ..text import count_text, hanging, size_text, wrapped
from .convert import ConvertSummary
from .inspect import Finding, Inspection, Scan

SHOWN = 30


def inspection_text(inspection: Inspection) -> str:
    """Describe in a few lines what a file holds, then problems, ComfyUI's view, and notes."""
    lines = [
        inspection.file,
        *hanging("  dialect     ", inspection.dialect or "unknown"),
        *([f"  model       {inspection.model}"] if inspection.model else []),
        f"  size        {size_text(inspection.bytes)}, {count_text(inspection.parameters)} parameters",
        f"  tensors     {inspection.tensors}, {inspection.layers} layers",
    ]
    lines += [
        f"  {dtype:<18}{row['tensors']:>6} tensors {size_text(row['bytes']):>12}"
        for dtype, row in inspection.dtypes.items()
    ]
    scales = ", ".join(f"{count} {kind}" for kind, count in inspection.scales.items())
    lines += hanging("  scales      ", scales) if scales else []
    lines += _section("card", card_lines(inspection.card or {}))
    lines += _section("problems", inspection.problems)
    lines += _section("stock ComfyUI", inspection.in_comfyui)
    return "\n".join(lines + _section("notes", inspection.notes))


def scan_text(scan: Scan) -> str:
    """List problems, then remarks, one line each."""
    count = len(scan.problems)
    verdict = f"{count} problem{'s' * (count > 1)}" if count else "no problem found"
    lines = wrapped(f"{scan.file}: {scan.tensors} tensors, {verdict}", "")
    lines += _section("problems", [_line(finding) for finding in scan.problems])
    return "\n".join(lines + _section("remarks", [_line(finding) for finding in scan.remarks]))


def conversion_text(summary: ConvertSummary) -> str:
    """Describe what was written, how fast, and what is not stored as asked."""
    rate = summary.source_bytes / max(summary.seconds, 1e-9)
    source, target = size_text(summary.source_bytes), size_text(summary.target_bytes)
    what = f"{source} ({summary.dialect}) to {target} in {summary.seconds:.1f} s, {size_text(rate)}/s"
    lines = wrapped(f"{summary.target}: {what}", "")
    lines += hanging("  stored      ", ", ".join(f"{count} {storage}" for storage, count in summary.weights.items()))
    lines += _section("kept", [f"{name}: {reason}" for name, reason in summary.kept])
    return "\n".join(lines + _section("notes", summary.notes))


def _line(finding: Finding) -> str:
    return finding.text if finding.kind in ("scale", "unreadable") else f"{finding.tensor}: {finding.text}"


def _section(title: str, items: list[str]) -> list[str]:
    more = [f"    and {len(items) - SHOWN} more"] if len(items) > SHOWN else []
    lines = [line for item in items[:SHOWN] for line in wrapped(item, "    ", "  ")]
    return [f"  {title}:", *lines, *more] if items else []
