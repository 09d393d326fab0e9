"""The card in the metadata of a file that was written here: what made it, and from what."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path

from ..files.safetensors_header import read_object
from ..files.tensor_file import TensorFile
from .checkpoint import CARD_KEY
from .layer_plan import LayerPlan
from .readers import Reading, first_comfyui

_VERSION = re.compile(r'^version = "(.+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Provenance:
    """What a file is made from.

    Attributes:
        source: from :func:`source_of`; empty where the model's file is not known.
        asked: the storage that was asked for.
        presets: names of rules presets, and ``rules``: the user's own lines.
        patched: how many weights had LoRAs or other patches merged.
        card: the source's own card, which stays as it is where no weight changes.
        calibration: what codes were chosen by; empty where all are rounded to nearest.
        unfit: the weights that patches of theirs do not fit, which are not merged.
    """

    source: Mapping[str, object] = field(default_factory=dict)
    asked: str = "as_file"
    presets: Sequence[str] = ()
    rules: Sequence[str] = ()
    patched: int = 0
    card: str = ""
    calibration: Mapping[str, object] = field(default_factory=dict)
    unfit: Sequence[str] = ()

    def card_entry(self, plans: Iterable[LayerPlan], readings: Sequence[Reading]) -> dict[str, str]:
        """Make the card of a file of these weights, as an entry of its metadata.

        ``readings``: who reads its quantized layers.
        """
        plans = list(plans)
        if self.card and not any(plan.changes for plan in plans):
            return {CARD_KEY: self.card}
        unread = [reading.text for reading in readings if reading.since is None]
        card = {
            "halfsafe": pack_version(),
            "needs_comfyui": first_comfyui(readings),
            **({"not_read_by_comfyui": unread} if unread else {}),
            "asked_storage": self.asked,
            "weights": dict(sorted(Counter(plan.stored for plan in plans).items())),
            "rules": {"presets": list(dict.fromkeys(self.presets)), "lines": list(self.rules)},
            "merged_patches": self.patched,
            **({"weights_that_patches_do_not_fit": list(self.unfit)} if self.unfit else {}),
            "source": dict(self.source),
            **({"calibration": dict(self.calibration)} if self.calibration else {}),
        }
        return {CARD_KEY: json.dumps(card)}


def source_of(file: TensorFile) -> dict[str, object]:
    """Describe a file by name, size in bytes of all its parts, and ``fingerprint``."""
    size = sum(os.path.getsize(part) for part in file.files)
    return {"file": file.path.name, "bytes": size, "sha256_of_header_and_4096_bytes_of_each_tensor": file.fingerprint()}


@cache
def pack_version() -> str:
    """Return the pack's version: of its folder's pyproject.toml, else of the installed package."""
    project = Path(__file__).parents[2] / "pyproject.toml"
    found = _VERSION.search(project.read_text(encoding="utf-8")) if project.is_file() else None
    return found[1] if found else version("halfsafe")


def card_in(metadata: Mapping[str, str]) -> dict | None:
    """Read the card of a file by its metadata; None without a readable card."""
    try:
        return read_object(metadata[CARD_KEY])
    except (KeyError, ValueError):
        return None


def card_lines(card: Mapping[str, object]) -> list[str]:
    """Format a card as text, a line for each of its values."""
    return [f"{name.replace('_', ' ')}: {json.dumps(value)}" for name, value in card.items() if value]
