"""Answer *Halve the memory* before it exchanges loaders: the 8-bit storages of this device, and the files to leave as
they are."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import comfy.model_base
import comfy.model_management
import folder_paths
import torch
from comfy.cli_args import args

from ....precision.base.dtypes import dtype_named
from ....precision.base.errors import CheckpointError
from ....precision.base.message import Message, joined
from ....precision.base.text import size_text
from ....precision.devices.measurements import MARGIN, Measurement, told, told_here
from ....precision.files.safetensors_file import open_checkpoint
from ....precision.formats.checkpoint import Checkpoint, read_checkpoint
from ....precision.formats.layer_plan import AS_FILE
from ....precision.formats.registry import FORMAT_OF_STORAGE
from ....precision.plan import storage as plan
from ....precision.plan.auto import (
    BLOCKS,
    UNQUANTIZED,
    int8_as_run,
    smallest_storage,
    why_slow,
)
from ....precision.plan.layers import FEWER_BITS, plan_file
from ....precision.plan.rules import TEXT_ENCODER_RULES, Rules, rules_from
from ..comfyui.attributes import MEMORY_ESTIMATE
from ..comfyui.model_facts import held_storages
from .controlnet import DIFFERENCE
from .detection import recognised
from .devices import compute_device, current_device, device_at
from .kept_speeds import Kept, kept_speeds

READ = (".safetensors", ".sft", ".index.json")
NOT_READ = "Halfsafe's loaders read .safetensors files only"
DIFFERENCES = "it stores differences to a model's weights"
NOT_16_BIT = "its weights are in 8 bits or fewer already"
NO_LAYER = "none of its layers can be in 8 bits"
ENCODERS = "text_encoders"
CHECKPOINTS = "checkpoints"
MODELS = ("diffusion_models", CHECKPOINTS)
MODEL = "storage"
CLIP = "clip_storage"
"""The options of a loader for the weights of a model, and of text encoders."""
DEVICES = {MODEL: compute_device, CLIP: comfy.model_management.text_encoder_device}
VAE = re.compile(r"^(first_stage_model|vae)\.")
LEAST = 0.03
"""A smaller share of a loader's bytes counts as no saving."""


class _Part(NamedTuple):
    """The weights of a file that one option of a loader stores. ``prefix``: of their names in the file."""

    option: str
    checkpoint: Checkpoint
    prefix: str
    rules: Rules

    def bytes_in(self, storage: str) -> int:
        """Count the bytes of the weights in a storage; their sensitive layers stay."""
        if storage == "auto":
            storage = AS_FILE
        if storage in UNQUANTIZED:
            parameters = sum(math.prod(weight.shape) for weight in self.checkpoint.weights.values())
            return parameters * dtype_named(storage).itemsize
        decisions = plan_file(self.checkpoint, self.prefix, storage, self.rules)
        return plan.bytes_in_memory(self.checkpoint.weights.values(), decisions)

    def held(self) -> set[str]:
        """Return the storages of its quantized weights."""
        return {weight.storage for weight in self.checkpoint.weights.values() if weight.quantized}


def halving(loaders: list[dict]) -> dict:
    """Answer for loaders: the storages to load them in, and which are left out. Each has the ``folder`` of ComfyUI's,
    ``names`` of files in it, ``in_8_bits`` where ComfyUI's own loader casts to fp8, the ``size`` that is sampled at
    where it is known, and ``smaller`` ones; optionally ``storages`` to say the bytes of.

    ``storage``: of models and ControlNets, ``as_file`` where the device holds no 8-bit weights, and ``why``; a model
    that was measured on this machine is stored as was fastest there, which its loader's ``measured`` tells;
    ``clip_storage``: of text encoders; ``reserved``: what ``--reserve-vram`` keeps free; ``slow``: why products of
    fewer than 8 bits are not faster here; ``told``: what was measured of int8 on cards like this one, if it is that;
    ``errors``: storage -> error of a layer; ``loaders``: see :func:`_judged`.
    """
    device = current_device()
    storage, why = smallest_storage(device)
    kept = kept_speeds(device)
    options = {MODEL: storage, CLIP: plan.smallest_of_encoder(held_storages())}
    reserved = None if comfy.model_management.is_device_cpu(compute_device()) else args.reserve_vram
    return {
        **options,
        "why": why,
        "reserved": size_text(int(reserved * 2**30)) if reserved else "",
        "slow": why_slow("w4a8", device),
        "told": told(device.profile.name, storage) if storage == "int8" else "",
        "errors": {name: f"{100 * error:.2g} %" for name, error in plan.PREDICTED_ERROR.items()},
        "loaders": [_judged(loader, options, kept) for loader in loaders],
    }


def _judged(loader: Mapping, options: Mapping[str, str], kept: Sequence[Kept]) -> dict:
    """Return what a loader would be exchanged for. ``kept``: speeds that were measured on this machine.

    Returns:
        ``reason``: why it would not be, empty where it would; ``missing``: files that are not there; its ``storage``
        and ``clip_storage``: what its quantized weights have, so that they stay untouched, or ``options``; ``bytes``:
        of its weights now; ``sizes``: those of its model in each of the ``storages`` asked for; ``left``: the storages
        of fewer bits for a model in 8 bits, each with its ``bytes`` and the ComfyUI that it ``needs``, empty where this
        one runs it; ``activations``: see :func:`_activations`; ``measured``: what was measured of this model, empty
        where nothing was. The reason alone if ours do not read such files; with ``problem`` and ``advice``, of which it
        is made, if a file is damaged or not known.
    """
    parts = []
    missing = []
    for name in loader["names"]:
        path = folder_paths.get_full_path(loader["folder"], name)
        if not name.lower().endswith(READ):
            return {"reason": NOT_READ}
        if path is None:
            missing.append(name)
            continue
        try:
            file = open_checkpoint(path)
            checkpoint = read_checkpoint(file, file.metadata, path)
        except CheckpointError as error:
            problem = Message("{0}: {1}", name, error.found)
            return {"reason": joined([problem, error.advice]), "problem": problem, "advice": error.advice}
        if DIFFERENCE in checkpoint.weights:
            return {"reason": DIFFERENCES}
        parts += _parts(loader["folder"], checkpoint)
    faster, measured = _measured(loader["folder"], parts, kept)
    options = {**options, **({MODEL: faster} if faster else {})}
    chosen = {option: _storage_beside(parts, option, default) for option, default in options.items()}
    models = [part for part in parts if part.option == MODEL]
    is_cast = loader.get("in_8_bits")
    then = _sum(parts, chosen)
    now = then if is_cast else _sum(parts, {})
    # ComfyUI's layers cast such weights in each call, which torch does not do on MPS.
    fails = is_cast and compute_device().type == "mps"
    saves = not parts or fails or now - then > LEAST * now
    usable = [name for name in FEWER_BITS if name not in BLOCKS or not why_slow(name, current_device())]
    left = [] if saves else [_fewer(parts, name, now) for name in usable]
    is_in_8_bits = is_cast or any(part.held() for part in parts)
    return {
        "reason": "" if saves else NOT_16_BIT if is_in_8_bits else NO_LAYER,
        "missing": missing,
        **chosen,
        "bytes": now,
        "sizes": {name: _sum(models, {MODEL: name}) for name in loader.get("storages", ())},
        "left": [one for one in left if one],
        "activations": [] if saves else _activations(loader, parts[0].checkpoint),
        "measured": measured,
    }


def _measured(folder: str, parts: list[_Part], kept: Sequence[Kept]) -> tuple[str, str]:
    """Return the 8-bit storage that was faster for this model on this machine, and the measurement in words; both empty
    without a measurement, the storage empty if the measurement does not tell."""
    model = next((part for part in parts if part.option == MODEL), None)
    if not kept or model is None or folder not in MODELS:
        return "", ""
    try:
        _, _, config = recognised(model.checkpoint, only_diffusion_model=folder != CHECKPOINTS)
    except CheckpointError:
        return "", ""
    parameters = sum(math.prod(weight.shape) for weight in model.checkpoint.weights.values())
    found = next((one for one in kept if one.is_of(type(config).__name__, parameters)), None)
    return (_faster(found.speeds, int8_as_run(current_device())), told_here(found.speeds)) if found else ("", "")


def _faster(rows: Sequence[Measurement], int8_setting: str) -> str:
    """Return the 8-bit storage in which one model was faster on a card: int8, whose error is a third of fp8's, unless
    it was slower than unpacked fp8 by more than the spread; "" where they do not tell.

    ``int8_setting``: as the device runs weights in int8."""
    of = {row.setting: row.ratio for row in rows if row.to == "16 bit"}
    int8, fp8 = of.get(int8_setting), of.get("fp8 unpacked")
    if int8 and fp8:
        return "int8" if int8[1] >= fp8[0] else "fp8_e4m3fn"
    return "int8" if int8 and int8[0] > MARGIN else ""


def _parts(folder: str, checkpoint: Checkpoint) -> Iterator[_Part]:
    prefix = checkpoint.prefix
    encoder = Rules(presets=TEXT_ENCODER_RULES)
    inside = {name: weight for name, weight in checkpoint.weights.items() if name.startswith(prefix)}
    outside = {name: it for name, it in checkpoint.weights.items() if name not in inside and not VAE.match(name)}
    if folder == ENCODERS:
        yield _Part(CLIP, checkpoint, "", encoder)
    else:
        yield _Part(MODEL, replace(checkpoint, weights=inside), prefix, rules_from())
    if folder == CHECKPOINTS:
        yield _Part(CLIP, replace(checkpoint, weights=outside), "", encoder)


def _storage_beside(parts: list[_Part], option: str, default: str) -> str:
    """Choose the storage for an option that has quantized weights, so that they stay as they are: their 8-bit storage
    if they share one, else as in the file; ``default`` if the device holds none of them."""
    device = device_at(DEVICES[option]())
    own = [part for part in parts if part.option == option]
    usable = {storage for part in own for storage in part.held() if not device.refuses(storage)}
    return next((storage for storage in plan.EIGHT_BITS if usable == {storage}), AS_FILE) if usable else default


def _sum(parts: list[_Part], storages: Mapping[str, str]) -> int:
    return sum(part.bytes_in(storages.get(part.option, AS_FILE)) for part in parts)


def _fewer(parts: list[_Part], storage: str, now: int) -> dict | None:
    """Return the size of a model in fewer bits; None if it is no smaller."""
    size = _sum(parts, {MODEL: storage})
    needs = "" if storage in held_storages() else FORMAT_OF_STORAGE[storage].since
    return {"storage": storage, "bytes": size, "needs": needs} if now - size > LEAST * now else None


def _activations(loader: Mapping, checkpoint: Checkpoint) -> list[int]:
    """Return the bytes that ComfyUI estimates for the values between a model's layers at its size and at each smaller
    one; empty where the size is not known."""
    size = loader.get("size")
    folder = loader["folder"]
    if not size or folder == ENCODERS:
        return []
    try:
        _, _, config = recognised(checkpoint, only_diffusion_model=folder != CHECKPOINTS)
    except CheckpointError:
        return []
    return [_estimated(config, one) for one in (size, *loader.get("smaller", ()))]


def _estimated(config, size: Mapping) -> int:
    latent = config.latent_format
    side = latent.spacial_downscale_ratio
    frames = (size["length"] - 1) // latent.temporal_downscale_ratio + 1
    shape = [size["batch_size"], latent.latent_channels, frames, size["height"] // side, size["width"] // side]
    model = SimpleNamespace(memory_usage_factor=config.memory_usage_factor, memory_usage_factor_conds=())
    model.get_dtype_inference = lambda: torch.bfloat16
    return int(getattr(comfy.model_base.BaseModel, MEMORY_ESTIMATE)(model, shape))
