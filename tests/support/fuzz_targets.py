"""What a damaged file is given to, and how each answer is judged: done and right, or refused with a typed error."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from halfsafe.precision.base.dtypes import QUANTIZED_NAMES
from halfsafe.precision.base.errors import CheckpointError, HalfsafeError, StorageNotHeld
from halfsafe.precision.base.options import STORAGE_OPTIONS
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.commands.inspect import inspect_file, inspection_text
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.registry import FORMAT_OF_STORAGE
from halfsafe.precision.plan.layers import plan_file
from halfsafe.precision.plan.presets import PRESETS
from halfsafe.precision.plan.rules import rules_from
from support.measures import relative_error
from support.storing import in_storages

STORAGES = [name for name in STORAGE_OPTIONS[1:] if name not in QUANTIZED_NAMES or FORMAT_OF_STORAGE[name].can_write]
WORST_ERROR = 0.13  # half a step of e5m2's two bits, and some
CONTROL = re.compile("[\x00-\x08\x0b-\x1f]")


class Wrong(AssertionError):
    """An answer that is neither right nor a typed error."""


def check_read(path: Path, random: Random) -> None:
    file = open_checkpoint(path)
    if sum(tensor.nbytes for tensor in file.values()) != file.data_bytes:
        raise Wrong("the tensors are not as large as the file says")
    checkpoint = read_checkpoint(file, file.metadata, path)
    for weight in checkpoint.weights.values():
        weight.dequantize(torch.float32)


def check_inspect(path: Path, random: Random) -> None:
    inspection = inspect_file(path)
    printable(asdict(inspection), inspection_text(inspection))


def check_scan(path: Path, random: Random) -> None:
    seen: list[int] = []
    scan = inspect_file(path, values=True, progress=seen.append)
    printable(asdict(scan), inspection_text(scan))
    if sum(seen) != open_checkpoint(path).data_bytes:
        raise Wrong("scan did not count every byte")


def check_convert(path: Path, random: Random) -> None:
    """A conversion is whole, opens again, holds no new NaN or Inf and the same numbers; a refusal leaves no file."""
    target, storage = path.with_name("out.safetensors"), random.choice(STORAGES)
    rules = rules_from(random.choice(("", "*.ffn.2 storage=bf16")), random.choice(list(PRESETS)))
    target.unlink(missing_ok=True)
    try:
        summary = convert_file(path, target, storage, rules)
    except HalfsafeError:
        if target.exists():
            raise Wrong("a refused conversion left its target") from None
        raise
    printable(vars(summary), summary.text())
    _same_numbers(path, target, storage)
    _same_in_memory(path, target, storage, rules)


def _same_numbers(path: Path, target: Path, storage: str) -> None:
    bad = [found for found in inspect_file(target, values=True).problems if found["kind"] != "fp16_range"]
    if bad:
        raise Wrong(f"the result holds what the source did not: {bad[0]['text']}")
    before, after = (read_checkpoint(file, file.metadata, file.path) for file in map(open_checkpoint, (path, target)))
    if set(before.weights) != set(after.weights):
        raise Wrong(f"weights came or went: {set(before.weights) ^ set(after.weights)}")
    for name, weight in before.weights.items():
        if weight.format.has_values(weight) and weight.format.unpacks:
            _close(name, weight.dequantize(torch.float64), after.weights[name].dequantize(torch.float64), storage)


def _close(name: str, reference: torch.Tensor, found: torch.Tensor, storage: str) -> None:
    largest = reference.abs().max().item() if reference.numel() else 0.0
    if largest > 1e-3 and (error := relative_error(reference, found)) > WORST_ERROR:
        raise Wrong(f"{name!r} is off by {error:.1%} as {storage}")


def _same_in_memory(path: Path, target: Path, storage: str, rules) -> None:
    file, written = open_checkpoint(path), open_checkpoint(target)
    checkpoint = read_checkpoint(file, file.metadata, path)
    wanted = {
        name.removesuffix(".weight"): plan.storage
        for name, plan in plan_file(checkpoint, checkpoint.prefix, storage, rules).items()
    }
    tensors, _ = in_storages(checkpoint, wanted)
    if set(tensors) != set(written):
        raise Wrong(f"in memory and in the file: {set(tensors) ^ set(written)}")
    for name, tensor in tensors.items():
        if _bytes(tensor) != _bytes(written[name]):
            raise Wrong(f"{name!r} is not the same in memory and in the file")


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def printable(data: dict, text: str) -> None:
    """Both forms go to files, pipes and pages: JSON without NaN, text that encodes and cannot steer a terminal."""
    json.dumps(data, allow_nan=False)
    text.encode()
    if CONTROL.search(text):
        raise Wrong(f"the text holds control characters: {text[:200]!r}")


TARGETS = {"read": check_read, "inspect": check_inspect, "scan": check_scan, "convert": check_convert}


def judge(target: str, path: Path, random: Random) -> str:
    """The outcome of one target on one file.

    Raises:
        Wrong: the answer is wrong, or the error is of the wrong kind or does not name the file.
        Exception: whatever else the target raised.
    """
    try:
        TARGETS[target](path, random)
    except HalfsafeError as error:
        str(error).encode()
        refused = isinstance(error, CheckpointError) and path.parent.name in error.path
        if not refused and not (target == "read" and isinstance(error, StorageNotHeld)):
            raise Wrong(f"{type(error).__name__}: {error}") from error
        return type(error).__name__
    return "ok"
