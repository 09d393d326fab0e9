"""Causes of NaN that no precision cures: what the model was given, and the weights it was loaded with."""

import copy
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import folder_paths
import torch

from ....precision.amax import amax_value
from ....precision.arithmetic.patching import Patch
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.guard.finite import zeroed
from ....precision.guard.localize import Localizer, Origin
from ....precision.nested import tensors_in
from ....precision.plan.choice import ATTACHMENT
from ..page import running_prompt
from ..run.attention import OVERRIDE, overridden
from ..run.call import Call
from ..run.modules import dequantized

OURS = __name__.partition(".nodes.")[0]
CONDITIONINGS = {0: "positive conditioning", 1: "negative conditioning"}
NAN_GIVEN = "It holds NaN, of which no result is finite."
WITHOUT_PATCHES = "In fp32 the call is NaN or Inf with it, and finite without it."
CONTROL_ADVICE = (
    "Load the ControlNet with compute fp32 or fp16_safe in Load ControlNet (Halfsafe), lower its strength, or look at its picture "
    "with Check Finite. If its file holds NaN, get it again."
)
CALL_PATCHES = ("patches", "patches_replace")
PATCH_ADVICE = "Look at the node that put it there, and at what that node was given: Check Finite before it tells of NaN and Inf."
BETWEEN_CALLS = "The model's results were finite: it arose between its calls, in the sampler, the guidance (cfg) or a patch of either."


@dataclass(frozen=True)
class Blame:
    """A verdict that repeats cannot better, and what it rests on."""

    origin: Origin | None
    verdict: str
    advice: str | None = None
    evidence: str = ""


@dataclass(frozen=True)
class Suspect:
    """One of the things a model was given that holds NaN or Inf, and the verdict if that is the cause."""

    name: str
    values: tuple[torch.Tensor, ...]
    verdict: str = "bad_input"
    advice: str | None = None

    @property
    def origin(self) -> Origin:
        return Origin(self.name, "", "input", "", math.nan)

    def nan_rows(self, batch: int) -> set[int]:
        """The rows of a batch that were given NaN: all of them, where a value has no row for each."""
        rows: set[int] = set()
        for value in self.values:
            bad = torch.isnan(value).reshape(value.shape[0], -1).any(1) if value.dim() else torch.isnan(value).reshape(1)
            found = bad.nonzero().flatten().tolist()
            rows.update(found if len(bad) == batch else range(batch) if found else ())
        return rows

    def blame(self, evidence: str) -> Blame:
        """Blame it for the failure."""
        return Blame(self.origin, self.verdict, self.advice, BETWEEN_CALLS if self.name == "sampler" else evidence)


def suspects(call: Call, first: bool) -> list[Suspect]:
    """List what a denoiser was given that is not finite. ``first``: nothing of this run was computed by the model yet."""
    found = [
        _suspect("sigma", call.t, "not_precision"),
        _suspect(_conditioning(call.c_crossattn, call.options), call.c_crossattn),
        _suspect("c_concat (image conditioning)", call.c_concat),
        _suspect("ControlNet output", call.control, advice=CONTROL_ADVICE),
        *(_suspect(f"conditioning '{name}'", value) for name, value in call.extra.items()),
        _suspect("latent", call.x) if first else _suspect("sampler", call.x, "not_precision"),
    ]
    return [suspect for suspect in found if suspect]


def sampler_inputs(noise, latent_image, sigmas, denoise_mask, conds: dict) -> list[Suspect]:
    """List what a sampler's run was given that holds NaN. What is infinite may be meant, or may not matter."""
    masks = [cond["mask"] for group in conds.values() for cond in group if isinstance(cond.get("mask"), torch.Tensor)]
    found = [
        _suspect("sigmas of the scheduler", sigmas.sum(), "not_precision"),
        _suspect("latent image", latent_image),
        _suspect("noise", noise),
        _suspect("noise mask", denoise_mask),
        _suspect("mask of a conditioning", masks),
    ]
    return [suspect for suspect in found if suspect and any(torch.isnan(value).any() for value in suspect.values)]


def _suspect(name: str, values, verdict: str = "bad_input", advice: str | None = None) -> Suspect | None:
    bad = tuple(tensor for tensor in tensors_in(values) if not _finite(tensor))
    return Suspect(name, bad, verdict, advice) if bad else None


def without_nan(call: Call, suspect: Suspect) -> Call:
    """The call with a zero for each NaN of a suspect."""
    return _changed(call, [suspect], lambda value: torch.where(torch.isnan(value), torch.zeros_like(value), value))


def made_finite(call: Call, chosen: Sequence[Suspect]) -> Call:
    """The call with a zero for each NaN and Inf of the suspects."""
    return _changed(call, chosen, zeroed)


def call_patches(call: Call) -> str:
    """Name the functions that nodes have put into the model's blocks for a call, as GLIGEN and IP-Adapters do; empty for none."""
    functions = {f"'{_name_of(one)}'" for key in CALL_PATCHES for one in _functions(call.options.get(key))}
    return " and ".join(sorted(functions))


def without_patches(call: Call) -> Call:
    """The call without the functions that :func:`call_patches` names."""
    bare = copy.copy(call)
    bare.options = {key: value for key, value in call.options.items() if key not in CALL_PATCHES}
    return bare


def _functions(value) -> list:
    if isinstance(value, (dict, list, tuple)):
        return [one for inner in (value.values() if isinstance(value, dict) else value) for one in _functions(inner)]
    return [value] if callable(value) else []


def _name_of(function) -> str:
    """GLIGEN's is ``Gligen._set_position.<locals>.func``: the name of what made it."""
    return getattr(function, "__qualname__", type(function).__qualname__).partition(".")[0]


def _changed(call: Call, chosen: Sequence[Suspect], change) -> Call:
    wanted = {id(value) for suspect in chosen for value in suspect.values}
    return call.replaced(lambda value: change(value) if id(value) in wanted else value)


def _conditioning(context: torch.Tensor | None, options: dict) -> str:
    """Which conditioning has the first row that is not finite, in a batch of one chunk per conditioning."""
    if context is None or _finite(context):
        return "conditioning"
    kinds = options.get("cond_or_uncond") or [0]
    row = int((~torch.isfinite(context.flatten(1)).all(1)).nonzero()[0])
    return CONDITIONINGS.get(kinds[row * len(kinds) // len(context)], "conditioning")


def _finite(tensor: torch.Tensor) -> bool:
    return math.isfinite(amax_value(tensor))


def bad_weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Name -> weight or buffer of a diffusion model, of those that hold NaN or Inf."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: value for name, value in named if not _finite(getattr(value, "_qdata", value))}


def finite_weights(model: torch.nn.Module, names: Sequence[str]) -> list[Patch]:
    """What gives modules of a diffusion model their weights with a zero for each NaN and Inf."""
    places = ((model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names)
    return [(module, name, _made_finite(getattr(module, name))) for module, name in places]


def _made_finite(weight: torch.Tensor) -> torch.Tensor:
    return zeroed(dequantized(weight.data).float())


def has_nan(weight: torch.Tensor) -> bool:
    """Tell whether a weight, quantized or not, holds NaN."""
    return bool(torch.isnan(getattr(weight, "_qdata", weight).float()).any())


def bad_patch(patcher, layer: str) -> str:
    """A sentence on the LoRA or other patch of a layer's weight that holds NaN or Inf; empty where none does."""
    for key, patches in _weight_patches(patcher):
        bad = any(not _finite(tensor) for patch in patches for tensor in _patch_tensors(patch))
        if bad and layer and key.startswith(f"diffusion_model.{layer}."):
            files = _bad_lora_files()
            where = f" It is in {files}." if files else ""
            name = key.removeprefix("diffusion_model.")
            return f"A LoRA or other patch of '{name}' holds NaN or Inf.{where} Leave that LoRA out, or get it again."
    return ""


def _weight_patches(patcher) -> list[tuple[str, list]]:
    """(key of a weight, its LoRAs and other patches), of those that hooks have on now too."""
    return [*patcher.patches.items(), *patcher.get_combined_hook_patches(patcher.current_hooks).items()]


def bad_weight(patcher, name: str) -> str:
    """A sentence on a weight of the diffusion model that is not finite: what made it so and what to do."""
    if patch := bad_patch(patcher, name.rpartition(".")[0]):
        return patch
    model = getattr(patcher.model, "diffusion_model", patcher.model)
    weight = operator.attrgetter(name)(model)
    if any(key == f"diffusion_model.{name}" for key, _ in _weight_patches(patcher)) and not has_nan(weight):
        return f"With its LoRA the weight '{name}' passes the range of {weight.dtype}: lower the strength, or load the model with storage bf16 or fp32."
    return f"The weight '{name}' of {_file_of(patcher) or 'the model'} holds NaN or Inf. {_advice_on(weight)}"


def _advice_on(weight: torch.Tensor) -> str:
    if getattr(weight, "_qdata", weight).dtype.itemsize == 1:
        return (
            "If the file is fine, the cast to fp8 made it so: ComfyUI's own loaders cast without a scale and take scaled e5m2 "
            "for e4m3fn. Load Diffusion Model (Halfsafe) does neither. Else get the file again."
        )
    return "Get the file again. If its own value is only too large for fp16, load it with storage bf16 or fp32."


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
