"""Write an analysis as rules and as text. The text parses as the same rules, as all else in it is a comment."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable

from ..formats.comfy_format import can_be_quantized
from ..layer_names import pattern_of
from ..modes import INT8, MODES
from ..plan.presets import DEFAULT_PRESET
from ..plan.rules import Rules, compile_pattern, rules_from
from ..report.result import CHOSEN as CHOSEN_SENTENCE
from ..report.result import UNREACHED, WARN, Result
from ..text import size_text, wrapped
from .results import BARRED, CHOSEN, KEPT, PINNED, UNUSED, Analysis, LayerResult

HEAD = ("layer", "weight dB", "output dB", "channel dB", "outcome")
WORST = 16
NUMBERED = 3


def rules_of(analysis: Analysis) -> Rules:
    """Return the choice as rules on top of the default preset.

    For a storage: the layers to keep, for a loader or saver with that storage. For a mode: the layers that compute in
    it, for a model that otherwise computes like the one analysed.
    """
    return rules_from("\n".join(rule_lines(analysis)))


def rule_lines(analysis: Analysis) -> list[str]:
    """Write the lines of :func:`rules_of`; a pattern covers several layers only where it matches none it would
    change."""
    high = [layer.name for layer in analysis.layers if layer.status != CHOSEN]
    if analysis.candidate.stores:
        kept = [layer for layer in analysis.layers if _would_be_stored(layer)]
        raised = [layer for layer in analysis.chosen if layer.sensitive]
        lines = _lines(kept, "storage=as_file", [layer.name for layer in analysis.chosen])
        return lines + _lines(raised, f"storage={analysis.candidate.name}", high)
    return _lines(analysis.chosen, MODES[analysis.candidate.name].rule, high)


def _would_be_stored(layer: LayerResult) -> bool:
    """Tell whether this is a layer that was not chosen, yet that a loader would store as the candidate:
    no preset keeps it."""
    return layer.status != CHOSEN and not layer.sensitive and can_be_quantized(layer.cls)


def _lines(layers: list[LayerResult], setting: str, others: Iterable[str]) -> list[str]:
    by_name = {layer.name: layer for layer in layers}
    return [
        f"{pattern} {setting}  # {_reason([by_name[name] for name in names])}"
        for pattern, names in patterns(by_name, others)
    ]


def _reason(layers: list[LayerResult]) -> str:
    if all(layer.worst_db is None for layer in layers):
        return layers[0].reason
    count = f"{len(layers)} layers, " if len(layers) > 1 else ""
    return f"{count}output {min(layer.worst_db for layer in layers if layer.worst_db is not None):.1f} dB"


def patterns(names: Iterable[str], others: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Find few patterns that match all ``names`` and none of ``others``: (pattern, the names it covers)."""
    left, others, found = dict.fromkeys(names), list(others), []
    tried = sorted(_candidates(left).items(), key=lambda item: -len(item[1]))
    for pattern, members in tried:
        members = [name for name in members if name in left]
        if len(members) > 1 and not any(map(_matcher(pattern), others)):
            found.append((pattern, members))
            for name in members:
                del left[name]
    return found + [(name, [name]) for name in left]


def _candidates(names: Iterable[str]) -> dict[str, list[str]]:
    """List patterns that may cover several of the names: a block, numbers as ``*``, a list of numbers."""
    groups: dict[str, list[str]] = defaultdict(list)
    numbered: dict[str, list[str]] = defaultdict(list)
    for name in names:
        words = name.split(".")
        for end in range(1, len(words)):
            groups[".".join([*words[:end], "*"])].append(name)
        numbered[pattern_of(name)].append(name)
    groups |= {pattern: members for pattern, members in numbered.items() if "*" in pattern}
    for pattern, members in numbered.items():
        if pattern.count("*") == 1 and len(members) >= NUMBERED:
            head, _, tail = pattern.partition("*")
            numbers = "|".join(name[len(head) : len(name) - len(tail)] for name in members)
            groups[f"re:^{re.escape(head)}({numbers}){re.escape(tail)}$"] = members
    return groups


def _matcher(pattern: str):
    match = compile_pattern(pattern)
    return lambda name: match(name, "")


def analysis_text(analysis: Analysis, model: str = "", computed_in: str = "") -> str:
    """Write the analysis in the form of Layer Rules: comments, then the rules."""
    lines = [*_outcome(analysis, model), "", *_table(analysis), "", *_left_out(analysis), *_use(analysis, computed_in)]
    return "\n".join([f"# {line}".rstrip() for line in lines] + rule_lines(analysis)) + "\n"


def result_of(analysis: Analysis, text: str) -> Result:
    """Sum the analysis up in a sentence and the table of its weakest layers."""
    name, chosen = analysis.candidate.name, analysis.chosen
    rows = [
        [layer.name, *map(decibel_text, (layer.weight_db, layer.output_db, layer.channel_db)), layer.status]
        for layer in _weakest_first(analysis)[:WORST]
    ]
    free = len(chosen) + len(analysis.named(KEPT))
    values: dict[str, str | int] = {"chosen": len(chosen), "free": free, "candidate": name}
    values["snr"] = whole_decibel_text(analysis.snr_db)
    if chosen:
        return Result(CHOSEN_SENTENCE, values, head=HEAD, rows=rows, text=text)
    return Result(UNREACHED, {"candidate": name, "target": f"{analysis.target_db:g}"}, WARN, HEAD, rows, text=text)


def _weakest_first(analysis: Analysis) -> list[LayerResult]:
    measured = (layer for layer in analysis.layers if layer.worst_db is not None)
    return sorted(measured, key=lambda layer: layer.worst_db)


def decibel_text(value: float | None) -> str:
    """Write an SNR: 31.5, "exact" for no error, "overflow" for a result that is not finite, "-" for none."""
    if value is None:
        return "-"
    return f"{value:.1f}" if math.isfinite(value) else "exact" if value > 0 else "overflow"


def crest_text(value: float | None) -> str:
    """Write a crest factor: 4.8, 130."""
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def whole_decibel_text(value: float) -> str:
    """Write the SNR of the model's output, with its unit: "31.5 dB", "no error at all", "NaN or Inf"."""
    if math.isfinite(value):
        return f"{value:.1f} dB"
    return "no error at all" if value > 0 else "NaN or Inf"


def _outcome(analysis: Analysis, model: str) -> list[str]:
    name, chosen, free = analysis.candidate.name, analysis.chosen, [*analysis.chosen, *analysis.named(KEPT)]
    target = f"{name}, target {analysis.target_db:g} dB end to end"
    lines = ["Halfsafe layer analysis", f"{model}, {target}" if model else target]
    share = f"{len(chosen)} of {len(free)} layers"
    if analysis.candidate.stores:
        saved = sum(layer.size for layer in chosen)
        share += f", {size_text(saved)} of {size_text(sum(layer.size for layer in free))} in {name.partition('_')[0]}"
    if chosen:
        snr = whole_decibel_text(analysis.snr_db)
        lines += wrapped(f"Chosen: {share}; {snr} end to end, the worst of the calls.", "")
        lines += wrapped(f"The latent of a free run of the sampler: {whole_decibel_text(analysis.free_db)}.", "")
    else:
        none = "The target cannot be reached: no layer" if analysis.complete else "No layer was found that"
        lines += wrapped(f"{none} may be in {name}, so all are kept.", "")
    plain = f"all {analysis.all_count} layers that the preset '{DEFAULT_PRESET}' does not keep"
    lines += wrapped(f"For comparison, {plain}: {whole_decibel_text(analysis.all_db)}.", "")
    return lines + _effort(analysis)


def _effort(analysis: Analysis) -> list[str]:
    """Say what was measured, and where the search ended early."""
    calls = f"{analysis.reference_calls} model calls for them, {analysis.calls} in all"
    lines = wrapped(f"Measured: {len(analysis.layers)} layers, {calls}, {analysis.trials} trials.", "")
    if analysis.dropped:
        why = (
            "that the calls by themselves allow: in a free run the errors of the steps add up, "
            "and the target was missed"
        )
        lines += wrapped(f"Kept are {analysis.dropped} layers {why}.", "")
    if not analysis.complete:
        bound = f"its bound of {analysis.trials} trials"
        lines += wrapped(f"The search stopped at {bound}: more layers may be possible.", "")
    return lines


def _table(analysis: Analysis) -> list[str]:
    measured = _weakest_first(analysis)
    lines = [f"{'Weakest layers, dB':<48}{'weight':>9}{'output':>9}{'channel':>9}{'crest':>9}  outcome"]
    for layer in measured[:WORST]:
        figures = "".join(f"{decibel_text(value):>9}" for value in (layer.weight_db, layer.output_db, layer.channel_db))
        figures += f"{crest_text(layer.crest):>9}"
        head = [layer.name, " " * 48 + figures] if len(layer.name) > 47 else [f"{layer.name:<48}{figures}"]
        lines += [*head[:-1], f"{head[-1]}  {layer.status}"]
    if len(measured) > WORST:
        rest = measured[WORST].worst_db, measured[-1].worst_db
        lines.append(f"{len(measured) - WORST} more, {decibel_text(rest[0])} to {decibel_text(rest[1])}")
    return [*lines, "crest: amax / rms of the layer's input, its largest call"]


def _left_out(analysis: Analysis) -> list[str]:
    lines = []
    for status in (PINNED, UNUSED, BARRED):
        layers = analysis.named(status)
        reasons: dict[str, int] = defaultdict(int)
        for layer in layers:
            reasons[layer.reason] += 1
        counts = [f"{count}" if status == UNUSED else f"{count} {reason}" for reason, count in reasons.items()]
        lines += wrapped(f"Layers {status}: {', '.join(counts)}.", "") if layers else []
    return lines


def _use(analysis: Analysis, computed_in: str) -> list[str]:
    name = analysis.candidate.name
    if analysis.candidate.name == INT8.name:
        measured = (
            "products in int8" if analysis.candidate.products else f"int8 weights alone, multiplied in {computed_in}"
        )
        how = (
            f"Measured with {measured}. Give these rules to a Halfsafe loader with storage = int8 and the compute of "
            "this model."
        )
    elif analysis.candidate.stores:
        how = f"Give these rules to a Halfsafe loader or Save Model with storage = {name}."
    else:
        how = f"Give these rules to Compute Dtype with compute = {computed_in or 'what the model computes in'}."
    return wrapped(f"{how} Or paste this text into Layer Rules.", "")
