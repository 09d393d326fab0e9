"""Speeds that *Measure my card* found on this machine, kept in a small file below ComfyUI's user folder.

The file holds figures, the names and versions of card and software, and ComfyUI's name of the model's architecture: no
name of a file or person, no prompt, no seed.
"""

import functools
import json
import logging
import math
from dataclasses import asdict
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import folder_paths
import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from ....precision.base.errors import CheckpointError
from ....precision.devices.detect import Device
from ....precision.devices.measurements import Measurement
from ....precision.files.atomic_write import os_errors_as, replacing
from ....precision.files.safetensors_header import read_object
from ....precision.formats.card import pack_version
from ....precision.study.speeds import speeds_beside_16_bit
from ....precision.study.tradeoffs import Measurements
from ..comfyui.model_facts import parameter_count
from .devices import current_device, nvidia_driver

FOLDER = "__halfsafe"
"""A folder of ComfyUI's user folder with this prefix is no user's, and ComfyUI's server does not hand it out
(``get_system_user_directory`` in folder_paths.py)."""
FILE = "speeds.json"
MOST_BYTES = 1 << 16
MOST = 32
"""Models in the file; the oldest one goes."""
MOST_LETTERS = 200
MOST_PARAMETERS = 1 << 63
SAME_SIZE = 0.02
"""The share by which the parameters of a file may differ from the model measured: ComfyUI creates a few itself."""
logger = logging.getLogger("halfsafe")


class Kept(NamedTuple):
    """Speeds of one model on one machine.

    ``machine``: names and versions of what they hold for. ``architecture``: ComfyUI's class of the model's
    configuration; ``parameters``: their count in the model.
    """

    machine: dict[str, str]
    architecture: str
    parameters: int
    speeds: list[Measurement]

    def is_of(self, architecture: str, parameters: int) -> bool:
        """True if these are the speeds of a model: one figure holds for its finetunes, and for no other size."""
        return architecture == self.architecture and math.isclose(parameters, self.parameters, rel_tol=SAME_SIZE)


def keep_speeds(found: Measurements, patcher: ModelPatcher) -> None:
    """Store the speeds measured on this machine. A file that cannot be written is logged."""
    device = current_device()
    speeds = speeds_beside_16_bit(found, date.today().isoformat())
    if not speeds or device.simulated or device.torch_device.type == "cpu":  # a CPU emulates 16 bit
        return
    own = Kept(_machine(device), *_identity(patcher), speeds)
    others = [one for one in _read() if (one.machine, *one[1:3]) != (own.machine, *own[1:3])]
    text = json.dumps({"version": 1, "speeds": [_as_json(one) for one in [own, *others][:MOST]]}, indent=1)
    path = _path()
    try:
        with os_errors_as(path, "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path, overwrite=True) as file:
                file.write(text.encode())
    except CheckpointError as error:
        logger.warning("Halfsafe: this measurement is not kept for later runs: %s", error)


def kept_speeds(device: Device) -> list[Kept]:
    """List the measurements of this machine with its present driver and versions, newest first."""
    if device.simulated or device.torch_device.type == "cpu":
        return []
    machine = _machine(device)
    return [one for one in _read() if one.machine == machine]


def speeds_of(patcher: ModelPatcher) -> list[Measurement]:
    """List what was measured of a loaded model on this machine; empty for a text encoder."""
    if not isinstance(patcher.model, BaseModel):
        return []
    if not (kept := kept_speeds(current_device())):
        return []
    own = _identity(patcher)
    return next((one.speeds for one in kept if one.is_of(*own)), [])


def _identity(patcher: ModelPatcher) -> tuple[str, int]:
    return type(patcher.model.model_config).__name__, parameter_count(patcher)


def _machine(device: Device) -> dict[str, str]:
    return {
        "device": device.name,
        "driver": nvidia_driver(),
        "torch": str(torch.__version__),
        "comfyui": _comfyui_version(),
        "comfy-kitchen": _version_of("comfy-kitchen"),
        "halfsafe": pack_version(),
    }


def _comfyui_version() -> str:
    try:
        import comfyui_version
    except ImportError:
        return "-"
    return comfyui_version.__version__


def _version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "-"


def _path() -> Path:
    return Path(folder_paths.get_user_directory()) / FOLDER / FILE


def _read() -> list[Kept]:
    """Read the stored measurements; an empty list if the file is missing or malformed."""
    path = _path()
    try:
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError
        return list(map(_kept, read_object(data)["speeds"]))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
        _log_once(path, repr(error))
        return []


@functools.cache
def _log_once(path: Path, why: str) -> None:
    logger.warning("Halfsafe: %s is damaged or not of Halfsafe, and is not used: %s", path, why)


def _kept(one: dict) -> Kept:
    """Check an entry of the file.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: it is not as it was written.
    """
    speeds = [Measurement(**{**row, "ratio": _ratio(row["ratio"])}) for row in one["speeds"]]
    found = Kept(one["machine"], one["architecture"], one["parameters"], speeds)
    texts = [
        *found.machine,
        *found.machine.values(),
        found.architecture,
        *(text for row in speeds for text in _texts(row)),
    ]
    if type(found.parameters) is not int or not 0 < found.parameters < MOST_PARAMETERS:
        raise ValueError
    if not all(isinstance(text, str) and len(text) <= MOST_LETTERS for text in texts):
        raise ValueError
    return found


def _ratio(value: Any) -> tuple[float, float]:
    least, most = map(float, value)
    if not (least > 0 and most >= least and math.isfinite(most)):
        raise ValueError
    return least, most


def _texts(row: Measurement) -> list:
    return [value for name, value in asdict(row).items() if name != "ratio"]


def _as_json(one: Kept) -> dict:
    return {**one._asdict(), "speeds": [asdict(row) for row in one.speeds]}
