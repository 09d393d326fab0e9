"""The callables of ComfyUI that our code replaces, wraps or overrides, with the parameters that this version knows.

A parameter that a later ComfyUI adds changes nothing unless it is passed with a value of its own. Then it is handed on,
or the call runs ComfyUI's own code (``gate.py``). What is new is logged once, at start-up.
"""

import importlib
import inspect
import logging
from collections.abc import Callable, Iterator

import comfy.model_sampling
import comfy.ops
import torch

from ....precision.version import VERSION
from .code_owner import code_owner
from .gate import FOLDED, call_of

logger = logging.getLogger("halfsafe")
NEW = "This ComfyUI has parameters that Halfsafe %s does not know, and meets where they are passed: %s"
ATTENTION = (
    *("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape", "transformer_options"),
    *("scale", "enable_gqa", "low_precision_attention", "preferred_attention", "low_precision"),
)
LINEAR = ("input", *FOLDED)
OPERATIONS = {
    **dict.fromkeys(("Conv1d", "Conv2d", "LayerNorm", "GroupNorm"), ("input",)),
    **dict.fromkeys(("ConvTranspose1d", "ConvTranspose2d"), ("input", "output_size")),
    **{"Linear": LINEAR, "Conv3d": ("input", "autopad"), "RMSNorm": ("input", "x")},
}
SAMPLINGS = [name for name, cls in vars(comfy.model_sampling).items() if hasattr(cls, "calculate_input")]
KNOWN: dict[str, tuple[str, ...]] = {
    **{f"comfy.ops.manual_cast.{name}": known for name, known in OPERATIONS.items()},
    "comfy.ops.mixed_precision_ops.Linear": LINEAR,
    "comfy.ops.mixed_precision_ops.Linear._forward": ("input", "weight", "bias"),
    "comfy.ops.linear_input_act": ("linear", "x", *FOLDED),
    "comfy.ldm.lumina.model._int8_convrot_linear": ("linear",),
    "comfy.ldm.modules.attention.attention_pytorch": ATTENTION,
    "comfy.model_base.BaseModel.apply_model": ("x", "t", "c_concat", "c_crossattn", "control", "transformer_options"),
    **{f"comfy.model_sampling.{name}.calculate_input": ("sigma", "noise") for name in SAMPLINGS},
    "comfy.model_patcher.ModelPatcher.inject_model": (),
    "comfy.model_patcher.ModelPatcher.get_combined_hook_patches": ("hooks",),
    "comfy.model_patcher.ModelPatcher.model_patches_models": (),
    "comfy.model_patcher.ModelPatcher.model_state_dict": ("filter_prefix",),
}
"""Path of a callable, module and names -> the parameters that are known, besides ``self``."""


def log_new_parameters() -> None:
    """Log in one line what is new in the callables of this ComfyUI."""
    if new := [*new_parameters()]:
        logger.info("Halfsafe: " + NEW, VERSION, "; ".join(new))


def new_parameters() -> Iterator[str]:
    """Yield each callable with the parameters that are not known, and the pack that replaced it, if one did."""
    for path, known in KNOWN.items():
        installed = installed_at(path)
        if isinstance(installed, type):
            call, installed = call_of(installed), getattr(installed, "forward", None)
            names = [call.input, *call.defaults]
        else:
            parameters = inspect.signature(installed).parameters.values() if installed else ()
            names = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        if new := [name for name in names if name not in ("self", *known)]:
            owner = code_owner(installed)
            yield f"{path}({', '.join(new)})" + (f" of {owner}" if owner else "")


def installed_at(path: str) -> Callable | None:
    """Return the callable at a path; None if this ComfyUI has none there."""
    root, _, rest = path.partition(".mixed_precision_ops.")
    if rest:  # its classes are made anew for each model
        return _below(comfy.ops.mixed_precision_ops({}, torch.float32), rest.split("."))
    names = root.split(".")
    for count in range(len(names) - 1, 0, -1):
        try:
            return _below(importlib.import_module(".".join(names[:count])), names[count:])
        except ImportError:
            continue
    return None


def _below(found, names: list[str]) -> Callable | None:
    for name in names:
        found = getattr(found, name, None)
    return found
