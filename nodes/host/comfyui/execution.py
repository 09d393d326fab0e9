"""How ComfyUI executes a model's calls: through torch.compile, on several devices side by side."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

COMPILE_KWARGS = "torch_compile_kwargs"


def is_compiled(patcher: ModelPatcher) -> bool:
    """Tell whether torch.compile runs the model or a part of it."""
    return COMPILE_KWARGS in patcher.model_options or any(
        "_orig_mod" in name for name, _ in patcher.model.diffusion_model.named_modules()
    )


def is_on_several_devices(patcher: ModelPatcher) -> bool:
    """Tell whether threads run clones of the model side by side, one for each device."""
    if "multigpu_clones" in patcher.model_options or getattr(patcher, "is_multigpu_base_clone", False):
        return True
    return bool(getattr(patcher, "additional_models", {}).get("multigpu"))


def switches_by_layer(patcher: ModelPatcher) -> bool:
    """Tell whether torch's flags can differ from layer to layer: not in a compiled graph, not with several
    threads running."""
    return not is_compiled(patcher) and not is_on_several_devices(patcher)
