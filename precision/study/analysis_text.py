"""Write an analysis as rules and as text. The text parses as the same rules, as all else in it is a
comment."""

import math
from collections import Counter

from ..base.message import Message
from ..base.modes import INT8
from ..base.text import paragraph, size_text, table
from ..plan.presets import DEFAULT_PRESET
from ..report import result
from ..report.result import Result
from .sensitivity import BARRED, KEPT, MAX_TRIALS, PINNED, UNUSED, Analysis

HEAD = ("layer", "weight dB", "output dB", "channel dB", "outcome")
WORST = 16
NO_ERROR, EXACT = "no error", "exact"


def _text(analysis: Analysis, model: str, computed_in: str) -> str:
    target = f"{analysis.candidate.name}, target {analysis.target_db:g} dB"
    sets = f"{analysis.trials} sets of layers tried, {analysis.steps} steps of the sampler"
    more = "" if analysis.trials < MAX_TRIALS else " The search stopped at its limit: more layers may be possible."
    paragraphs = [
        ["Halfsafe layer analysis", f"{model}, {target}" if model else target],
        paragraph([*outcome(analysis), f"Measured: {len(analysis.layers)} layers, {sets}.{more}"]),
        _table(analysis),
        paragraph([*_left_out(analysis), _use(analysis, computed_in)]),
    ]
    lines = "\n\n".join(map("\n".join, paragraphs)).splitlines()
    return "\n".join([f"# {line}".rstrip() for line in lines] + analysis.rule_lines()) + "\n"


def analysis_result(analysis: Analysis, model: str = "", computed_in: str = "") -> Result:
    """Sum the analysis up in a sentence, the table of its weakest layers, and a text in the form of
    Layer Rules: comments, then the rules."""
    text = _text(analysis, model, computed_in)
    name, chosen = analysis.candidate.name, analysis.chosen
    rows = _rows(analysis)
    if not chosen:
        unreached = Message(result.UNREACHED, candidate=name, target=f"{analysis.target_db:g}")
        return Result(unreached, result.WARN, HEAD, rows, text=text, toast=True)
    free = len(chosen) + len(analysis.named(KEPT))
    snr = whole_decibel_text(analysis.snr_db)
    error = error_text(analysis.snr_db)
    sentence = Message(result.CHOSEN, chosen=len(chosen), free=free, candidate=name, snr=snr, error=error)
    return Result(sentence, head=HEAD, rows=rows, text=text, toast=True)


def decibel_text(value: float | None, lost: str = "overflow") -> str:
    """Write an SNR: 31.5, "exact" for no error, ``lost`` for a result that is not finite, "-" for
    none."""
    if value is None:
        return "-"
    return f"{value:.1f}" if math.isfinite(value) else EXACT if value > 0 else lost


def whole_decibel_text(value: float) -> str:
    """Write the SNR of a final latent, with its unit: "31.5 dB", "no error", "NaN or Inf"."""
    return f"{value:.1f} dB" if math.isfinite(value) else NO_ERROR if value > 0 else "NaN or Inf"


def error_text(snr_db: float) -> str:
    """Write an SNR as the relative error that it is: "3.2 %" for 30 dB, "0 %" for equal latents."""
    return f"{100 * 10 ** (-snr_db / 20):.2g} %"


def outcome(analysis: Analysis) -> list[str]:
    """Return in sentences which share of the layers was chosen, and how close the final latent
    stays."""
    chosen = analysis.chosen
    free = [*chosen, *analysis.named(KEPT)]
    if chosen:
        share = f"{len(chosen)} of {len(free)} layers"
        if analysis.candidate.stores:
            sizes = (size_text(sum(layer.size for layer in layers)) for layers in (chosen, free))
            share += f", {' of '.join(sizes)} in {analysis.candidate.name.partition('_')[0]}"
        said = f"Chosen: {share}; {whole_decibel_text(analysis.snr_db)} at the final latent."
    else:
        none = "The target cannot be reached: no layer" if analysis.trials < MAX_TRIALS else "No layer was found that"
        said = f"{none} can be in {analysis.candidate.name}, so all are kept."
    plain = f"all {analysis.all_count} layers that the preset '{DEFAULT_PRESET}' does not keep"
    return [said, f"For comparison, {plain}: {whole_decibel_text(analysis.all_db)}."]


def _rows(analysis: Analysis) -> list[list[str]]:
    rows = []
    for layer in analysis.weakest_first[:WORST]:
        figures = map(decibel_text, (layer.weight_db, layer.output_db, layer.channel_db))
        rows.append([layer.name, *figures, layer.status])
    return rows


def _table(analysis: Analysis) -> list[str]:
    rest = analysis.weakest_first[WORST:]
    lines = table(_rows(analysis), ("weakest layers", *HEAD[1:]), math.inf).splitlines()
    if rest:
        lines.append(f"{len(rest)} more, {decibel_text(rest[0].worst_db)} to {decibel_text(rest[-1].worst_db)}")
    return lines


def _left_out(analysis: Analysis) -> list[str]:
    counts = {status: Counter(layer.reason for layer in analysis.named(status)) for status in (PINNED, UNUSED, BARRED)}
    told = {status: ", ".join(f"{count} {why}" for why, count in reasons.items()) for status, reasons in counts.items()}
    return [f"Layers {status}: {reasons}." for status, reasons in told.items() if reasons]


def _use(analysis: Analysis, computed_in: str) -> str:
    candidate = analysis.candidate
    how = f"Connect these rules to Compute Dtype with compute = {computed_in or 'the dtype of the model'}."
    if candidate.name == INT8.name:
        alone = f"int8 weights alone, multiplied in {computed_in}"
        how = (
            f"Measured with {'products in int8' if candidate.products else alone}. "
            "Connect these rules to a Halfsafe loader with storage = int8 and this model's compute."
        )
    elif candidate.stores:
        how = f"Connect these rules to a Halfsafe loader or Save Model with storage = {candidate.name}."
    return f"{how} Or paste this text into Layer Rules."
