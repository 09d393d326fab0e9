"""8-bit weights on Apple GPUs: functions of comfy-kitchen whose own fail there, made of what MPS
has."""

from __future__ import annotations

from types import SimpleNamespace

import comfy.ops
import torch
import torch.nn.functional as F

from ....precision.base.dtypes import looked_up
from ....precision.base.message import Message
from ....precision.devices.profiles import torch_version
from .kernels import EAGER, registry

_BACKEND = "halfsafe"


def _dequantized(x: torch.Tensor, scale: torch.Tensor, output_type: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return looked_up(x, output_type, scale)


def _quantized(x: torch.Tensor, scale: torch.Tensor, output_type: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Round a weight, such as one that a LoRA is merged into, on the CPU."""
    rounds = registry.get_implementation("quantize_per_tensor_fp8", backend=EAGER)
    return rounds(x.cpu(), scale.cpu(), output_type).to(x.device)


def _rounded(x: torch.Tensor, rng: torch.Tensor, output_type: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Round a weight by random numbers of its device, on the CPU."""
    rounds = registry.get_implementation("stochastic_rounding_fp8", backend=EAGER)
    return rounds(x.cpu(), rng.cpu(), output_type).to(x.device)


def _int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    convrot: bool = False,
    convrot_groupsize: int = 256,
    input_act: str | None = None,
    **others: object,
) -> torch.Tensor:
    """Multiply by an unpacked weight.

    Raises:
        NotImplementedError: a call with an argument that is not known.
    """
    if met := [name for name, value in others.items() if value is not None and value is not False]:
        raise NotImplementedError(Message("int8_linear with {0} on MPS", ", ".join(met)))
    x = comfy.ops.INPUT_ACT_EAGER[input_act](x) if input_act else x
    name = "dequantize_int8_convrot_weight" if convrot else "dequantize_int8_simple"
    group = (convrot_groupsize,) if convrot else ()
    numbers = registry.get_implementation(name, backend=EAGER)(weight, weight_scale, *group)
    bias = None if bias is None else bias.to(x.dtype)
    return F.linear(x, numbers.to(x.dtype), bias).to(out_dtype)


def hold_8_bits_on_metal() -> None:
    """Put these functions first in comfy-kitchen's registry, for tensors of device ``mps``.

    ComfyUI asks the registry wherever it unpacks, rounds or multiplies by a quantized weight: in
    layers, LoRAs and text encoders of its own loaders too. Without them it raises "Trying to
    convert Float8_e4m3fn to the MPS backend" (Comfy-Org/ComfyUI#9263), or that ``aten::_int_mm``
    is missing. torch casts e4m3fn and multiplies in int8 there from 2.15 on (PyTorch #194074,
    #193153), which is left to comfy-kitchen; e5m2 it does not cast.
    """
    if registry is None or not torch.backends.mps.is_available():
        return
    from comfy_kitchen.constraints import FunctionConstraints, ParamConstraint

    is_old, there = torch_version() < (2, 15), frozenset({"mps"})
    dtypes = {torch.float8_e5m2, torch.float8_e4m3fn} if is_old else {torch.float8_e5m2}
    fp8 = ParamConstraint(dtypes=frozenset(dtypes))
    functions = {
        "dequantize_per_tensor_fp8": (_dequantized, {"x": fp8}),
        "quantize_per_tensor_fp8": (_quantized, {"output_type": fp8}),
        "stochastic_rounding_fp8": (_rounded, {"output_type": fp8}),
        **({"int8_linear": (_int8_linear, {})} if is_old else {}),
    }
    backend = SimpleNamespace(**{name: function for name, (function, _) in functions.items()})
    takes = {name: FunctionConstraints(own, there) for name, (_, own) in functions.items()}
    registry.register(_BACKEND, backend, takes)
    others = (name for name in registry._priority if name != _BACKEND)
    registry.set_priority([_BACKEND, *others])
