"""Values past fp16's range that ComfyUI's own model code replaces by 65504, or NaN by 0, without a word."""

import torch
from torch.overrides import TorchFunctionMode

from ....precision.amax import amax

CLAMPING_MODULES = ("comfy.ldm.flux.", "comfy.ldm.lumina.", "comfy.ldm.chroma", "comfy.ldm.hunyuan_video.")


def clamps_in_fp16(model: torch.nn.Module) -> bool:
    """Tell whether the code of a diffusion model calls ``torch.nan_to_num`` on fp16 values (ComfyUI 0.29 to 0.38)."""
    return any(type(module).__module__.startswith(CLAMPING_MODULES) for module in model.modules())


class ClampWatch(TorchFunctionMode):
    """Record the largest magnitude, inf or NaN, that ``nan_to_num`` of fp16 values is given; reads nothing back.

    It keeps nothing that a block allocates: its one number is made before the call, on ``device``.
    """

    def __init__(self, on: bool, device: torch.device):
        super().__init__()
        self.on = on
        self._largest = torch.zeros((), device=device) if on else None

    def __enter__(self):
        return super().__enter__() if self.on else self

    def __exit__(self, *error):
        return super().__exit__(*error) if self.on else None

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nan_to_num and args[0].dtype == torch.float16:
            torch.maximum(self._largest, amax(args[0]), out=self._largest)
        return func(*args, **(kwargs or {}))

    def sizes(self) -> list[torch.Tensor]:
        """Return the largest magnitude, 0-dim; 0 where nothing was clamped, and nothing where it is off."""
        return [] if self._largest is None else [self._largest]
