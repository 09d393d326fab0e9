"""The weights that ComfyUI's ControlLora copies from a model, as numbers where they are stored in 8 bits."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import comfy.utils
import torch

from ....precision.arithmetic.patching import patched
from ..core import is_in_dynamic_memory
from ..facts.layers import DIFFUSION_MODEL
from ..run.modules import dequantized

if TYPE_CHECKING:
    from .patcher import UnmergedLowRank


class DequantizedState(Mapping[str, torch.Tensor]):
    """The state dict of a diffusion model, its 8-bit weights dequantized with their LoRAs where they are read.

    ComfyUI's own has their data without its scale, and no LoRA that is kept unmerged.
    """

    def __init__(self, patcher: "UnmergedLowRank", state: Mapping[str, torch.Tensor]):
        self._patcher = patcher
        self._state = state

    def __getitem__(self, name: str) -> torch.Tensor:
        key, stored = f"{DIFFUSION_MODEL}{name}", self._state[name]
        if key in self._patcher.sorted_patches().kept or self._is_merged_at_calls(key):
            device = self._patcher.load_device
            return dequantized(self._patcher.patch_weight_to_device(key, device_to=device, return_weight=True).data)
        is_quantized = name.endswith(".weight") and f"{name.removesuffix('weight')}comfy_quant" in self._state
        return dequantized(comfy.utils.get_attr(self._patcher.model, key).data) if is_quantized else stored

    def _is_merged_at_calls(self, key: str) -> bool:
        """Tell whether a weight has none of its patches: dynamic VRAM merges them into what it moves to the device."""
        patches = self._patcher.sorted_patches()
        return key in patches.merged and is_in_dynamic_memory(patches.modules[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@contextlib.contextmanager
def weights_as_numbers(patcher: "UnmergedLowRank") -> Iterator[None]:
    """Let the state dict of a patcher's diffusion model hold dequantized weights while the context lasts."""
    # ``ControlLora.pre_run`` of comfy/controlnet.py makes a ControlNet's weights of it, which know no scales.
    model = patcher.model.diffusion_model
    original = model.state_dict
    with patched([(model, "state_dict", lambda *args, **kwargs: DequantizedState(patcher, original(*args, **kwargs)))]):
        yield
