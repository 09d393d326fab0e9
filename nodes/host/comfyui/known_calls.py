"""The calls of ComfyUI that enter our code, with the parameters that we know; a call with another is refused by name.

ComfyUI calls what we replace, wrap or override, and a version after this one may call it with more. What an argument
that we do not know would change is not guessed: the feature is not put on, and one sentence says so in the log, the
sidebar, the report and the badge (:func:`why_off`).
"""

import functools
import importlib
import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import comfy.ops
import torch

from ....precision.base.errors import HalfsafeError
from ....precision.version import VERSION
from .gate import FOLDED, parameters_of
from .self_test import unequal_layer

logger = logging.getLogger("halfsafe")


UNKNOWN = "This ComfyUI calls {} with `{}`, which Halfsafe {} does not support: {} are off. Update Halfsafe."
UNEQUAL = (
    "A layer of this ComfyUI ({}) returns another result through Halfsafe {} than alone: {} are off. Update Halfsafe."
)


class Feature(StrEnum):
    """What is off if a call has an argument that we do not know; the value names it in a sentence."""

    LAYERS = "fp16_safe and all other compute settings, the guard of models, fp16 accumulation and calibration"
    LORAS = "LoRAs on 8-bit weights"


@dataclass(frozen=True)
class KnownCall:
    """A callable of ComfyUI that our code stands in for. ``path``: module and names. ``parameters``: all that we know.

    ``also``: other methods of the class that carry the call out, whose parameters are the call's too.
    """

    path: str
    parameters: tuple[str, ...]
    feature: Feature = Feature.LAYERS


ATTENTION = (
    *("q", "k", "v", "heads", "mask", "attn_precision", "skip_reshape", "skip_output_reshape", "transformer_options"),
    *("scale", "enable_gqa", "low_precision_attention", "preferred_attention", "low_precision"),
)
APPLY = ("x", "t", "c_concat", "c_crossattn", "control", "transformer_options")
SAMPLINGS = ("EPS", "V_PREDICTION_DDPM", "CONST", "IMG_TO_IMG", "COSMOS_RFLOW")
KNOWN = (
    KnownCall("comfy.ops.manual_cast.Linear", ("input", *FOLDED)),
    KnownCall("comfy.ops.mixed_precision_ops.Linear", ("input", *FOLDED)),
    KnownCall("comfy.ops.mixed_precision_ops.Linear._forward", ("input", "weight", "bias")),
    KnownCall("comfy.ops.manual_cast.Conv1d", ("input",)),
    KnownCall("comfy.ops.manual_cast.Conv2d", ("input",)),
    KnownCall("comfy.ops.manual_cast.Conv3d", ("input", "autopad")),
    KnownCall("comfy.ops.manual_cast.ConvTranspose1d", ("input", "output_size")),
    KnownCall("comfy.ops.manual_cast.ConvTranspose2d", ("input", "output_size")),
    KnownCall("comfy.ops.manual_cast.LayerNorm", ("input",)),
    KnownCall("comfy.ops.manual_cast.GroupNorm", ("input",)),
    KnownCall("comfy.ops.manual_cast.RMSNorm", ("input", "x")),
    KnownCall("comfy.ops.linear_input_act", ("linear", "x", *FOLDED)),
    KnownCall("comfy.ldm.lumina.model._int8_convrot_linear", ("linear",)),
    KnownCall("comfy.ldm.modules.attention.attention_pytorch", ATTENTION),
    KnownCall("comfy.model_base.BaseModel.apply_model", APPLY),
    *(KnownCall(f"comfy.model_sampling.{sampling}.calculate_input", ("sigma", "noise")) for sampling in SAMPLINGS),
    KnownCall("comfy.model_patcher.ModelPatcher.inject_model", (), Feature.LORAS),
    KnownCall("comfy.model_patcher.ModelPatcher.get_combined_hook_patches", ("hooks",), Feature.LORAS),
    KnownCall("comfy.model_patcher.ModelPatcher.model_patches_models", (), Feature.LORAS),
    KnownCall("comfy.model_patcher.ModelPatcher.model_state_dict", ("filter_prefix",), Feature.LORAS),
)
"""Each callable of ComfyUI that is replaced (``forward`` of a layer or norm, a function of a module), wrapped
(``apply_model``), overridden (attention, methods of the ModelPatcher) or set on a model (``calculate_input``)."""


def why_off(feature: Feature) -> str:
    """Return why a feature is not put on in this ComfyUI, a sentence; empty if it is."""
    return reasons_off().get(feature, "")


def require(feature: Feature) -> None:
    """Refuse to go on without a feature.

    Raises:
        HalfsafeError: this ComfyUI calls what the feature stands in for with an argument that is not known.
    """
    if reason := why_off(feature):
        raise HalfsafeError(reason)


@functools.lru_cache(maxsize=1)
def reasons_off() -> dict[Feature, str]:
    """Return why each feature that is off is off, and log it; found once a process."""
    reasons: dict[Feature, str] = {}
    for call in KNOWN:
        for name in unknown_parameters(call):
            reasons.setdefault(call.feature, _unknown(call, name))
    if Feature.LAYERS not in reasons and (unequal := unequal_layer()):
        reasons[Feature.LAYERS] = UNEQUAL.format(unequal, VERSION, Feature.LAYERS)
    if Feature.LAYERS in reasons:
        reasons.setdefault(Feature.LORAS, reasons[Feature.LAYERS])
    for reason in dict.fromkeys(reasons.values()):
        logger.warning("Halfsafe: %s", reason)
    return reasons


def unknown_parameters(call: KnownCall) -> list[str]:
    """List the parameters of the installed callable that we do not know; none if this ComfyUI has no such callable."""
    installed = _installed(call.path)
    if installed is None:
        return []
    if isinstance(installed, type):
        names = parameters_of(installed)
    else:
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        parameters = inspect.signature(installed).parameters.values()
        names = tuple(each.name for each in parameters if each.kind not in kinds)
    return [name for name in names if name not in (*call.parameters, "self")]


def _unknown(call: KnownCall, name: str) -> str:
    is_layer = call.path.startswith("comfy.ops.") and call.path[-1] != "t"
    whom = "its layers" if is_layer else f"`{call.path}`"
    return UNKNOWN.format(whom, name, VERSION, call.feature)


def _installed(path: str) -> Callable | type | None:
    found: Any
    if path.startswith("comfy.ops.mixed_precision_ops."):  # whose classes are made anew for each model
        found = comfy.ops.mixed_precision_ops({}, torch.float32)
        for name in path.split(".")[3:]:
            found = getattr(found, name, None)
        return found
    names = path.split(".")
    for count in range(len(names) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(names[:count]))
        except ImportError:
            continue
        for name in names[count:]:
            found = getattr(found, name, None)
        return found
    return None
