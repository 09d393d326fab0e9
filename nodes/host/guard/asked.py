"""Ask a model's weights for NaN in a call, however the code that runs with the model hides it afterwards."""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from comfy.model_patcher import ModelPatcher

from ....precision.base.amax import amax
from ....precision.base.layers import parts_of
from ....precision.base.message import Message
from ....precision.base.nested import floats_in
from ....precision.base.text import listed
from ..comfyui.entered import Entered
from ..comfyui.execution import is_compiled

NOT_ASKED = "NaN in the weights of these layers would not be seen if code hides it, because {0}: {1}"
COMPILED = "torch.compile runs them and they are not in the device's memory"
PASSED_BY = "ComfyUI multiplied without calling them and they are not in the device's memory"


class AskedWeights:
    """Ask each weight for NaN, in the call that runs inside of :meth:`watching`.

    A weight in the device's memory is reduced there. The results of layers are reduced too: they show NaN of weights
    that ComfyUI streams to the device, and of LoRAs that are added in any way, without another read of either. Nothing
    is read back.
    """

    def __init__(self, patcher: ModelPatcher):
        self._model: torch.nn.Module = patcher.model.diffusion_model
        self._compiled = is_compiled(patcher)
        self._largest = torch.zeros((), dtype=torch.float32, device=patcher.load_device)
        self._here: list[torch.Tensor] = []
        self._elsewhere: set[str] = set()
        self._missed: list[str] = []
        for name, weight in (*self._model.named_parameters(), *self._model.named_buffers()):
            if weight.device != self._largest.device:
                self._elsewhere.add(name.rpartition(".")[0])
            else:
                self._here += [number for number in map(_nan_of, parts_of(weight)) if number is not None]

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the results of layers inside of the context."""
        if self._compiled:  # torch.compile compiles a module with hooks anew
            yield
            return
        layers = [module for module in self._model.modules() if module._parameters]
        handles = [module.register_forward_hook(self._see, prepend=True) for module in layers]
        handles.append(self._model.register_forward_pre_hook(self._begin))
        entering = Entered.counted() if self._elsewhere else contextlib.nullcontext()
        try:
            with entering as entered:
                yield
        finally:
            for handle in handles:
                handle.remove()
        if entered:
            below = self._elsewhere - {""}  # the model itself ran
            named = {module: name for name, module in self._model.named_modules() if name in below}
            self._missed = [named[each] for each in entered.passed_by(self._model, dict.fromkeys(named, 1))]

    def _begin(self, module: torch.nn.Module, args: tuple) -> None:
        self._largest.zero_()  # an attempt that is repeated may have overflowed

    @torch.no_grad()  # Train LoRA's checkpointing compares what a call keeps for its gradients with a second one
    def _see(self, module: torch.nn.Module, args: tuple, result) -> None:
        for value in floats_in(result):
            number = _nan_of(value)
            if number is not None and number.device == self._largest.device:
                torch.maximum(self._largest, number, out=self._largest)

    def largest(self) -> torch.Tensor:
        """Return a number on the device, 0-dim fp32: NaN if a weight holds NaN, or a layer returned it."""
        return torch.stack([self._largest, *self._here]).amax()

    def remarks(self) -> set[str]:
        """Name the layers that could not be asked."""
        if self._compiled and self._elsewhere:
            return {Message(NOT_ASKED, COMPILED, listed(sorted(self._elsewhere)))}
        return {Message(NOT_ASKED, PASSED_BY, listed(self._missed))} if self._missed else set()


def holds_nan(tensors: Iterable[torch.Tensor]) -> bool:
    """True if a tensor holds NaN. Synchronizes with each device once."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if (number := _nan_of(tensor)) is not None:
            found.setdefault(number.device, []).append(number)
    return any(torch.stack(numbers).amax().isnan().item() for numbers in found.values())


def _nan_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a number on a tensor's device that is NaN if the tensor holds NaN; None for a tensor that cannot."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0 or tensor.is_meta:
        return None
    if "float4" in str(tensor.dtype):  # no NaN in it, and no arithmetic for it
        return None
    return _nan_of_fp8(tensor) if tensor.dtype.itemsize == 1 else amax(tensor)


def _nan_of_fp8(tensor: torch.Tensor) -> torch.Tensor:
    """Look at the codes: magnitudes order like them, and NaN is the largest. MPS converts no fp8."""
    codes = tensor.view(torch.uint8)
    if "fnuz" in str(tensor.dtype):
        return torch.where((codes == 0x80).any(), torch.nan, 0.0)
    if "e8m0" in str(tensor.dtype):  # from torch 2.7 on
        return torch.where((codes == 0xFF).any(), torch.nan, 0.0)
    largest = 0x7C if "e5m2" in str(tensor.dtype) else 0x7E  # inf; 448, as e4m3fn has no inf
    return torch.where((codes & 0x7F).amax() > largest, torch.nan, 0.0)
