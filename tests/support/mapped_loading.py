"""Loading as under ComfyUI's dynamic VRAM on a CPU: comfy-aimdo maps the files, and a model is given the tensors themselves.

Patchers of dynamic VRAM need CUDA memory, so a model runs as others do once the context has ended.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)$")


@contextlib.contextmanager
def mapped_loading() -> Iterator[None]:
    """As ``main.py`` of ComfyUI turns dynamic VRAM on."""
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy_aimdo.control

    assert comfy_aimdo.control.init()

    class Assigning(comfy.model_patcher.ModelPatcher):
        loading = True

        def is_dynamic(self) -> bool:
            return Assigning.loading

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.memory_management, "aimdo_enabled", True)
        patch.setattr(comfy.model_patcher, "CoreModelPatcher", Assigning)
        patch.setattr(comfy.model_management, "is_device_cpu", lambda device: False)
        try:
            yield
        finally:
            Assigning.loading = False


class Reads(TorchDispatchMode):
    """``bytes``: of the slices of files that operations were given, views of them apart, and that became numpy arrays."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __enter__(self) -> Reads:
        self._patch = pytest.MonkeyPatch()
        numpy = torch.Tensor.numpy
        self._patch.setattr(
            torch.Tensor, "numpy", lambda tensor, **options: self._note(tensor) or numpy(tensor, **options)
        )
        return super().__enter__()

    def __exit__(self, *error) -> None:
        self._patch.undo()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not any(found.alias_info for found in func._schema.returns) and "empty" not in func.__name__:
            for one in tree_leaves((args, kwargs)):
                self._note(one)
        return func(*args, **(kwargs or {}))

    def _note(self, tensor: object) -> None:
        if type(tensor) is torch.Tensor and hasattr(tensor.untyped_storage(), "_comfy_tensor_file_slice"):
            self.bytes += tensor.nbytes


def own_bytes(module: torch.nn.Module, *paths: Path) -> int:
    """Bytes of the storages of a module's tensors that are no slices of the files."""
    ranges = [range(int(m[1], 16), int(m[2], 16)) for m in _mappings() if m[3] in map(str, paths)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in tensors_of(module)}
    return sum(size for address, size in storages.items() if not any(address in pages for pages in ranges))


def _mappings() -> list[re.Match]:
    return [found for line in Path("/proc/self/maps").read_text().splitlines() if (found := _MAPPING.match(line))]


def tensors_of(module: torch.nn.Module) -> list[torch.Tensor]:
    """The plain tensors of a module: data and scales of quantized weights apart."""
    from comfy.quant_ops import QuantizedTensor

    held = [*module.parameters(), *module.buffers()]
    return [part for one in held for part in (_parts(one) if isinstance(one, QuantizedTensor) else [one])]


def _parts(quantized: torch.Tensor) -> list[torch.Tensor]:
    """The data and the scales of a quantized weight; nvfp4 has two scales."""
    return [quantized._qdata, *(value for value in vars(quantized._params).values() if isinstance(value, torch.Tensor))]
