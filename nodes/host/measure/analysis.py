"""Analyse a model in ComfyUI: repeat a short run of its own sampler for each trial."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import comfy.utils
import torch
from comfy.patcher_extension import WrappersMP

from ....precision.analysis.candidates import Candidate, with_fp16_sums
from ....precision.analysis.results import Analysis
from ....precision.analysis.search import MAX_TRIALS, RETRIALS
from ....precision.analysis.session import CONFIRMATIONS, Session, Subject, analyze
from ....precision.arithmetic.compiling import compile_disabled
from ....precision.arithmetic.linear import kind_of
from ....precision.arithmetic.patching import Patch
from ....precision.devices.detect import why_no_fp8
from ....precision.errors import HalfsafeError
from ....precision.formats.comfy_format import can_be_quantized
from ....precision.formats.int8 import rotation_group
from ....precision.modes import INT8
from ....precision.plan.rules import Rules, rules_from
from ..core import casting, casts_weights, with_weight_function
from ..facts.layers import matrix_layers
from ..facts.model_facts import model_facts
from ..load.devices import current_device
from ..load.progress import advancing
from ..page import show_progress
from ..run.compute import compute_of
from ..run.layer_modes import stream_dtype
from ..run.model_compiler import compiler_off
from ..run.modules import core_weights, exchanged, only_multiplies
from ..run.wrappers import ANALYSIS, set_wrapper
from .bare_clone import bare_clone
from .sampling import sample

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

STEPS = 4
IMAGE_DENOISE = 0.75
MOST_CALLS = 2 * STEPS + MAX_TRIALS + (CONFIRMATIONS - 1) * RETRIALS + CONFIRMATIONS * (2 * STEPS - 1)


def analyze_model(
    patcher: ModelPatcher, positive, negative, latent: dict, seed: int, candidate: str, target_db: float, pin: bool
) -> Analysis:
    """Find the layers that can be in the candidate's precision on this prompt and latent. The model is not changed.

    Raises:
        HalfsafeError: the device cannot hold what the candidate stores, or the model's own output is not finite.
    """
    if why := why_no_fp8(candidate, current_device()):
        raise HalfsafeError(f"Layers in {candidate} cannot be measured: {why}", "Choose another, such as int8.")
    bar = comfy.utils.ProgressBar(MOST_CALLS)
    wanted = Candidate(candidate, _multiplies_in_int8(patcher))
    advance = advancing(bar)

    def begin_call() -> None:
        show_progress(session.doing())
        advance()

    session = Session(subjects_of(patcher, wanted), wanted, core_weights, change, begin_call)
    clone = _prepared(patcher, session)

    def run():
        with compile_disabled(), compiler_off(), torch.no_grad():
            return sample(clone, positive, negative, latent, seed, STEPS, IMAGE_DENOISE)

    session.reference(run)
    analysis = analyze(session, run, target_db, pin)
    bar.update_absolute(bar.total)
    return analysis


def _multiplies_in_int8(patcher: ModelPatcher) -> bool:
    """Tell whether int8 weights of this model would multiply in int8: no dtype is asked for, and the device can."""
    compute = compute_of(patcher)
    asked = "auto" if compute is None else compute.plan.choice.requested
    return asked in ("auto", "fp8", "int8") and current_device().capabilities.get("int8_matmul", True)


def class_name(patcher: ModelPatcher) -> str:
    """Name ComfyUI's class of a model, such as WAN21."""
    return type(patcher.model).__name__


def subjects_of(patcher: ModelPatcher, candidate: Candidate) -> list[Subject]:
    """List every layer that multiplies, in model order."""
    preset = rules_from().on(model_facts(patcher).layers)
    return [
        Subject(name, type(module).__name__, module, _role(preset, name, module), _why_barred(module, candidate))
        for name, module in matrix_layers(patcher.model)
    ]


def _role(preset: Rules, name: str, module: torch.nn.Module) -> str:
    found = preset.setting("storage", name, type(module).__name__)
    return found[1].reason if found else ""


def _why_barred(module: torch.nn.Module, candidate: Candidate) -> str:
    if candidate.stores and not can_be_quantized(type(module).__name__, module.weight.dim()):
        return f"of other classes than Linear, which ComfyUI does not hold in {candidate.name.partition('_')[0]}"
    if candidate.name == INT8.name and rotation_group(module.weight.shape[1]) is None:
        return "with a number of inputs that no rotation of 256, 64 or 16 divides"
    if kind_of(module) == "transposed":
        return "transposed convolutions, which are not analysed"
    if not casts_weights(module) or not only_multiplies(module):
        return "of another node or loader, which multiply in their own way"
    return ""


def change(module: torch.nn.Module, candidate: Candidate) -> list[Patch]:
    """Return patches that make one of ComfyUI's layers compute as the candidate, LoRAs and offloading included."""
    if candidate.stores:
        stored = [with_weight_function(module, candidate.weight)]
        rounding = (module, "forward", _of_rounded(module.forward, candidate))
        return [*stored, rounding] if candidate.rounds_inputs else stored
    forward = _sums_in_fp16 if candidate.sums_in_fp16 and kind_of(module) == "linear" else _cast

    def call(x, *args, **kwargs):
        return forward(module, candidate.dtype, x, *args, **kwargs).to(x.dtype)

    return [*exchanged(module, call), *casting(module)]


def _of_rounded(forward: Callable, candidate: Candidate) -> Callable:
    """Give a layer its input as the candidate rounds it."""

    def call(x, *args, **kwargs):
        return forward(candidate.input(x), *args, **kwargs)

    return call


def _cast(module: torch.nn.Module, dtype: torch.dtype, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    return type(module).forward(module, x.to(dtype), *args, **kwargs)


def _sums_in_fp16(module: torch.nn.Module, dtype: torch.dtype, x: torch.Tensor) -> torch.Tensor:
    with core_weights(module, x, dtype) as (weight, bias):
        return with_fp16_sums(x.to(dtype), weight, bias)


def _prepared(patcher: ModelPatcher, session: Session) -> ModelPatcher:
    """Clone the model so that its calls go through the session, innermost of all wrappers."""
    clone = bare_clone(patcher)
    stream = stream_dtype(patcher)
    set_wrapper(clone, ANALYSIS, functools.partial(_watched, session, stream))
    clone.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, ANALYSIS, functools.partial(_step, session))
    return clone


def _watched(session: Session, stream: torch.dtype, executor, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """Run one call of the model, with the session's patches on its layers."""
    with session.inside():
        result = executor(x, *args, **kwargs)
    session.measure_unused_weights(x.device, stream)
    return result


def _step(session: Session, executor, model, conds: list, x: torch.Tensor, *args) -> list[torch.Tensor]:
    """Run one step of the sampler, with all of its conditionings."""
    found = []

    def call():
        found.extend(executor(model, conds, x, *args))
        return [output for output, cond in zip(found, conds, strict=True) if cond is not None]

    outputs = iter(session.step(x, call))
    return [torch.zeros_like(x) if cond is None else next(outputs) for cond in conds]
