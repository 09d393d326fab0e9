"""What *Guard this workflow* asks before a run: the dtype in which a file's model computes behind the node *Halfsafe*,
and with ComfyUI alone. Where they differ, so do the pictures."""

import comfy.model_management as management
import comfy.utils
import folder_paths

from ....precision.base.dtypes import name_of
from ....precision.base.errors import CheckpointError
from ....precision.plan.auto import auto_compute
from .detection import recognised, stored_tensors
from .devices import compute_device, current_device
from .files import open_model


def computing(files: list[tuple[str, str]]) -> dict[str, list[dict[str, str]]]:
    """Return as ``files`` those, each (folder of ComfyUI's, name), whose models compute in another dtype with ComfyUI
    ``alone`` than ``guarded``, with both.

    Of a file that is missing or no known model ComfyUI says so.
    """
    found = []
    for folder, name in files:
        path = folder_paths.get_full_path(folder, name)
        try:
            guarded, alone = _computing(path, folder == "diffusion_models") if path else ("", "")
        except CheckpointError:
            guarded = alone = ""
        if guarded != alone:
            found.append({"file": name, "guarded": guarded, "alone": alone})
    return {"files": found}


def _computing(path: str, only_diffusion_model: bool) -> tuple[str, str]:
    checkpoint, prefix, config = recognised(open_model(path), only_diffusion_model)
    tensors = stored_tensors(checkpoint)
    supported = list(config.supported_inference_dtypes)
    size = comfy.utils.calculate_parameters(tensors, prefix)
    in_file = None if config.quant_config else comfy.utils.weight_dtype(tensors, prefix)
    held = management.unet_dtype(model_params=size, supported_dtypes=supported, weight_dtype=in_file)
    cast = management.unet_manual_cast(held if in_file else None, compute_device(), supported)
    guarded, _ = auto_compute(current_device(), [name_of(dtype) for dtype in supported], name_of(held))
    return guarded, name_of(cast or held)
