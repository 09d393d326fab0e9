"""Causes of NaN that no precision cures: what the model was given, and the weights it was loaded with."""

import math
import operator

import folder_paths
import torch

from ....precision.amax import amax_value
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.guard.localize import Localizer, Origin
from ....precision.nested import tensors_in
from ..load.models import ATTACHMENT
from ..page import running_prompt
from ..run.attention import OVERRIDE, overridden

OURS = __name__.partition(".nodes.")[0]
Blame = tuple[Origin, str]
CONDITIONINGS = {0: "positive conditioning", 1: "negative conditioning"}


def bad_input(call, first: bool) -> Blame | None:
    """What the denoiser was given that is not finite. ``first``: nothing of this run was computed by the model yet."""
    if not _finite(call.t):
        return _origin("sigma"), "not_precision"
    if not _finite(call.c_crossattn):
        return _origin(_conditioning(call.c_crossattn, call.options)), "bad_input"
    named = {"c_concat (image conditioning)": call.c_concat, "ControlNet output": call.control}
    named |= {f"conditioning '{name}'": value for name, value in call.extra.items()}
    bad = next((name for name, value in named.items() if not all(map(_finite, tensors_in(value)))), None)
    if bad:
        return _origin(bad), "bad_input"
    if not _finite(call.x):
        return (_origin("latent"), "bad_input") if first else (_origin("sampler"), "not_precision")
    return None


def sampler_inputs(noise, latent_image, sigmas) -> list[Blame]:
    """What a sampler's run was given that is not finite, the first of it."""
    if not _finite(sigmas):
        return [(_origin("sigmas of the scheduler"), "not_precision")]
    named = {"latent image": latent_image, "noise": noise}
    return [(_origin(name), "bad_input") for name, value in named.items() if not all(map(_finite, tensors_in(value)))][:1]


def _conditioning(context: torch.Tensor, options: dict) -> str:
    """Which conditioning has the first row that is not finite, in a batch of one chunk per conditioning."""
    kinds = options.get("cond_or_uncond") or [0]
    row = int((~torch.isfinite(context.flatten(1)).all(1)).nonzero()[0])
    return CONDITIONINGS.get(kinds[row * len(kinds) // len(context)], "conditioning")


def _origin(layer: str) -> Origin:
    return Origin(layer, "", "input", "", math.nan)


def _finite(tensor: torch.Tensor | None) -> bool:
    return tensor is None or math.isfinite(amax_value(tensor))


def bad_weight(patcher, name: str | None, layer: str = "") -> str:
    """A sentence on the weight ``name`` of the diffusion model, or on a patch of a weight, that is not finite.

    ``layer``: where the failure was seen, for patches that are added to the weights at each call. Empty where all is well.
    """
    patch = _bad_patch(patcher, f"diffusion_model.{name or layer}")
    if patch:
        files = _bad_lora_files()
        where = f" It is in {files}." if files else ""
        return f"A LoRA or other patch of '{patch}' holds NaN or Inf.{where} Leave that LoRA out, or get it again."
    if not name:
        return ""
    source = _file_of(patcher)
    return f"The weight '{name}' of {source or 'the model'} holds NaN or Inf. {_advice_on(patcher, name)}"


def _advice_on(patcher, name: str) -> str:
    model = getattr(patcher.model, "diffusion_model", patcher.model)
    weight = operator.attrgetter(name)(model)
    if getattr(weight, "_qdata", weight).dtype.itemsize == 1:
        return (
            "If the file is fine, the cast to fp8 made it so: ComfyUI's own loaders cast without a scale and take scaled e5m2 "
            "for e4m3fn. Load Diffusion Model (Halfsafe) does neither. Else get the file again."
        )
    return "Get the file again. If its own value is only too large for fp16, load it with storage bf16 or fp32."


def _bad_patch(patcher, prefix: str) -> str:
    """The weight whose patch holds NaN or Inf; those under ``prefix`` first."""
    for key in sorted(patcher.patches, key=lambda key: not key.startswith(prefix)):
        if any(not _finite(tensor) for patch in patcher.patches[key] for tensor in _patch_tensors(patch)):
            return key.removeprefix("diffusion_model.")
    return ""


def _patch_tensors(patch: tuple) -> list[torch.Tensor]:
    values = [getattr(value, "weights", value) for value in patch]
    return tensors_in([value for value in values if not callable(value)])


def _bad_lora_files() -> str:
    """The LoRA files of the running prompt that hold NaN or Inf, with their first such tensor."""
    names = {value for node in running_prompt().values() for value in node.get("inputs", {}).values() if isinstance(value, str)}
    known = sorted(names & set(folder_paths.get_filename_list("loras")))
    found = ((name, _bad_tensor(folder_paths.get_full_path("loras", name))) for name in known)
    return ", ".join(f"{name} (tensor '{tensor}')" for name, tensor in found if tensor)


def _bad_tensor(path: str) -> str:
    if not path.endswith((".safetensors", ".sft")):
        return ""
    return next((name for name, tensor in open_checkpoint(path).items() if not _finite(tensor)), "")


def _file_of(patcher) -> str:
    record = patcher.attachments.get(ATTACHMENT)
    if record:
        return record.file
    arguments = (patcher.cached_patcher_init or (None, ()))[1]
    return next((value for value in arguments if isinstance(value, str)), "")


def opaque_attention(localizer: Localizer, options: dict) -> dict:
    """``transformer_options`` whose attention is watched as one operation, named after the kernel that runs it."""
    previous = options.get(OVERRIDE)
    others = previous is not None and not getattr(previous, "__module__", "").startswith(OURS)

    def attend(function, attention, *args, **kwargs):
        name = getattr(previous, "__qualname__", type(previous).__name__) if others else function.__name__
        return localizer.opaque(f"attention by {name}", attention, *args, **kwargs)

    return overridden(options, attend)
