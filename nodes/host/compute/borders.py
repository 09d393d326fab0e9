"""The border between a model and the code of other packs on it, which expects values of another
dtype.

ComfyUI's layers cast their weights to the dtype of what they are given. Layers of other packs
mostly do not: the keys and values of IPAdapter, InstantID and PuLID, the motion modules of
AnimateDiff, and the attention that packs add to Flux's blocks are in one dtype, which each pack
chooses by itself: by ``unet_dtype()``, by what the model states, or a fixed one. So no dtype that
values could be rounded to at the border fits all of them.

Values cross the border as they are. While a pack's code runs, torch's operations cast their
operands to fp32 where dtypes differ, and its results are cast to fp32: no number is rounded on the
way, so none can overflow. A model whose values a node made 16-bit, of another dtype than the model
stated before, is given results in its own dtype."""

import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from types import FunctionType, MethodType

import torch
from comfy.patcher_extension import WrappersMP

from ....precision.arithmetic.casting import FLOATS, NARROW, Results, promoting
from ....precision.base.errors import HalfsafeError
from ....precision.base.message import Message, joined
from ....precision.base.patching import Patch
from ..comfyui.attributes import OVERRIDE, casts_weights
from ..comfyui.code_owner import code_owner
from ..comfyui.patches import each_changed, patch_name, with_patches
from ..comfyui.weights import has_own_forward

Change = Callable[[Callable], Callable]
FUNCTIONS = (FunctionType, MethodType, functools.partial)
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
REFUSALS = (RuntimeError, ValueError, TypeError, AssertionError)
"""What torch and the kernels of other libraries raise for operands of other dtypes than they
take."""
OF_DTYPES = re.compile(
    r"\bdtypes?\b|scalar type|data type|\b(Half|Float|BFloat16)\b|\b(float16|bfloat16|float32|fp16|bf16|fp32)\b"
)
REFUSED = "{0} stopped with '{1}'."
WHY_REFUSED = (
    "With compute fp16_safe or fp32, and where NaN Guard repeats a step in one of them, the "
    "values between layers are fp32, and with another compute than the model was loaded in they are in another dtype, "
    "which this code, or what it calls, does not take."
)
CHOOSE = joined(
    [
        "Choose a compute whose values this code takes: bf16, or auto or fp16 if the model stays finite in plain fp16.",
        "Or put the node of that pack behind the node that chooses the compute, or remove it.",
    ]
)


def bordered(function: Callable, place: str = "", results: Results = "fp32") -> Callable:
    """Wrap a function of another pack so that it takes values of any dtype. ComfyUI's own is
    returned as it is.

    ``place``: what errors call it; "" for a function that a node patched into the model's blocks.
    ``results``: dtype of its results.

    Raises:
        HalfsafeError: the function refuses a dtype nevertheless, as a kernel for 16-bit operands does.
    """
    owner = code_owner(function) or code_owner(inspect.unwrap(function))
    return crossing(function, place and Message("{0} of {1}", place, owner), results) if owner else function


def crossing(function: Callable, place: str = "", results: Results = "fp32") -> Callable:
    """Wrap a function as :func:`bordered` does, whoever owns it."""
    inner = promoting(function, results=results)

    def run(*args, **kwargs):
        try:
            return inner(*args, **kwargs)
        except REFUSALS as error:
            if not OF_DTYPES.search(str(error)):
                raise
            stopped = Message(REFUSED, place or patch_name(function), str(error).partition("\n")[0])
            raise HalfsafeError(joined([stopped, WHY_REFUSED]), CHOOSE) from error

    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def with_borders(options: dict, change: Change, patched: Change) -> dict:
    """Return ``transformer_options`` with ``patched`` applied to the functions that nodes patched
    into the model's blocks, and ``change`` to what else runs inside the model's call: wrappers of
    the diffusion model and an attention override.

    Wrappers around the whole call are given the sampler's own fp32 in every compute.
    """
    options = with_patches(options, patched)
    wrappers = options.get("wrappers", {})
    if wrappers.get(WrappersMP.DIFFUSION_MODEL):
        inside = each_changed(wrappers[WrappersMP.DIFFUSION_MODEL], change)
        options["wrappers"] = {**wrappers, WrappersMP.DIFFUSION_MODEL: inside}
    if OVERRIDE in options:
        options[OVERRIDE] = change(options[OVERRIDE])
    return options


def borders_in(
    modules: Mapping[str, torch.nn.Module], planned: Collection[torch.nn.Module] = (), results: Results = "fp32"
) -> list[Patch]:
    """Return patches of those modules, by name, that other packs added, changed or hooked.

    ``planned``: layers whose forward a plan sets.
    """
    found: list[Patch] = []
    refusing = FLOATS if results == "given" else NARROW  # fp32 weights take fp32 values
    for name, module in modules.items():
        place, own = Message("'{0}'", name or type(module).__name__), vars(module)
        for attribute, value in own.items():
            is_code = isinstance(value, FUNCTIONS) or (attribute == "forward" and callable(value))
            if is_code and not (attribute == "forward" and module in planned):
                found.append((module, attribute, bordered(value, place, results)))
        if "forward" not in own and module not in planned and not casts_itself(module, refusing):
            found.append((module, "forward", crossing(module.forward, place, results)))
        for kind in HOOKS:
            if any(map(code_owner, own[kind].values())):
                hooks = ((key, bordered(hook, place, results)) for key, hook in own[kind].items())
                found.append((module, kind, OrderedDict(hooks)))
    return [each for each in found if each[2] is not vars(each[0]).get(each[1])]


def casts_itself(module: torch.nn.Module, refusing: Collection[torch.dtype] = NARROW) -> bool:
    """True for a module that takes inputs of any dtype: an operation of ComfyUI, whatever derives
    from it, a module of ComfyUI's, and a layer of torch's own classes without parameters in the
    dtypes ``refusing``."""
    if has_own_forward(module):
        return not code_owner(module.forward)
    if casts_weights(module):
        return True
    if type(module).forward.__module__.startswith("torch.nn."):
        return not any(each.dtype in refusing for each in module.parameters(recurse=False))
    return not code_owner(type(module).forward)
