"""Convert a file from disk to disk into ComfyUI's own quantization format."""

import os
import shlex
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ..base.errors import CheckpointError, NonFiniteWeight
from ..base.message import Message
from ..base.text import hanging, listed, size_text, wrapped
from ..devices.hardware import default_device
from ..files.safetensors_file import open_checkpoint, write_safetensors
from ..files.tensor_file import TensorFile
from ..files.zeros import zero_places
from ..formats.card import Provenance, source_of
from ..formats.checkpoint import CARD_KEY, Checkpoint, dialect_text, read_checkpoint
from ..formats.comfy_format import made_here, tensors_made
from ..formats.diffusers_names import origins_of
from ..formats.families import UNKNOWN, family_of
from ..formats.joined import FUSED, JoinedWeights
from ..formats.layer_plan import LayerPlan
from ..formats.readers import UNKNOWN_PREFIXES, read_by, refuse_lora
from ..formats.registry import FORMAT_OF_STORAGE
from ..formats.stored_weight import StoredWeight
from ..make.calibrated import CalibratedRounding
from ..make.calibration import CalibrationData
from ..make.weight_errors import measuring_errors, told_again
from ..plan.facts import layer_specs
from ..plan.layers import notes_on, plan_file, plan_weights
from ..plan.nvfp4 import nvfp4_doubts
from ..plan.presets import DEFAULT_PRESET
from ..plan.rules import Rules
from ..report.model_card import add_model_card
from .inspect import section

WITHOUT_PREFIX = "The names were written without '{0}', with which ComfyUI does not load them."
WITH_OWN_NAMES = "The file uses diffusers' layer names; ComfyUI's were written."


@dataclass(frozen=True)
class ConvertSummary:
    """What :func:`convert_file` did. ``weights`` counts weights per storage; ``kept`` holds (layer,
    reason); ``readers`` says who reads the quantized layers of the file; ``card`` is a sentence on
    the model card.
    """

    source: str
    target: str
    dialect: str
    source_bytes: int
    target_bytes: int
    seconds: float
    weights: dict[str, int]
    kept: list[tuple[str, str]]
    notes: list[str]
    readers: list[str]
    card: str = ""

    def text(self) -> str:
        """Describe the file that was written, the time, the layers stored otherwise than asked, and who
        reads the file."""
        rate = self.source_bytes / max(self.seconds, 1e-9)
        source = size_text(self.source_bytes)
        target = size_text(self.target_bytes)
        done = f"{source} ({self.dialect}) to {target} in {self.seconds:.1f} s, {size_text(rate)}/s"
        lines = wrapped(f"{self.target}: {done}", "")
        lines += hanging("  stored      ", ", ".join(f"{count} {storage}" for storage, count in self.weights.items()))
        lines += hanging("  model card  ", self.card) if self.card else []
        lines += section("kept", [f"{name}: {reason}" for name, reason in self.kept])
        return "\n".join(lines + section("notes", self.notes) + section("read by", self.readers))


def convert_file(
    source: str | os.PathLike,
    target: str | os.PathLike,
    storage: str,
    rules: Rules,
    progress: Callable[[int], None] | None = None,
    calibration: CalibrationData | None = None,
    overwrite: bool = True,
    card: bool = False,
) -> ConvertSummary:
    """Convert a file, or the parts of a sharded set into a single file, weight by weight. Every
    weight is checked for NaN/Inf.

    Args:
        progress: called with the bytes of the source just dealt with, :attr:`TensorFile.data_bytes`
            in all.
        calibration: of this very file; its weights are rounded by it, on a GPU where there is one.
        overwrite: False to leave a target as it is that appears meanwhile.
        card: write a model card beside the target once it is complete, if there is no file of that
            name.

    Raises:
        CheckpointError: source unreadable, damaged, cut while it is read, a LoRA, or of a kind in
            which nothing reads quantized layers; target not writable, the same file, or to be left;
            NaN or Inf.
        HalfsafeError: the calibration is of another model.

    Example:
        >>> from halfsafe.precision.commands.convert import convert_file
        >>> from halfsafe.precision.plan.rules import rules_from
        >>> summary = convert_file("model.safetensors", "int8.safetensors", "int8", rules_from())
        >>> summary.weights
        {'fp16': 84, 'int8': 16}
    """
    began = time.perf_counter()
    file, checkpoint, sources = _read(source, Path(target))
    outline = _outline(checkpoint)
    by_name = plan_file(outline, checkpoint.prefix, storage, rules)
    with _told_by_its_part(checkpoint.weights, source):
        plans = plan_weights(checkpoint.weights, by_name, source, done=_done(file, sources))
    formats = {name: FORMAT_OF_STORAGE[plan.stored] for name, plan in plans.items() if plan.declared}
    readings = read_by(outline, formats)
    for reading in readings:
        reading.require_reader(checkpoint.path)
    lines = [str(rule) for rule in rules.own]
    provenance = Provenance(source_of(file), storage, rules.names, lines, card=file.metadata.get(CARD_KEY, ""))
    rounding = None
    if calibration:
        name = str(provenance.source["file"])
        prefix = checkpoint.prefix
        device = default_device()
        rounding = CalibratedRounding(calibration, checkpoint.weights, plans, provenance.source, name, prefix, device)
        provenance = replace(provenance, calibration=rounding.noted())
    metadata = {"format": "pt"} | checkpoint.metadata | provenance.card_entry(plans.values(), readings)
    made = (rounding.made if rounding else made_here)(checkpoint.weights, plans, source)
    errors: dict[str, float] = {}
    made = measuring_errors(made, plans, errors, all_changed=card)
    specs = [spec for plan in plans.values() for spec in plan.specs]
    zeros: dict[str, list[int]] = defaultdict(list)
    done = _done(file, sources, progress, zeros)
    with _told_by_its_part(checkpoint.weights, source):
        write_safetensors(target, specs, tensors_made(made, done), metadata, overwrite)
    if progress:
        progress(file.data_bytes - sum(_size(file, names) for names in sources.values()))
    notes = _notes(outline, checkpoint, rules, plans)
    doubts = [*told_again(plans, errors), *nvfp4_doubts(outline.model_shapes, plans.values())]
    told = ""
    if card:
        command = _command_line(source, target, storage, rules, calibration)
        folder = _folder_in_comfyui(outline)
        told = add_model_card(target, provenance, command, plans, errors, folder, readings, doubts)
    return ConvertSummary(
        source=str(source),
        target=str(target),
        dialect=dialect_text(checkpoint.dialects),
        source_bytes=file.data_bytes,
        target_bytes=os.path.getsize(target),
        seconds=time.perf_counter() - began,
        weights=dict(Counter(plan.stored for plan in plans.values())),
        kept=[(name.removesuffix(".weight"), plan.why_stored) for name, plan in plans.items() if plan.kept],
        notes=[*doubts, *notes, *checkpoint.zero_notes(zeros)] + ([rounding.text()] if rounding else []),
        readers=[reading.text for reading in readings],
        card=told,
    )


def _command_line(source, target, storage: str, rules: Rules, calibration: CalibrationData | None) -> str:
    """Return the command that makes such a file: with the names of files, and no path of this
    machine."""
    words = ["python", "-m", "halfsafe", "convert", Path(source).name, Path(target).name, "--storage", storage]
    words += [word for preset in rules.names or ("none",) if preset != DEFAULT_PRESET for word in ("--preset", preset)]
    words += ["--rules", "rules.txt"] if rules.own else []
    words += ["--calibration", "calibration.safetensors"] if calibration else []
    return shlex.join(words)


def _read(source: str | os.PathLike, target: Path) -> tuple[TensorFile, Checkpoint, Mapping[str, Sequence[str]]]:
    """Open a file that can be converted into ``target``. Returns the file, its contents under the
    names that ComfyUI reads, and for each the names of its tensors in the file."""
    file = open_checkpoint(source)
    if os.path.exists(target) and any(target.samefile(part) for part in file.files):
        raise CheckpointError(target, "source and target are the same file", advice="Choose another name for it.")
    checkpoint = read_checkpoint(file, file.metadata, source)
    refuse_lora(checkpoint)
    prefix = checkpoint.prefix
    start = prefix if prefix in UNKNOWN_PREFIXES else ""
    weights: Mapping[str, StoredWeight] = {
        name.removeprefix(start): replace(weight, name=name.removeprefix(start)) if start else weight
        for name, weight in checkpoint.weights.items()
    }
    sources: dict[str, Sequence[str]] = {name: [start + name] for name in weights}
    notes: list[str] = [Message(WITHOUT_PREFIX, prefix)] if start else []
    if origins := origins_of({name: weight.shape for name, weight in weights.items()}, source):
        weights = JoinedWeights(weights, origins)
        sources = {name: [start + part for part in origin.names] for name, origin in origins.items()}
        notes.append(WITH_OWN_NAMES)
    return file, replace(checkpoint, weights=weights, notes=[*checkpoint.notes, *notes]), sources


@contextmanager
def _told_by_its_part(weights: Mapping[str, StoredWeight], path) -> Iterator[None]:
    """Let an error about NaN name the tensor of the file, not the weight joined from it."""
    try:
        yield
    except NonFiniteWeight as error:
        if isinstance(weights, JoinedWeights) and error.tensor in weights:
            for part in weights.parts(str(error.tensor)):
                part.finite_bound(path)
        raise


def _outline(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint without data, by whose names and shapes a plan is made: joining weights
    reads them."""
    weights = checkpoint.weights
    return replace(checkpoint, weights=weights.outline()) if isinstance(weights, JoinedWeights) else checkpoint


def _size(file: TensorFile, names: Iterable[str]) -> int:
    return sum(file.entries[name].end - file.entries[name].start for name in names)


def _done(
    file: TensorFile,
    sources: Mapping[str, Sequence[str]],
    progress: Callable[[int], None] | None = None,
    zeros: dict[str, list[int]] | None = None,
) -> Callable[[str, int], None]:
    """Return what to do once a weight is planned or written: look for zeros in its data, give the
    pages of its tensors in the file back, call the progress, and check the source."""

    def done(name: str, size: int) -> None:
        for source in sources[name]:
            if zeros is not None:
                entry = file.entries[source]
                zeros[str(entry.file)] += zero_places(file[source], entry.start)
            file.release(source)
        if progress:
            progress(_size(file, sources[name]))
        file.require_whole()

    return done


def _notes(outline: Checkpoint, checkpoint: Checkpoint, rules: Rules, plans: Mapping[str, LayerPlan]) -> list[str]:
    idle = rules.without_effect(layer_specs(outline, outline.prefix))
    unpacked = checkpoint.weights.unpacked if isinstance(checkpoint.weights, JoinedWeights) else ()
    told = [Message(FUSED, listed([name.removesuffix(".weight") for name in unpacked]))] if unpacked else []
    return [*checkpoint.notes, *told, *(f"{rule.setting}: {rule.reason}" for rule in idle), *notes_on(plans)]


def _folder_in_comfyui(checkpoint: Checkpoint) -> str:
    """Return the folder below ComfyUI's ``models`` of a file's kind: ``diffusion_models`` or
    ``checkpoints``; empty for other kinds, which the names of tensors do not tell here."""
    inside = [name.startswith(checkpoint.prefix) for name in checkpoint.weights]
    if checkpoint.prefix and not all(inside):
        return "checkpoints"
    return "" if family_of(checkpoint.model_shapes) == UNKNOWN else "diffusion_models"
