"""Model files: ComfyUI's folders, and the tensors in a file."""

import os
from pathlib import Path

import comfy.memory_management
import comfy.utils
import folder_paths
import torch

try:
    from app import governance
except ImportError:  # before the ComfyUI that follows 0.39
    governance = None

from ....precision.base.errors import CheckpointError, HalfsafeError
from ....precision.base.message import Message
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.files.tensor_file import TensorFile
from ....precision.formats.checkpoint import Checkpoint, read_checkpoint

EXAMPLES = Path(__file__).resolve().parents[3] / "builtin_model"
"""Small files that come with the pack, in folders named as ComfyUI's are.

They are not added to ComfyUI's own folders, which would list them in the nodes of others.
"""


def model_files(folder: str) -> list[str]:
    """List the names ComfyUI has for a model folder such as ``diffusion_models``, then the pack's own examples."""
    return list(dict.fromkeys([*folder_paths.get_filename_list(folder), *_examples(folder)]))


def _examples(folder: str) -> list[str]:
    return sorted(file.name for file in (EXAMPLES / folder).glob("*.safetensors"))


def model_path(folder: str, name: str) -> str:
    """Return the full path of a listed model file.

    Raises:
        CheckpointError: there is no such file inside ComfyUI's model folders.
    """
    path = folder_paths.get_full_path(folder, name)
    if path is None and name in _examples(folder):
        path = str(EXAMPLES / folder / name)
    if path is None:
        problem = Message("there is no such file in ComfyUI's {0} folders", folder)
        raise CheckpointError(name, problem, advice="Choose one from the list.")
    return path


def open_model(path: str) -> Checkpoint:
    """Read a model file's header, check it, and map its tensors; nothing is loaded yet.

    Raises:
        CheckpointError: the file, or a shard of it, cannot be read.
        CheckpointError: the policy of this ComfyUI does not list it.
    """
    file = open_checkpoint(path)
    _check_policy(file)
    if getattr(comfy.memory_management, "aimdo_enabled", False) and _is_mapped(file):
        file = _MappedByCore(file)
    return read_checkpoint(file, file.metadata, path)


def _check_policy(file: TensorFile) -> None:
    """Ask a governed ComfyUI (PR #16167) about each file, as its own ``load_torch_file`` does."""
    if governance is None:
        return
    for part in file.files:
        if not governance.model_allowed(str(part)):
            raise CheckpointError(part, "not permitted by the policy of this ComfyUI")


def _is_mapped(file: TensorFile) -> bool:
    codes = {entry.dtype for entry in file.entries.values()}
    suffixes = {path.suffix.lower() for path in file.files}
    # By these suffixes ``load_torch_file`` in comfy/utils.py knows safetensors.
    return codes <= comfy.utils._TYPES.keys() and suffixes <= {".safetensors", ".sft"}


class _MappedByCore(TensorFile):
    """The tensors of a file or of a sharded set as ComfyUI maps them: those alone are streamed from the disk."""

    def __init__(self, file: TensorFile):
        super().__init__(file.path, file.metadata, file.entries, file.maps)
        self._parts = {path: comfy.utils.load_torch_file(str(path)) for path in file.files}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._parts[self.entries[name].file][name]


def output_path(filename_prefix: str) -> tuple[str, str]:
    """Return (path of a new file, name below the output folder) for a prefix such as ``diffusion_models/halfsafe``.

    Raises:
        HalfsafeError: the prefix leaves the output folder, or no file can be called so.
    """
    output = os.path.abspath(folder_paths.get_output_directory())
    if "\0" in filename_prefix:
        raise HalfsafeError("The filename prefix holds a NUL character.", "Write the prefix anew.")
    if not Path(os.path.abspath(os.path.join(output, filename_prefix))).is_relative_to(output):
        problem = Message("The filename prefix '{0}' leaves ComfyUI's output folder {1}.", filename_prefix, output)
        raise HalfsafeError(problem, "Give a name below it, such as diffusion_models/my_model.")
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        filename_prefix, folder_paths.get_output_directory()
    )
    file = f"{name}_{counter:05}_.safetensors"
    return f"{folder}/{file}", f"{subfolder}/{file}" if subfolder else file
