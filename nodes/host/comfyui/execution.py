"""How ComfyUI executes a model's calls: compiled, on several devices, after text adapters, out of
memory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import comfy.model_management
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher

from ....precision.base.oom import is_torch_oom
from ....precision.base.patching import patched
from .attributes import EXTRA_CONDITIONS, TEXT_ADAPTER

COMPILE_KWARGS = "torch_compile_kwargs"
Make = Callable[[], dict]


def is_compiled(patcher: ModelPatcher) -> bool:
    """True if torch.compile runs the model or a part of it."""
    modules = [patcher.model.diffusion_model]
    for module in modules:  # ``named_modules`` takes ten times as long, and some calls begin with this
        modules += [each for each in module._modules.values() if each is not None]
    return COMPILE_KWARGS in patcher.model_options or any("_orig_mod" in module._modules for module in modules)


def is_on_several_devices(patcher: ModelPatcher) -> bool:
    """True if threads run clones of the model side by side, one for each device."""
    if "multigpu_clones" in patcher.model_options or getattr(patcher, "is_multigpu_base_clone", False):
        return True
    return bool(getattr(patcher, "additional_models", {}).get("multigpu"))


def switches_by_layer(patcher: ModelPatcher) -> bool:
    """True if torch's flags can differ from layer to layer: not in a compiled graph, not with
    several threads running."""
    return not is_compiled(patcher) and not is_on_several_devices(patcher)


def trains() -> bool:
    """True if ComfyUI's Train LoRA trains: its ``training_dtype`` decides in which dtype the model
    computes, and its backward pass may run layers again when the model's call is over."""
    return getattr(comfy.model_management, "in_training", False)


def adapts_text(model: BaseModel) -> bool:
    """True if ComfyUI runs layers of this model on the text before it calls the model, once per
    run.

    ComfyUI 0.30 runs text adapters in ``extra_conds``: Anima, LTX-AV and MiniMax in
    ``comfy/model_base.py``, each through its model's ``preprocess_text_embeds``."""
    return hasattr(model.diffusion_model, TEXT_ADAPTER)


@contextlib.contextmanager
def conditions_through(model: BaseModel, run: Callable[[Make], dict]) -> Iterator[None]:
    """Hand each ``extra_conds`` of a model to ``run`` while the context lasts; what is set last
    runs first."""
    original = getattr(model, EXTRA_CONDITIONS)
    adapted = (model, EXTRA_CONDITIONS, lambda *args, **kwargs: run(functools.partial(original, *args, **kwargs)))
    with patched([adapted]):
        yield


def is_oom(error: BaseException) -> bool:
    """True if an error means that a device has no memory left.

    ComfyUI's own test comes first, as it also clears the error CUDA has pending. On torch 2.8 and
    later it takes the plain RuntimeError of MPS for another."""
    return comfy.model_management.is_oom(error) or is_torch_oom(error)
