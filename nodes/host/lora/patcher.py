"""Keep low-rank patches (LoRAs) of 8-bit weights out of the weights: ComfyUI's ModelPatcher with that one difference.

ComfyUI adds a patch to the dequantized weight and quantizes the sum again with stochastic rounding
(``patch_weight_to_device`` in ``comfy/model_patcher.py``, ``resolve_cast_module_with_vbar`` in ``comfy/ops.py``). Here
a low-rank patch is left out where weights are loaded, and two thin products are added to the layer's result
(``low_rank.py``). It stays in ``patches``, where clones, savers and merges read it. What is not low-rank, or outweighs
its layer (``precision/arithmetic/merging.py``), is merged as ComfyUI does, but in fp32 and rounded to nearest.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import comfy.utils
import torch

from ....precision.arithmetic.patching import Patch, patched
from ....precision.dtypes import name_of
from ....precision.errors import HalfsafeError
from ....precision.modes import FP32
from ..core import (
    CAST_DTYPE,
    has_cast_dtype,
    is_in_dynamic_memory,
    round_merge_to_nearest,
    sets_own_weight,
    with_weight_setter,
)
from ..facts.layers import is_quantized
from ..run.compute import compute_of
from ..run.wrappers import LOW_RANK
from .low_rank import low_rank_patcher
from .merging import error_of, merging_in_fp32, rounded_to_nearest
from .patches import SortedPatches, layer_name, sort_patches, strengths_of

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher


class UnmergedLowRank:
    """Extend a ModelPatcher: hold low-rank patches of 8-bit weights outside of the weights, as a model of their own.

    A method without a description does what ComfyUI's own does.
    """

    if TYPE_CHECKING:
        model: torch.nn.Module
        patches: dict

    _sorted: tuple[tuple, SortedPatches] | None = None
    _held: SortedPatches | None = None
    _whole: dict | None = None
    _strengths: tuple[SortedPatches, list, dict] | None = None
    _low_rank: tuple[SortedPatches, "ModelPatcher"] | None = None

    def sorted_patches(self) -> SortedPatches:
        """Sort the patches of 8-bit weights; anew where patches were added."""
        if self._held is not None:
            return self._held
        state = self.patches_uuid, len(self.patches), tuple(map(id, self.hook_patches))
        if self._sorted is None or self._sorted[0] != state:
            self._sorted = state, sort_patches(self)
        return self._sorted[1]

    def leaves_weights_alone(self) -> bool:
        """Tell whether no patch is merged into any weight."""
        return self.patches.keys() <= self.sorted_patches().kept

    def low_rank_patcher(self) -> "ModelPatcher | None":
        """Return the ModelPatcher of the low-rank changes, if there are any."""
        found = self.sorted_patches()
        if not found.low_rank:
            return None
        if self._low_rank is None or self._low_rank[0] is not found:
            changes = {key: tuple(by_key.values()) for key, by_key in found.low_rank.items()}
            dtype = torch.bfloat16 if _cast_dtype(self) == torch.bfloat16 else torch.float16
            self._low_rank = found, low_rank_patcher(self, found.modules, changes, dtype)
        return self._low_rank[1]

    def forwards(self, device: torch.device) -> list[Patch]:
        """Make patches that add the low-rank changes on a device, by the hooks active now; none without changes."""
        patcher = self.low_rank_patcher()
        if patcher is None:
            return []
        modules, strengths = self.sorted_patches().modules, self._current_strengths()
        patcher.model.set_strengths(strengths, device)
        for key, layer in patcher.model.by_key():
            layer.in_fp32 = _multiplies_in_fp32(self, key)
        patches = [layer.around(modules[key]) for key, layer in patcher.model.by_key()]
        patcher.model.set_strengths(strengths, device)  # for inputs as large as those of the forwards found
        return patches

    def _current_strengths(self) -> dict[tuple, float]:
        found, hooks = self.sorted_patches(), self.current_hooks.hooks if self.current_hooks else []
        state = [(hook.hook_ref, hook.strength) for hook in hooks]
        if self._strengths is None or self._strengths[0] is not found or self._strengths[1] != state:
            combined = super().get_combined_hook_patches(self.current_hooks)
            patches = self.patches if self._whole is None else self._whole
            pairs = [(key, patches[key]) for key in found.kept]
            pairs += [(key, patches) for key, patches in combined.items() if key in found.hooks]
            self._strengths = found, state, strengths_of(pairs)
        return self._strengths[2]

    @contextlib.contextmanager
    def _merging(self) -> Iterator[None]:
        """Leave only what is merged into weights among the patches while the context lasts."""
        held, whole = self.sorted_patches(), self.patches
        self._held, self._whole = held, whole
        self.patches = {key: value for key, value in whole.items() if key not in held.kept}
        try:
            yield
        finally:
            self.patches, self._held, self._whole = whole, None, None

    def load(self, *args, **kwargs):
        merged = {key: self.sorted_patches().modules[key] for key in self.sorted_patches().merged}
        for key, module in merged.items():
            if key in self.patches and is_quantized(module):
                error_of(self, key, module)
        with self._merging():
            result = super().load(*args, **kwargs)
        for module in filter(is_in_dynamic_memory, merged.values()):
            round_merge_to_nearest(module)
        return result

    def partially_unload(self, *args, **kwargs):
        with self._merging():
            return super().partially_unload(*args, **kwargs)

    def patch_weight_to_device(self, key, *args, **kwargs):
        module = self.sorted_patches().modules.get(key)
        if module is None or not sets_own_weight(module):
            return super().patch_weight_to_device(key, *args, **kwargs)
        setter = with_weight_setter(module, functools.partial(rounded_to_nearest, module))
        with patched([setter]), merging_in_fp32:
            return super().patch_weight_to_device(key, *args, **kwargs)

    def get_combined_hook_patches(self, hooks):
        """Return the patches that hooks merge into weights."""
        unmerged = self.sorted_patches().hooks
        return {key: value for key, value in super().get_combined_hook_patches(hooks).items() if key not in unmerged}

    def inject_model(self):
        """Inject ours last, so outermost."""
        # ``eject_model`` of comfy/model_patcher.py keeps the order: what another injection put on a layer goes first.
        if LOW_RANK in self.injections:
            self.injections[LOW_RANK] = self.injections.pop(LOW_RANK)
        super().inject_model()

    def patch_hook_weight_to_device(self, hooks, combined_patches, key, *args, **kwargs):
        """Refuse hooks that would be merged into an 8-bit weight."""
        # ComfyUI cannot put it back: its scale is copied into a copy (``copy_to_param`` in comfy/utils.py).
        module = self.sorted_patches().modules.get(key)
        if module is not None and is_quantized(module):
            change = self.sorted_patches().merged[key]
            problem = f"A hook changes '{key}' by {change}, which an 8-bit weight cannot take while the model runs."
            raise HalfsafeError(problem, "Load the model with storage bf16, or use a LoRA of another kind.")
        super().patch_hook_weight_to_device(hooks, combined_patches, key, *args, **kwargs)

    def model_patches_models(self):
        patcher = self.low_rank_patcher()
        return [*super().model_patches_models(), *([patcher] if patcher else [])]

    def model_state_dict(self, filter_prefix=None):
        """Leave out the names that a quantized layer gives its scales."""
        # They are no attributes, and ``get_key_patches`` of comfy/model_patcher.py reads them as such.
        state = super().model_state_dict(filter_prefix)
        return {name: tensor for name, tensor in state.items() if not _is_no_attribute(self.model, name)}

    def model_state_dict_for_saving(self, model=None, prefix=""):
        """Return the state dict with all patches merged."""
        # ComfyUI takes a weight that is loaded for one that is patched (comfy/model_patcher.py).
        state = super().model_state_dict_for_saving(model, prefix)
        for key in self.sorted_patches().kept:
            name = key.removeprefix(prefix)
            if name in state:
                weight = self.patch_weight_to_device(key, device_to=self.load_device, return_weight=True)
                parts = weight.state_dict(name) if is_quantized(self.sorted_patches().modules[key]) else {name: weight}
                state |= {part: tensor.to("cpu") for part, tensor in parts.items()}
        return state


def _cast_dtype(patcher) -> torch.dtype | None:
    """Return the dtype that a diffusion model's weights are cast to; None for a text encoder, or where they are not."""
    return patcher.get_model_object(CAST_DTYPE) if has_cast_dtype(patcher.model) else None


def _multiplies_in_fp32(patcher, key: str) -> bool:
    """Tell whether a layer that is given fp32 multiplies in fp32, and not in a 16-bit dtype or in 8 bits."""
    compute = compute_of(patcher)
    if compute is None:
        return True
    decision = compute.plan.decisions.get(layer_name(key))
    return (decision.mode if decision else name_of(_cast_dtype(patcher) or torch.float32)) == FP32.name


def _is_no_attribute(model: torch.nn.Module, name: str) -> bool:
    """Tell whether a name of a state dict is of a quantized weight's scale or format, and no attribute of its layer."""
    layer, _, own = name.rpartition(".")
    if not own.startswith(("weight_", "comfy_quant")):
        return False
    module = comfy.utils.get_attr(model, layer)
    return is_quantized(module) and not hasattr(module, own)


def unmerged_keys(extended: "ModelPatcher") -> set[str]:
    """Return the keys of the weights whose patches are added unmerged; none for ComfyUI's own ModelPatcher."""
    return extended.sorted_patches().kept if isinstance(extended, UnmergedLowRank) else set()
