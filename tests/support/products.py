"""Which product each layer of a model really makes: the operation, and the dtypes of its two matrices."""

from __future__ import annotations

import contextlib
from unittest import mock

import comfy.ops
import torch
from comfy.quant_ops import QuantizedTensor
from halfsafe.nodes.host.lora.low_rank import LowRankLayer
from halfsafe.precision.base.dtypes import name_of
from torch.nn.modules import module as every_module
from torch.utils._python_dispatch import TorchDispatchMode

MATRICES = {"linear": (0, 1), "mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "convolution": (0, 1)}
SCALED = ("_scaled_mm", "_scaled_mm_v2")


class Products(TorchDispatchMode):
    """Records, as the report names modes, the products made inside of each of ``layers`` (name -> module).

    ``beside``: the same of the LoRAs that are added to a layer's own product.
    A product that ``linear_input_act`` of ``comfy/ops.py`` makes past a layer's forward, as in the MLPs of Wan and LTX-Video
    from ComfyUI 0.33 on, is that layer's too.
    fp16_wide: both matrices are fp32 but hold only numbers that fp16 holds, which on a CPU is what ``fp16_safe`` multiplies.
    """

    def __init__(self, layers: dict[str, torch.nn.Module]):
        super().__init__()
        self.made: dict[str, list[str]] = {name: [] for name in layers}
        self.beside: dict[str, list[str]] = {}
        self.scaled: list[tuple[torch.dtype, torch.dtype]] = []
        self._layers = layers
        self._inside: list[str] = []
        self._is_beside = False
        self._hooks: list = []

    def __enter__(self):
        for name, module in self._layers.items():
            self._hooks.append(module.register_forward_pre_hook(lambda *_, name=name: self._inside.append(name)))
            self._hooks.append(module.register_forward_hook(lambda *_: self._inside.pop() and None))
        self._hooks.append(every_module.register_module_forward_pre_hook(self._enter_beside))
        self._hooks.append(every_module.register_module_forward_hook(self._leave_beside))
        fused = getattr(comfy.ops, "linear_input_act", None)  # from ComfyUI 0.30 on
        self._input_act = mock.patch.object(comfy.ops, "linear_input_act", self._past_forward(fused)) if fused else contextlib.nullcontext()
        self._input_act.__enter__()
        return super().__enter__()

    def _past_forward(self, linear_input_act):
        names = {id(module): name for name, module in self._layers.items()}

        def run(linear, x, *args, **kwargs):
            if id(linear) not in names:
                return linear_input_act(linear, x, *args, **kwargs)
            name = names[id(linear)]
            before = len(self.made[name])
            self._inside.append(name)
            try:
                return linear_input_act(linear, x, *args, **kwargs)
            finally:
                self._inside.pop()
                self.made[name][before:] = _without_rotation(self.made[name][before:])

        return run

    def _enter_beside(self, module, inputs) -> None:
        self._is_beside = self._is_beside or isinstance(module, LowRankLayer)

    def _leave_beside(self, module, inputs, output) -> None:
        self._is_beside = self._is_beside and not isinstance(module, LowRankLayer)

    def __exit__(self, *exception):
        for hook in self._hooks:
            hook.remove()
        self._input_act.__exit__(None, None, None)
        return super().__exit__(*exception)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, QuantizedTensor) for kind in types):
            return NotImplemented  # its own handler runs next, and what that multiplies comes back here
        name = function.name().partition("::")[2].partition(".")[0]
        if name in SCALED:
            self.scaled.append((args[0].dtype, args[1].dtype))
        if self._inside and (mode := _mode(name, args)):
            (self.beside if self._is_beside else self.made).setdefault(self._inside[-1], []).append(mode)
        return function(*args, **(kwargs or {}))

    def modes(self) -> dict[str, str]:
        """Layer -> what it multiplied in; every call of a layer must have been alike."""
        assert all(len(set(made)) == 1 for made in self.made.values()), self.made
        return {name: made[0] for name, made in self.made.items()}


def _without_rotation(made: list[str]) -> list[str]:
    """What a layer multiplied, less the rotation of its input, a product of its own in ``int8_linear`` of comfy-kitchen's eager
    backend. Where ``torch.nn.functional.linear`` leads there, the whole of it is one operation."""
    return [mode for mode in made if mode == "int8"] or made


def _mode(name: str, args: tuple) -> str:
    if name in ("int8_linear", "_int_mm"):
        return "int8"
    if name in SCALED:
        return "fp8"
    if name not in MATRICES:
        return ""
    left, right = (args[place] for place in MATRICES[name])
    assert left.dtype == right.dtype
    wide = left.dtype == torch.float32 and all(torch.equal(each, each.half().float()) for each in (left, right))
    return "fp16_wide" if wide else name_of(left.dtype)
