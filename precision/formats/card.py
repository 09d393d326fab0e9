"""The card in the metadata of a file that was written here: what made it, from what, and what that cost in accuracy."""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..dtypes import QUANTIZED_NAMES
from ..files.fingerprint import fingerprint
from ..files.strict_json import read_object
from ..files.tensor_file import TensorFile
from .comfy_format import AS_FILE, StoragePlan, storage_name
from .int8 import dequantize_rows, rotation_group
from .metadata import CARD_KEY
from .registry import FORMAT_OF_STORAGE, FORMATS
from .stored_weight import StoredWeight

HALFSAFE = "1.1.0"
SAMPLED = ((1, 4), (3, 4))
ROWS = 8
ROOM = 32


@dataclass(frozen=True)
class Origin:
    """What a file is made from.

    Attributes:
        source: from :func:`source_of`; empty where the model's file is not known.
        asked: the storage that was asked for.
        presets: names of rules presets, and ``rules``: the user's own lines.
        patched: how many weights had LoRAs or other patches merged.
        card: the source's own card, which stays as it is where no weight changes.
    """

    source: Mapping[str, object] = field(default_factory=dict)
    asked: str = "as_file"
    presets: Sequence[str] = ()
    rules: Sequence[str] = ()
    patched: int = 0
    card: str = ""


def source_of(file: TensorFile) -> dict[str, object]:
    """A file by name, size in bytes of all its parts, and ``fingerprint``."""
    size = sum(os.path.getsize(part) for part in file.files)
    return {"file": file.path.name, "bytes": size, "sha256_of_header_and_4096_bytes_of_each_tensor": fingerprint(file)}


class Card:
    """The card of a file that is being written. The errors come last, into room that was kept for them."""

    def __init__(self, origin: Origin):
        self._origin = origin
        self._storages: Counter[str] = Counter()
        self._formats: set[str] = set()
        self._sums: dict[str, list[float]] = {}
        self._length = 0
        self._changes = False

    def count(self, weight: StoredWeight, plan: StoragePlan) -> None:
        """Take note of a weight that will be in the file, before the first :meth:`metadata`."""
        self._storages[storage_name(weight, plan)] += 1
        self._changes |= plan.storage not in (AS_FILE, weight.storage) or (plan.storage != AS_FILE and weight.granularity != "tensor")
        if plan.storage in QUANTIZED_NAMES:
            self._formats.add(FORMAT_OF_STORAGE[plan.storage].name)
        elif plan.storage == AS_FILE and weight.encoding is not None:
            self._formats.add(weight.encoding.format)

    def metadata(self) -> dict[str, str]:
        """The metadata's entry, of one length whatever was measured since the first."""
        if self._origin.card and not self._changes:
            return {CARD_KEY: self._origin.card}
        text = self._json()
        length = len(json.dumps(text))  # as the header holds it, with its quotes escaped
        self._length = self._length or length + len(WHAT_ERROR) + ROOM * (1 + len(QUANTIZED_NAMES))
        return {CARD_KEY: text + " " * (self._length - length)}

    def measure(self, weight: StoredWeight, storage: str, made: Mapping[str, torch.Tensor]) -> None:
        """Compare some rows of a quantized weight's tensors with the weight that they were made of."""
        data = made[weight.name]
        if storage not in QUANTIZED_NAMES or data is weight.data:
            return
        sums = self._sums.setdefault(storage, [0.0, 0.0])
        for part in _parts(weight.shape[0]):
            exact = weight.rows(part).double()  # squares of small weights are zero in fp32, of large ones Inf
            sums[0] += (_values(data, made[f"{weight.layer}.weight_scale"], part) - exact).square().sum().item()
            sums[1] += exact.square().sum().item()

    def _json(self) -> str:
        errors = {storage: round(math.sqrt(error / total), 6) for storage, (error, total) in self._sums.items() if total}
        values = {
            "halfsafe": HALFSAFE,
            "needs_comfyui": max((FORMATS[name].since for name in self._formats), key=_numbers, default=None),
            "asked_storage": self._origin.asked,
            "weights": dict(sorted(self._storages.items())),
            "rules": {"presets": list(dict.fromkeys(self._origin.presets)), "lines": list(self._origin.rules)},
            "merged_patches": self._origin.patched,
            "source": dict(self._origin.source),
        }
        return json.dumps({**values, **({WHAT_ERROR: errors} if errors else {})})


WHAT_ERROR = f"relative_rms_error_of_{ROWS * len(SAMPLED)}_rows_per_weight"


def _parts(rows: int) -> list[slice]:
    """Two runs of rows, or all of them where there are few."""
    if rows <= ROWS * len(SAMPLED):
        return [slice(0, rows)]
    return [slice(start, start + ROWS) for start in (rows * over // under - ROWS // 2 for over, under in SAMPLED)]


def _values(data: torch.Tensor, scale: torch.Tensor, part: slice) -> torch.Tensor:
    if data.dtype == torch.int8:
        return dequantize_rows(data[part], scale[part], rotation_group(data.shape[1]))
    return data[part].float() * scale


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def card_in(metadata: Mapping[str, str]) -> dict | None:
    """The card of a file by its metadata; None where it has none that can be read."""
    try:
        return read_object(metadata[CARD_KEY])
    except (KeyError, ValueError):
        return None


def card_lines(card: Mapping[str, object]) -> list[str]:
    """A card as text, a line for each of its values; errors also in dB."""
    lines = [f"{name.replace('_', ' ')}: {json.dumps(value)}" for name, value in card.items() if value and name != WHAT_ERROR]
    errors = card.get(WHAT_ERROR)
    pairs = errors.items() if isinstance(errors, dict) else ()
    numbers = [(storage, error) for storage, error in pairs if isinstance(error, (int, float)) and error > 0]
    what = WHAT_ERROR.replace("_", " ")
    return [*lines, *(f"{what}: {storage} {error:.2%} ({-20 * math.log10(error):.1f} dB)" for storage, error in numbers)]
