"""What *Halve the memory* asks before it exchanges loaders: this device's 8-bit storages, and which files are left."""

import comfy.model_management
import folder_paths

from ....precision.base.errors import CheckpointError
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.formats.checkpoint import read_checkpoint
from ....precision.plan.auto import UNQUANTIZED, smallest_storage
from ....precision.plan.facts import file_dtype
from .controlnet import DIFFERENCE
from .devices import current_device, unheld_on

READ = (".safetensors", ".sft", ".index.json")
NOT_READ = "Halfsafe's loaders read .safetensors files only"
DIFFERENCES = "it stores differences to a model's weights"
NOT_16_BIT = "its weights are in 8 bits or fewer already"


def halving(files: list[tuple[str, str]]) -> dict:
    """Answer for model files, each (folder of ComfyUI's, name): the storages to load them in, and which are left out.

    ``storage``: of models and ControlNets, ``as_file`` where the device holds no 8-bit weights, and ``why``;
    ``clip_storage``: of text encoders; ``files``: for each why it would not be halved, empty where it would, and
    whether our loaders read it.
    """
    storage, why = smallest_storage(current_device())
    unheld = unheld_on(comfy.model_management.text_encoder_device())
    clip_storage = "int8" if "fp8_e4m3fn" in unheld else "fp8_e4m3fn"
    found = [_judged(folder, name) for folder, name in files]
    return {"storage": storage, "clip_storage": clip_storage, "why": why, "files": found}


def _judged(folder: str, name: str) -> dict:
    if not name.lower().endswith(READ):
        return {"reason": NOT_READ, "read": False}
    path = folder_paths.get_full_path(folder, name)
    if path is None:  # ComfyUI says which file is missing
        return {"reason": "", "read": True}
    try:
        file = open_checkpoint(path)
        checkpoint = read_checkpoint(file, file.metadata, path)
    except CheckpointError as error:
        return {"reason": str(error).removeprefix(f"{path}: "), "read": False}
    if DIFFERENCE in checkpoint.weights:
        return {"reason": DIFFERENCES, "read": False}
    held = file_dtype(checkpoint)
    return {"reason": "" if held in UNQUANTIZED else NOT_16_BIT, "read": True}
