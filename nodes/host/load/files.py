"""Model files: ComfyUI's folders, and the tensors in a file."""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import comfy.memory_management
import comfy.utils
import folder_paths
import torch
from comfy.quant_ops import QuantizedTensor

from ....precision.base.errors import CheckpointError, HalfsafeError
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.files.tensor_file import TensorFile
from ....precision.formats.checkpoint import Checkpoint, read_checkpoint
from ..comfyui.attributes import quantization_format

EXAMPLES = Path(__file__).resolve().parents[3] / "builtin_model"
"""Small files that come with the pack, in folders named as ComfyUI's are.

They are not added to ComfyUI's own folders, which would list them in the nodes of others.
"""
MAPPED = (".safetensors", ".sft")
"""The suffixes by which ``load_torch_file`` in comfy/utils.py knows safetensors."""
_MISMATCH = re.compile(r"size mismatch for (\S+): .*?Size\(\[(.*?)\]\) from checkpoint, .*?Size\(\[(.*?)\]\)")


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
        raise CheckpointError(
            name, f"there is no such file in ComfyUI's {folder} folders", advice="Choose one from the list."
        )
    return path


def version_of(folder: str, *names: str) -> str:
    """Tell a state of listed model files from later ones: the size of each, shards included, and when it changed."""
    opened = (open_checkpoint(model_path(folder, name)) for name in names)
    stats = (os.stat(file) for checkpoint in opened for file in checkpoint.files)
    return ", ".join(f"{found.st_size} bytes at {found.st_mtime_ns}" for found in stats)


def open_model(path: str) -> Checkpoint:
    """Read a model file's header, check it, and map its tensors; nothing is loaded yet."""
    file = open_checkpoint(path)
    return read_checkpoint(_tensors(file), file.metadata, path)


@contextlib.contextmanager
def of_fitting_shapes(*paths: str) -> Iterator[None]:
    """Name the files where torch's ``load_state_dict``, which names tensors alone, finds shapes the model has not."""
    try:
        yield
    except RuntimeError as error:
        found = _MISMATCH.search(str(error))
        if found is None:
            raise
        shape, expected = ([int(size) for size in re.findall(r"\d+", sizes)] for sizes in found.groups()[1:])
        raise _misfit(paths, found[1], shape, expected) from error


def check_quantized_shapes(model: torch.nn.Module, *paths: str) -> None:
    """Find fp8, int8 and like weights that do not fit their layers.

    ComfyUI takes any shape (``_load_quantized_module`` in comfy/ops.py).
    """
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor) and quantization_format(module).startswith(("float8", "int8")):
            found, expected = weight.storage_shape, weight.shape
            if found != expected:
                raise _misfit(paths, f"{name}.weight", found, expected)


def _misfit(paths: Sequence[str], tensor: str, shape: Sequence[int], expected: Sequence[int]) -> CheckpointError:
    problem = f"of shape {'x'.join(map(str, shape))}, where the model has {'x'.join(map(str, expected))}"
    advice = "Parts of two models with the same file names? Download the model again, into a folder of its own."
    return CheckpointError(_file_with(tensor, shape, paths), problem, tensor, advice)


def _file_with(tensor: str, shape: Sequence[int], paths: Sequence[str]) -> str:
    """Return the file, or the shard, that holds a tensor of the loaded model; all files where several may.

    A tensor has another prefix in the model than in its file: ``model.diffusion_model.`` and the like.
    """
    opened = ((file, name) for path in paths for file in [open_checkpoint(path)] for name in file)
    alike = ((file, name) for file, name in opened if file.entries[name].shape == tuple(shape))
    files = {str(file.entries[name].file) for file, name in alike if name.endswith(tensor) or tensor.endswith(name)}
    return files.pop() if len(files) == 1 else ", ".join(paths)


def _tensors(file: TensorFile) -> TensorFile:
    enabled = getattr(comfy.memory_management, "aimdo_enabled", False)
    codes = {entry.dtype for entry in file.entries.values()}
    known = codes <= comfy.utils._TYPES.keys() and all(path.suffix.lower() in MAPPED for path in file.files)
    return MappedByCore(file) if enabled and known else file


class MappedByCore(TensorFile):
    """The tensors of a file or of a sharded set as ComfyUI maps them: those alone are streamed from the disk."""

    def __init__(self, file: TensorFile):
        super().__init__(file.path, file.metadata, file.entries, file.maps)
        self._parts = {path: comfy.utils.load_torch_file(str(path)) for path in file.files}

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._parts[self.entries[name].file][name]


def output_path(filename_prefix: str) -> tuple[str, str]:
    """Return (path of a new file, name below the output folder) for a prefix such as ``diffusion_models/halfsafe``.

    Raises:
        HalfsafeError: the prefix leaves the output folder.
    """
    output = os.path.abspath(folder_paths.get_output_directory())
    if not Path(os.path.abspath(os.path.join(output, filename_prefix))).is_relative_to(output):
        problem = f"The filename prefix '{filename_prefix}' leaves ComfyUI's output folder {output}."
        raise HalfsafeError(problem, "Give a name below it, such as diffusion_models/my_model.")
    folder, name, counter, subfolder, _ = folder_paths.get_save_image_path(
        filename_prefix, folder_paths.get_output_directory()
    )
    file = f"{name}_{counter:05}_.safetensors"
    return f"{folder}/{file}", f"{subfolder}/{file}" if subfolder else file
