"""Analyze a model in ComfyUI: a short run of its own sampler for each set of layers that is
tried."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ....precision.arithmetic.linear import lent
from ....precision.base.errors import HalfsafeError
from ....precision.base.layers import kind_of
from ....precision.base.message import Message
from ....precision.base.modes import INT8
from ....precision.base.patching import Patch, Watch
from ....precision.formats.comfy_format import can_be_quantized
from ....precision.formats.int8 import rotation_group
from ....precision.plan.compute import LEAVES_QUANTIZED
from ....precision.plan.rules import rules_from
from ....precision.study.candidates import Candidate, with_fp16_sums
from ....precision.study.layer_error import LayerResult
from ....precision.study.sensitivity import BARRED, KEPT, MAX_TRIALS, Analysis, Session
from ..comfyui.attributes import WEIGHT_FUNCTIONS, casting, casts_weights
from ..comfyui.layer_forward import LayerForward
from ..comfyui.layers import matrix_layers
from ..comfyui.model_facts import model_facts
from ..comfyui.page import show_progress
from ..comfyui.weights import calling_layers, core_weights, exchanged, only_multiplies
from ..compute.executor import compute_of
from ..load.devices import current_device
from ..load.tensors import advancing
from .sampling import Inputs, bare_clone, sample, watch_sampling

STEPS = 4


def analyze_model(patcher: ModelPatcher, inputs: Inputs, candidate: str, target_db: float, pin: bool) -> Analysis:
    """Find layers that survive the candidate's precision on a prompt and latent. The model is not
    changed.

    Raises:
        HalfsafeError: the device cannot hold what the candidate stores, or the model's own output
            is not finite.
    """
    wanted = Candidate(candidate, _multiplies_in_int8(patcher))
    if wanted.stores and (why := current_device().refuses(candidate)):
        problem = Message("Layers in {0} cannot be measured: {1}", candidate, why)
        raise HalfsafeError(problem, "Choose another, such as int8.")
    bar = comfy.utils.ProgressBar(STEPS * (1 + MAX_TRIALS))
    advance = advancing(bar)
    clone = bare_clone(patcher)

    def run() -> list[torch.Tensor]:
        return sample(clone, inputs, STEPS, image_denoise=0.75)

    def begin_step(executor, *args, **kwargs):
        doing = session.begin_step()
        show_progress(Message("step {0} of {1} to {2}: {3}", session.steps, 2 * STEPS, bar.total, doing))
        advance()
        return executor(*args, **kwargs)

    @contextmanager
    def inside() -> Iterator[None]:
        with session.inside(), calling_layers(layer for _, layer in subjects):
            yield

    subjects = _subjects_of(patcher, wanted)
    session = Session(subjects, wanted, run, core_weights, _change, _measured)
    watch_sampling(clone, begin_step, inside)
    analysis = session.analyze(target_db, pin)
    bar.update_absolute(bar.total)
    return analysis


def _multiplies_in_int8(patcher: ModelPatcher) -> bool:
    """True if int8 weights of this model would multiply in int8: no dtype is asked for, and the
    device can."""
    compute = compute_of(patcher)
    asked = "auto" if compute is None else compute.plan.choice.requested
    return asked in LEAVES_QUANTIZED and current_device().capabilities["int8_matmul"]


def _subjects_of(patcher: ModelPatcher, candidate: Candidate) -> list[tuple[LayerResult, torch.nn.Module]]:
    """List every layer that multiplies, in model order, with its module."""
    preset, subjects = rules_from().on(model_facts(patcher).layers), []
    for name, module in matrix_layers(patcher.model):
        cls, barred = type(module).__name__, _why_barred(module, candidate)
        found = preset.setting("storage", name, cls)
        reason, status = barred or (found[1].reason if found else ""), BARRED if barred else KEPT
        layer = LayerResult(name, cls, module.weight.numel(), status, reason, sensitive=found is not None)
        subjects.append((layer, module))
    return subjects


def _why_barred(module: torch.nn.Module, candidate: Candidate) -> str:
    if candidate.stores and not can_be_quantized(type(module).__name__, module.weight.dim()):
        kind = candidate.name.partition("_")[0]
        return Message("of classes other than Linear, which ComfyUI does not support in {0}", kind)
    if candidate.name == INT8.name and rotation_group(module.weight.shape[1]) is None:
        return "with a number of inputs that is not a multiple of 16"
    if kind_of(module) == "transposed":
        return "transposed convolutions, which are not analysed"
    if not casts_weights(module) or not only_multiplies(module):
        return "of another node or loader, which has its own matmul"
    return ""


def _measured(module: torch.nn.Module, measure: Watch) -> list[Patch]:
    return LayerForward.on(module).with_fields(measure=measure)


def _change(module: torch.nn.Module, candidate: Candidate) -> list[Patch]:
    """Return patches that make a layer of ComfyUI compute as the candidate, LoRAs and offloading
    included."""
    if candidate.stores:
        exact = module.forward
        stored: list[Patch] = [(module, WEIGHT_FUNCTIONS, [*getattr(module, WEIGHT_FUNCTIONS), candidate.weight])]

        def rounded(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
            return exact(candidate.input(x), *args, **kwargs)

        return [*stored, *LayerForward(module, rounded).put_on()] if candidate.rounds_inputs else stored

    def call(x, *args, **kwargs):
        if not candidate.sums_in_fp16 or kind_of(module) != "linear":
            return type(module).forward(module, x.to(candidate.dtype), *args, **kwargs).to(x.dtype)
        with lent(core_weights(module, x, candidate.dtype)) as (weight, bias):
            return with_fp16_sums(x.to(candidate.dtype), weight, bias).to(x.dtype)

    return [*exchanged(LayerForward(module, call, otherwise=LayerForward.on(module))), *casting(module)]
