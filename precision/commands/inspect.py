"""Contents of a model file, and problems of its scales and values: the commands ``inspect`` and
``scan``."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch

from ..base.dtypes import FP8_DTYPES, FP16_MAX, name_of
from ..base.errors import CheckpointError
from ..base.text import count_text, size_text, table, wrapped
from ..files.safetensors_file import open_checkpoint
from ..files.tensor_file import TensorFile
from ..files.zeros import zero_places, zero_runs
from ..formats.card import card_in, card_lines
from ..formats.checkpoint import (
    COMFY_QUANT,
    QUANTIZATION_KEY,
    SCALED_FP8,
    Checkpoint,
    dialect_text,
    read_checkpoint,
)
from ..formats.families import UNKNOWN, family_of
from ..formats.plain import MISREADINGS
from ..formats.readers import read_by
from ..formats.registry import FORMAT_OF_STORAGE
from ..formats.stored_weight import StoredWeight

_CHUNK = 1 << 22
PAST_FP16 = "values above 65504: Inf once cast to fp16"
COMFYUI_READS = frozenset({COMFY_QUANT, QUANTIZATION_KEY, SCALED_FP8})
MOST_ITEMS = 30
FUSED_GROUP = 256
ROTATED_APART = (
    "{} layers: int8 rotated in groups of {} inputs. comfy-kitchen's CUDA kernel that rotates and quantizes inputs at "
    "once takes groups of 256 alone (0.2.40); others are rotated by a product of their own."
)


def _problem(tensor: str, kind: str, text: str) -> dict[str, str]:
    """Return an entry of ``problems``: a fault that makes a file unsafe to run.

    ``kind``: nan, inf, scale, fp16_range, undecided, zeros or unreadable.
    """
    return {"tensor": tensor, "kind": kind, "text": text}


@dataclass(frozen=True)
class Inspection:
    """Contents and problems of a file.

    Attributes:
        dtypes: dtype name -> {"tensors": n, "bytes": n}.
        model: the diffusion model's name or family; None for another kind of file.
        scales: granularity, or the storage with scales of its own (``int8``, ``nvfp4``) -> number
            of weights; also ``input`` and ``full_precision``.
        values: its values were read too, and not only headers and scales.
        in_comfyui: what stock ComfyUI would do wrong with it.
        notes: what was assumed or repaired while reading it.
        card: what Halfsafe wrote into its metadata, if it made the file.
    """

    file: str
    dialect: str | None
    bytes: int
    parameters: int
    tensors: int
    layers: int
    dtypes: dict[str, dict[str, int]]
    model: str | None = None
    scales: dict[str, int] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)
    in_comfyui: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    card: dict | None = None
    values: bool = False


def inspect_file(path, values: bool = False, progress: Callable[[int], None] | None = None) -> Inspection:
    """Read headers and scales, whatever the size of the file; with ``values`` also each tensor,
    once.

    ``progress``: called with the bytes just read of the tensors.

    Raises:
        CheckpointError: it is no readable safetensors file.

    Example:
        >>> from halfsafe.precision.commands.inspect import inspect_file
        >>> found = inspect_file("model.safetensors", values=True)
        >>> found.model, found.layers, found.problems
        ('Hunyuan Video', 54, [])
    """
    file = open_checkpoint(path)
    found = Inspection(str(path), None, file.data_bytes, 0, len(file), 0, _dtypes(file), card=card_in(file.metadata))
    problems: list[dict[str, str]] = []
    weights: Mapping[str, StoredWeight] = {}
    try:
        checkpoint = read_checkpoint(file, file.metadata, path)
        weights = checkpoint.weights
        problems += [_problem(name, "undecided", text) for name, text in checkpoint.undecided.items()]
        found = replace(found, **_described(checkpoint))
    except CheckpointError as error:
        problems.append(_problem(error.tensor or "", "scale" if error.tensor else "unreadable", str(error)))
    if values:
        problems += _value_problems(file, weights, progress)
    return replace(found, values=values, problems=problems)


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    weights = list(checkpoint.weights.values())
    model = family_of(checkpoint.model_shapes).name
    return dict(
        dialect=dialect_text(checkpoint.dialects),
        parameters=sum(prod(weight.shape) for weight in weights),
        layers=sum(weight.name.endswith(".weight") for weight in weights),
        model=None if model == UNKNOWN.name else model,
        scales=_scales(weights),
        in_comfyui=_in_comfyui(checkpoint),
        notes=checkpoint.notes,
    )


def _dtypes(file: TensorFile) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for entry in file.entries.values():
        row = result.setdefault(name_of(entry.torch_dtype), {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += entry.end - entry.start
    return dict(sorted(result.items(), key=lambda item: -item[1]["bytes"]))


def _scales(weights: list[StoredWeight]) -> dict[str, int]:
    counts = Counter(filter(None, (weight.format.scaling for weight in weights)))
    counts["input"] = sum(weight.input_scale is not None for weight in weights)
    counts["full_precision"] = sum(weight.full_precision for weight in weights)
    return {key: count for key, count in counts.items() if count}


def _in_comfyui(checkpoint: Checkpoint) -> list[str]:
    """Return how ComfyUI 0.29 to 0.38 reads the file: ``utils.convert_old_quants``,
    ``ops._load_quantized_module``, ``model_base`` (unexpected keys).
    """
    quantized = [weight for weight in checkpoint.weights.values() if weight.quantized]
    declared = not COMFYUI_READS.isdisjoint(checkpoint.dialects)
    marked = SCALED_FP8 in checkpoint.dialects
    misread = Counter(text for weight in quantized for text in weight.format.misread(weight, declared, marked))
    found = [f"{misread[text]} layers: {text}." for text in MISREADINGS if misread[text]]
    groups = Counter(weight.group for weight in quantized if weight.storage == "int8")
    found += [ROTATED_APART.format(count, size) for size, count in groups.items() if size not in (None, FUSED_GROUP)]
    scaled = [weight for weight in quantized if declared and weight.format.scaling]
    held = {w.name: FORMAT_OF_STORAGE[w.storage] for w in scaled if w.storage in FORMAT_OF_STORAGE}
    return found + [reading.text for reading in read_by(checkpoint, held)]


def _value_problems(
    file: TensorFile, weights: Mapping[str, StoredWeight], progress: Callable[[int], None] | None = None
) -> list[dict[str, str]]:
    """Read every tensor of a file once, and list the problems of their values."""
    problems: list[dict[str, str]] = []
    places: dict[str, list[int]] = {str(path): [] for path in file.files}
    for name, tensor in file.items():
        entry = file.entries[name]
        places[str(entry.file)] += zero_places(tensor, entry.start)
        weight = weights.get(name, StoredWeight(name, tensor))
        where = f", in {entry.file.name}" if len(file.files) > 1 else ""
        problems += [_problem(name, kind, text + where) for kind, text in _faults(weight).items()]
        file.release(name)
        if progress:
            progress(tensor.nbytes)
    runs = dict.fromkeys([*zero_runs(file), *zero_runs(file, places)])
    return [*(_problem(run.tensor, "zeros", str(run)) for run in runs), *problems]


def _faults(weight: StoredWeight) -> dict[str, str]:
    """Describe the faults of a weight by their kinds."""
    if not weight.format.has_values(weight):
        return {}
    bound = weight.bound()
    if not bound < float("inf") and (found := _non_finite(weight.data)):
        return found
    return {"fp16_range": PAST_FP16} if weight.exceeds(FP16_MAX, bound) else {}


def _non_finite(data: torch.Tensor) -> dict[str, str]:
    counts: Counter[str] = Counter()
    for part in data.reshape(-1).split(_CHUNK):
        values = part.float() if part.dtype in FP8_DTYPES else part
        counts["nan"] += int(values.isnan().sum())
        counts["inf"] += int(values.isinf().sum())
    words = {"nan": "NaN", "inf": "infinite"}
    return {kind: f"{count} of {data.numel()} values are {words[kind]}" for kind, count in counts.items() if count}


def inspection_text(inspection: Inspection) -> str:
    """Describe in a few lines what a file holds, then problems, ComfyUI's view, and notes."""
    scales = ", ".join(f"{count} {kind}" for kind, count in inspection.scales.items())
    facts = [
        ("dialect", inspection.dialect or "unknown"),
        ("model", inspection.model),
        ("size", f"{size_text(inspection.bytes)}, {count_text(inspection.parameters)} parameters"),
        ("tensors", f"{inspection.tensors}, {inspection.layers} layers"),
    ]
    for dtype, row in inspection.dtypes.items():
        facts.append((f"  {dtype}", f"{row['tensors']} tensors, {size_text(row['bytes'])}"))
    facts += [("scales", scales), ("problems", _verdict(inspection))]
    lines = [inspection.file, table([(f"  {name}", text) for name, text in facts if text])]
    lines += section("card", card_lines(inspection.card or {}))
    lines += section("problems", [*map(_line, inspection.problems)])
    lines += section("stock ComfyUI", inspection.in_comfyui)
    return "\n".join(lines + section("notes", inspection.notes))


def _verdict(inspection: Inspection) -> str:
    if inspection.problems:
        return str(len(inspection.problems))
    return "none" if inspection.values else "none in headers and scales; --values reads the values too"


def _line(problem: dict[str, str]) -> str:
    return problem["text"] if problem["kind"] in ("scale", "unreadable") else f"{problem['tensor']}: {problem['text']}"


def section(title: str, items: list[str]) -> list[str]:
    """List the first items below a title, in lines of 80 columns; an empty list gives none."""
    more = [f"    and {len(items) - MOST_ITEMS} more"] if len(items) > MOST_ITEMS else []
    lines = [line for item in items[:MOST_ITEMS] for line in wrapped(item, "    ", "  ")]
    return [f"  {title}:", *lines, *more] if items else []
