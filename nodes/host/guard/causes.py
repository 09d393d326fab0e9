"""Check the weights and patches of a model for NaN and Inf, which no precision cures."""

import math
import operator
from collections.abc import Sequence
from pathlib import Path

import folder_paths
import torch
from comfy.model_patcher import ModelPatcher

from ....precision.arithmetic.linear import lent
from ....precision.base.amax import floats
from ....precision.base.dtypes import name_of
from ....precision.base.errors import CheckpointError
from ....precision.base.layers import kind_of, parts_of
from ....precision.base.message import Message, joined
from ....precision.base.nested import floats_in
from ....precision.base.patching import Patch
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.guard.inputs import is_finite, zeroed
from ....precision.guard.localize import Origin
from ..comfyui.attributes import BIAS_FUNCTIONS, WEIGHT_FUNCTIONS, casts_weights
from ..comfyui.layers import DIFFUSION_MODEL
from ..comfyui.model_facts import record_of
from ..comfyui.page import running_prompt
from ..comfyui.weights import dequantized, weights_of
from ..load.files import open_model

BAD_COPY = "Weight '{0}' is finite in host memory, but its copy on the device holds NaN or Inf."
RUN_AGAIN = joined(
    [
        "free the model and node cache, and run again.",
        "It was damaged after it was loaded, or the file was replaced since.",
    ]
)
WIDER = "load it with {0} bf16 or fp32."
IF_INF_THERE = "If it is Inf there too, download the file again."
OURS_OR_AGAIN = joined(
    [
        "load it with Load Diffusion Model (Halfsafe), or download it again.",
        "ComfyUI's own loaders cast to fp8 without a scale and read scaled e5m2 as e4m3fn.",
    ]
)
WITHOUT_PATCH = "leave it out or download it again."
WEAKER = "lower the strength, or load the model with storage bf16 or fp32."
FUNCTIONS = {"weight": WEIGHT_FUNCTIONS, "bias": BIAS_FUNCTIONS}


class LoadedWeights:
    """The weights and patches of a diffusion model, VAE or text encoder.

    ``model``: the module that names of weights are relative to. ``setting``: the input of the loader that chooses their
    dtype.
    """

    def __init__(self, patcher, setting: str = "storage"):
        inner = getattr(patcher.model, "diffusion_model", None)
        self.model: torch.nn.Module = patcher.model if inner is None else inner
        self._prefix = "" if inner is None else DIFFUSION_MODEL
        self._patcher = patcher
        self._setting = setting

    def not_finite(self) -> dict[str, torch.Tensor]:
        named = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: value for name, value in named if not all(map(is_finite, parts_of(value)))}

    def zeroed(self, names: Sequence[str], to_load: ModelPatcher | None = None) -> list[Patch]:
        """Return patches that replace each NaN and Inf in these weights by a zero.

        ``to_load``: the patcher that is loaded after the patches were set, which replaces the functions of its weights.
        """
        patches: list[Patch] = []
        for name in names:
            layer, _, own = name.rpartition(".")
            module = self.model.get_submodule(layer)
            if own in FUNCTIONS and casts_weights(module):
                # Dynamic VRAM multiplies by a copy of the weight, to which ComfyUI applies these functions too.
                functions = FUNCTIONS[own]
                if to_load:
                    to_load.add_weight_wrapper(name, zeroed)
                else:
                    patches.append((module, functions, [*getattr(module, functions), zeroed]))
            else:
                patches.append((module, own, zeroed(dequantized(getattr(module, own).data).float())))
        return patches

    def has_nan(self, name: str) -> bool:
        return any(torch.isnan(floats(part)).any() for part in parts_of(operator.attrgetter(name)(self.model)))

    def bad_copy(self, origin: Origin) -> str:
        name = f"{origin.layer}.weight"
        module = dict(self.model.named_modules()).get(origin.layer)
        if module is None or kind_of(module) is None or self._is_patched(name):
            return ""
        if not all(map(is_finite, parts_of(module.weight))):
            return ""
        there = torch.zeros(1, device=self._patcher.load_device)
        with lent(weights_of(module)(module, there, torch.float32)) as (copied, _):
            return "" if is_finite(copied) else Message(BAD_COPY, name)

    def _is_patched(self, name: str) -> bool:
        return any(key == f"{self._prefix}{name}" for key, _ in self._patches())

    def sentence(self, name: str) -> str:
        if patch := self.patch_sentence(name.rpartition(".")[0]):
            return patch
        weight = operator.attrgetter(name)(self.model)
        if self._is_patched(name) and not self.has_nan(name):
            return _blamed(Message("With its LoRA, weight '{0}' exceeds the range of {1}", name, weight.dtype), WEAKER)
        path, held = _file_of(self._patcher), parts_of(weight)[0].dtype
        file, largest = Path(path).name or "The model", _largest_in(path, name)
        if largest is None and held == torch.float16 and not self.has_nan(name):
            culprit = Message("Weight '{0}' is Inf in fp16, perhaps because its own value is too large for it", name)
            return _blamed(culprit, joined([Message(WIDER, self._setting), IF_INF_THERE]))
        if largest is None or not math.isfinite(largest):
            again = OURS_OR_AGAIN if parts_of(weight)[0].dtype.itemsize == 1 else "download it again."
            cure = joined([again, Message("(weight '{0}')", name)])
            return _blamed(Message("{0} holds NaN or Inf", file), cure)
        if not held.is_floating_point or largest <= torch.finfo(held).max:
            culprit = Message("Weight '{0}' holds NaN or Inf in memory, but is finite in {1}", name, file)
            return _blamed(culprit, RUN_AGAIN)
        reaches = "Weight '{0}' reaches {1} in {2}, more than {3} holds"
        culprit = Message(reaches, name, f"{largest:.4g}", file, name_of(held))
        return _blamed(culprit, Message(WIDER, self._setting))

    def patch_sentence(self, layer: str) -> str:
        for key, patches in self._patches():
            bad = any(not is_finite(tensor) for patch in patches for tensor in _patch_tensors(patch))
            if bad and layer and key.startswith(f"{self._prefix}{layer}."):
                weight = key.removeprefix(self._prefix)
                found = _bad_lora_files()
                if not found:
                    return _blamed(Message("A LoRA or other patch of '{0}' holds NaN or Inf", weight), WITHOUT_PATCH)
                cure = joined([WITHOUT_PATCH, Message("(tensor '{0}')", next(iter(found.values())))])
                return _blamed(Message("{0} holds NaN or Inf", ", ".join(found)), cure)
        return ""

    def _patches(self) -> list[tuple[str, list]]:
        """List (key of a weight, its LoRAs and other patches), with the patches of active hooks."""
        patcher = self._patcher
        return [*patcher.patches.items(), *patcher.get_combined_hook_patches(patcher.current_hooks).items()]


def _blamed(culprit: str, cure: str) -> str:
    """Return the culprit and the cure as one message; the page reads both by these names."""
    return Message("{culprit}: {cure}", culprit=culprit, cure=cure)


def _largest_in(file: str, name: str) -> float | None:
    """Return the amax of a weight in its file; None if that is not known."""
    try:
        weights = open_model(file).weights if file else {}
    except (CheckpointError, OSError):
        return None
    found = [name] if name in weights else [key for key in weights if key.endswith(f".{name}")]
    return weights[found[0]].amax if len(found) == 1 else None


def _bad_lora_files() -> dict[str, str]:
    """Map the LoRA files of the running prompt that hold NaN or Inf to their first such tensor."""
    given = (value for node in running_prompt().values() for value in node.get("inputs", {}).values())
    names = {value for value in given if isinstance(value, str)}
    known = sorted(names & set(folder_paths.get_filename_list("loras")))
    found: dict[str, str] = {}
    for file in (name for name in known if name.endswith((".safetensors", ".sft"))):
        tensors = open_checkpoint(folder_paths.get_full_path("loras", file)).items()
        if bad := next((name for name, tensor in tensors if not is_finite(tensor)), ""):
            found[file] = bad
    return found


def _patch_tensors(patch: tuple) -> list[torch.Tensor]:
    values = [getattr(value, "weights", value) for value in patch]
    return floats_in([value for value in values if not callable(value)])


def _file_of(patcher) -> str:
    record = record_of(patcher)
    if record:
        return record.file
    arguments = (patcher.cached_patcher_init or (None, ()))[1]
    return next((value for value in arguments if isinstance(value, str)), "")
