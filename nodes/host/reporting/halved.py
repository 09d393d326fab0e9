"""What loaded weights take, measured in the tensors in memory, beside what they took."""

from collections import Counter
from pathlib import Path
from typing import cast

import torch
from comfy.controlnet import ControlNet
from comfy.model_patcher import ModelPatcher

from ....precision.base.dtypes import QUANTIZED_NAMES
from ....precision.base.message import Message, joined
from ....precision.base.modes import INT8
from ....precision.base.text import size_text
from ....precision.devices.measurements import told as published
from ....precision.devices.measurements import told_here
from ....precision.plan.auto import UNQUANTIZED
from ....precision.plan.layers import why_not_quantized
from ....precision.plan.load import ModelPlan
from ....precision.report import result
from ....precision.report.result import GOOD, WARN, Result
from ..comfyui.model_facts import held_bytes, record_of, storage_of
from ..load.controlnet import LoadedControl
from ..load.devices import current_device
from ..load.halving import LEAST
from ..load.kept_speeds import speeds_of

NO_MATRIX = "norms and biases"
NOT_IN_FILE = "layers that ComfyUI creates or renames"
SHOWN = 3


def memory_ui(file: str, *loaded: ModelPatcher) -> dict[str, tuple[str]]:
    """Make the ui output of a loader that was to keep weights in 8 bits or fewer: what they take, the others, and why.

    ``file``: what was loaded; ``loaded``: the models in it. Empty where no 8 bits were asked for.
    """
    records = [cast(ModelPlan, record_of(patcher)) for patcher in loaded]
    if not any(_is_asked(record) for record in records):
        return {}
    below = sum(record.below_16_bit for record in records)
    before, kept, reasons, stored = -below, Counter(), Counter(), Counter()
    for record, patcher in zip(records, loaded, strict=True):
        # ``named_modules`` and ``parameters`` of torch call ten functions for each module.
        modules = [("", getattr(patcher.model, "diffusion_model", patcher.model))]
        for name, module in modules:
            inside = f"{name}." if name else ""
            modules += [(inside + child, part) for child, part in module._modules.items() if part is not None]
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                size, storage = held_bytes(parameter), storage_of(parameter)
                before, stored[storage] = before + 2 * parameter.numel(), stored[storage] + size
                if storage in UNQUANTIZED:
                    kept[storage] += size
                    is_matrix = parameter.dim() > 1
                    why = _why_kept(record, name, type(module).__name__, parameter) if is_matrix else NO_MATRIX
                    reasons[why] += size
    held = stored.total()
    told = {"file": file, "before": size_text(before), "after": size_text(held), "kept": size_text(kept.total())}
    told["formats"] = " + ".join(storage for storage, _ in kept.most_common())
    kept_for = (Message("{0}: {1}", reason, size_text(size)) for reason, size in reasons.most_common(SHOWN))
    told["reasons"] = joined(kept_for, "; ")
    saves = before - held > LEAST * before
    sentences = (result.LESS, result.KEPT_IN) if kept else (result.LESS,)
    if kept.total() == held:
        sentences = (result.AS_IT_IS,)
    elif below and not saves:
        sentences = (result.NOT_LESS,)
    costs = (cost for record in records for cost in record.costs)
    speeds = (_speed_told(record, patcher) for record, patcher in zip(records, loaded, strict=True))
    message = joined([*(Message(sentence, **told) for sentence in sentences), *costs, *speeds])
    tone = GOOD if saves else WARN
    return Result(message, tone, text=message, toast=True, sizes=(before, held), stored=dict(stored)).ui()


def _speed_told(record: ModelPlan, patcher: ModelPatcher) -> str:
    """Return the speed measured for a model on this machine; without one, the published speed of int8 on this kind of
    card, if it is faster there and a diffusion model multiplies in int8; else ""."""
    here = told_here(speeds_of(patcher))
    profile = current_device().profile
    is_model = hasattr(patcher.model, "diffusion_model")
    multiplies = any(plan.mode == INT8.name for plan in record.compute.decisions.values())
    return here or (published(profile.name, INT8.name) if is_model and multiplies and profile.gain(INT8.name) else "")


def storage_ui(given: ModelPatcher, made: ModelPatcher, text: str) -> dict[str, tuple[str]]:
    """Make the ui output of a node that was to quantize the weights of ``given``: that of :func:`memory_ui`, or
    ``text`` if nothing was quantized."""
    if made is given:
        return Result(text, WARN, text=text, toast=True).ui()
    return memory_ui(Path(cast(ModelPlan, record_of(made)).file).name, made)


def control_memory_ui(file: str, control: ControlNet) -> dict[str, tuple[str]]:
    """Make the ui output of :func:`memory_ui` for a ControlNet, also for the kinds that ComfyUI loads by itself."""
    loaded = LoadedControl.of(control)
    if loaded.planned:
        return memory_ui(file, loaded.planned.current_patcher)
    told = Message(result.AS_IT_IS, file=file, reasons=loaded.record.storage.reason)
    return Result(told, WARN, toast=True).ui() if _is_asked(loaded.record) else {}


def _is_asked(record: ModelPlan) -> bool:
    return record.storage.requested in QUANTIZED_NAMES or record.storage.used in QUANTIZED_NAMES


def _why_kept(record: ModelPlan, name: str, cls: str, parameter: torch.Tensor) -> str:
    """Return why a matrix is not in 8 bits. The layers of text encoders have longer names than in their files."""
    if record.storage.used not in QUANTIZED_NAMES:
        return record.storage.reason
    planned = (reason for layer, reason in record.kept.items() if name == layer or name.endswith(f".{layer}"))
    return next(planned, "") or why_not_quantized(record.storage.used, parameter.shape, cls) or NOT_IN_FILE
