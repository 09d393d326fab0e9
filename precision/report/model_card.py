"""The model card beside a saved file: ``NAME.md`` with the formats, errors, rules and origin of
``NAME.safetensors``.

Its text is Markdown with the YAML block of a Hugging Face model page. All figures are read from the
file as written, or measured while it was.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path

from ..base.dtypes import QUANTIZED_NAMES
from ..base.layer_names import by_pattern, count_patterns, group_name
from ..base.message import Message
from ..base.text import count_text, size_text
from ..files.atomic_write import os_errors_as, replacing
from ..files.safetensors_file import open_checkpoint
from ..formats.card import Provenance, pack_version
from ..formats.checkpoint import Checkpoint, StoredWeight, read_checkpoint
from ..formats.layer_plan import LayerPlan
from ..formats.readers import Reading, first_comfyui
from ..plan.rules import MEASURED
from .result import CARD_LEFT, CARD_UNWRITTEN, CARD_WRITTEN

HALFSAFE = "https://github.com/halfsafe/halfsafe"
PATTERNS = 8
LOADERS = {"diffusion_models": "Load Diffusion Model", "checkpoints": "Load Checkpoint"}
"""Folder below ComfyUI's ``models`` -> the node of ComfyUI that loads its files."""
ERRORS = """\
Error: the relative error (Frobenius norm) of each weight as stored against the source, measured on up to 500,000
values of each weight, spread evenly over its rows."""


def add_model_card(
    path: str | os.PathLike,
    provenance: Provenance,
    command: str,
    plans: Mapping[str, LayerPlan],
    errors: Mapping[str, float],
    folder: str,
    readings: Sequence[Reading],
    notes: Sequence[str] = (),
) -> str:
    """Write the model card beside a file that was just saved, and return a sentence on it.

    The file is complete by then: whatever fails here is returned in the sentence, and raises
    nothing. A file that has the card's name already stays as it is. The same file and arguments
    give the same text.

    Args:
        command: the command line that made the file; empty if the node Save Model did.
        plans: tensor name -> plan of the file that was written.
        errors: of :func:`~halfsafe.precision.make.weight_errors.measuring_errors`.
        folder: of the file's kind below ComfyUI's ``models``; empty for that of the source file.
        readings: who reads the quantized layers of the file.
        notes: sentences on the storage in this family.
    """
    path = Path(path)
    card = path.with_suffix(".md")
    if os.path.lexists(card):
        return Message(CARD_LEFT, card=card.name)
    try:
        file = open_checkpoint(path)
        checkpoint = read_checkpoint(file, file.metadata, path)
        text = _model_card(path, checkpoint, provenance, command, plans, errors, folder, readings, notes)
        with os_errors_as(card, "written"), replacing(card, overwrite=False) as written:
            written.write(text.encode("utf-8"))
    except Exception as error:  # the file is saved: a card is not worth an error of the node
        return Message(CARD_UNWRITTEN, why=str(error))
    return Message(CARD_WRITTEN, card=card.name)


def _model_card(
    path: Path,
    checkpoint: Checkpoint,
    given: Provenance,
    command: str,
    plans: Mapping[str, LayerPlan],
    errors: Mapping[str, float],
    folder: str,
    readings: Sequence[Reading],
    notes: Sequence[str],
) -> str:
    storages = _by_storage(checkpoint)
    source = f"made from {_code(str(given.source['file']))}" if given.source else "made"
    sections = {
        "Weights": [_weights_table(storages, errors), ERRORS if errors else ""],
        "Kept in higher precision": [_kept(plans)],
        "Notes": [_bullets(map(_plain, notes))],
        "Rules": [_rules(given)],
        "Measured": [_measured(given)],
        "Made by": [_fenced([command]) if command else _of_node(given), _changes(given)],
        "Load it in ComfyUI": [_loading(path, readings, folder)],
    }
    parts = [
        _front_matter(storages, folder),
        f"# {_code(path.stem)}",
        f"{_code(path.name)}, {source} with [Halfsafe]({HALFSAFE}) {pack_version()}, for ComfyUI.",
        _sizes(path, checkpoint, given),
    ]
    for title, texts in sections.items():
        parts += [f"## {title}", *filter(None, texts)] if any(texts) else []
    return "\n\n".join(parts) + "\n"


def _of_node(given: Provenance) -> str:
    return f"The node *Save Model (Halfsafe)* with storage `{given.asked}`."


def _front_matter(storages: Mapping[str, Sequence[StoredWeight]], folder: str) -> str:
    formats = dict.fromkeys(storage.split("_")[0] for storage, weights in storages.items() if weights[0].quantized)
    single = ["diffusion-single-file"] if folder == "diffusion_models" else []
    tags = "\n".join(f"- {tag}" for tag in ("comfyui", *single, "halfsafe", *formats))
    asked = "# base_model: and license: are those of the source model; fill them in before you publish this page."
    return f"---\ntags:\n{tags}\n{asked}\n---"


def _by_storage(checkpoint: Checkpoint) -> dict[str, list[StoredWeight]]:
    """Group a file's weights by their storage, the largest first."""
    groups: dict[str, list[StoredWeight]] = defaultdict(list)
    for weight in checkpoint.weights.values():
        groups[weight.storage].append(weight)
    return dict(sorted(groups.items(), key=lambda item: -sum(weight.bytes for weight in item[1])))


def _sizes(path: Path, checkpoint: Checkpoint, given: Provenance) -> str:
    before = given.source.get("bytes")
    rows = [
        ("parameters", count_text(sum(prod(weight.shape) for weight in checkpoint.weights.values()))),
        ("size of the source", size_text(before) if isinstance(before, int) else "not known"),
        ("size of this file", size_text(path.stat().st_size)),
    ]
    return _table(("", ""), rows)


def _weights_table(storages: Mapping[str, Sequence[StoredWeight]], errors: Mapping[str, float]) -> str:
    head = ("storage", "tensors", "size", "scales", "mean error", "SNR", "largest error")
    return _table(head, [_storage_row(storage, weights, errors) for storage, weights in storages.items()])


def _storage_row(storage: str, weights: Sequence[StoredWeight], errors: Mapping[str, float]) -> list[str]:
    size = size_text(sum(weight.bytes for weight in weights))
    found = {weight.layer: errors[weight.name] for weight in weights if weight.name in errors}
    row = [
        storage,
        str(len(weights)),
        size,
        ", ".join(dict.fromkeys(weight.format.layout(weight) for weight in weights)),
    ]
    if not found:
        return [*row, "not converted", "", ""]
    mean, worst = sum(found.values()) / len(found), max(found, key=found.__getitem__)
    snr = f"{-20 * math.log10(mean):.1f} dB" if mean else ""
    return [*row, _percent(mean), snr, f"{_percent(found[worst])} ({_code(worst)})"]


def _kept(plans: Mapping[str, LayerPlan]) -> str:
    """List the layers that are stored in more bits than asked for, by reason."""
    totals = count_patterns(name.removesuffix(".weight") for name in plans)
    reasons: dict[str, list[str]] = defaultdict(list)
    for name, plan in plans.items():
        why = plan.note or (plan.why_stored if plan.kept else "")
        if why and plan.stored not in QUANTIZED_NAMES:
            reasons[f"{_plain(why)} ({plan.stored})"].append(name.removesuffix(".weight"))
    return _bullets(f"{reason}: {_patterns(names, totals)}" for reason, names in reasons.items())


def _patterns(names: Sequence[str], totals: Mapping[str, int]) -> str:
    """Write the patterns that most names share, with the number of names, and how many more
    patterns there are."""
    groups = [(group_name(pattern, of, totals[pattern]), len(of)) for pattern, of in by_pattern(names).items()]
    groups.sort(key=lambda group: -group[1])
    shown = [_code(name) + (f" x{count}" if count > 1 else "") for name, count in groups[:PATTERNS]]
    more = f", and {len(groups) - PATTERNS} more patterns" if len(groups) > PATTERNS else ""
    return ", ".join(shown) + more


def _rules(given: Provenance) -> str:
    presets = ", ".join(f"*{preset}*" for preset in dict.fromkeys(given.presets)) or "none"
    return f"Preset: {presets}." + (f"\n\n{_fenced(given.rules)}" if given.rules else "")


def _measured(given: Provenance) -> str:
    """List what *Measure my card* found for the rules that the file was made with."""
    comments = (line.partition("#")[2].strip() for line in given.rules)
    return _bullets(_plain(text.removeprefix(MEASURED)) for text in comments if text.startswith(MEASURED))


def _changes(given: Provenance) -> str:
    lines = []
    if given.patched:
        lines.append(f"LoRAs or other patches of {given.patched} weights are merged.")
    if given.unfit:
        names = _patterns(given.unfit, count_patterns(given.unfit))
        lines.append(f"Patches that do not fit {len(given.unfit)} weights are left out: {names}.")
    if given.calibration:
        said = (
            "{method} with a calibration of {model_calls} model calls chose the codes of {layers} layers: it lowers "
            "the error of a layer's output, not that of its weights."
        )
        lines.append(said.format_map(given.calibration))
    return "\n".join(lines)


def _loading(path: Path, readings: Sequence[Reading], folder: str) -> str:
    if unread := [reading.text for reading in readings if reading.since is None]:
        return _plain(" ".join(unread))
    since = first_comfyui(readings)
    needs = f" It needs ComfyUI {since} or later." if since else ""
    if folder not in LOADERS:
        return f"Put {_code(path.name)} into the folder of its source file and load it with the same node.{needs}"
    where = f"Put {_code(path.name)} into `ComfyUI/models/{folder}`"
    return f"{where} and load it with ComfyUI's own node *{LOADERS[folder]}*; no custom node is needed.{needs}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _code(text: str) -> str:
    """Write any text as code of a line of Markdown: longer fences than those in it, and no
    character that ends it."""
    text = _printable(text)
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text[:1] in "` " or text[-1:] in "` " else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def _fenced(lines: Iterable[str]) -> str:
    """Write lines of any text as a block of code of Markdown."""
    text = "\n".join(map(_printable, lines))
    fence = "`" * (1 + max(2, *map(len, re.findall("`+", text)), 0))
    return f"{fence}\n{text}\n{fence}"


def _plain(text: str) -> str:
    """Write any text as plain words of Markdown."""
    return re.sub(r"([\\`*_<>\[\]#|~&])", r"\\\1", _printable(text))


def _printable(text: str) -> str:
    """Replace line ends and characters that do not print, which a file's name may hold, by their
    escapes."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)
