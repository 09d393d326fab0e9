"""Measure settings on a model in ComfyUI: four sampler steps for each, on weights made from those
in memory."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ....precision.base.errors import CheckpointError, HalfsafeError
from ....precision.base.message import Message, ended, joined
from ....precision.formats.checkpoint import Checkpoint
from ....precision.formats.layer_plan import AS_FILE, LayerPlan
from ....precision.plan.auto import UNQUANTIZED
from ....precision.plan.compute import SAFE
from ....precision.plan.facts import file_dtype, multiplies
from ....precision.plan.goal import SUMS
from ....precision.plan.layers import LoadTarget
from ....precision.plan.load import ModelPlan, plan_load
from ....precision.plan.rules import Rules, rules_from
from ....precision.study.sensitivity import closeness
from ....precision.study.tradeoffs import Measurements, Setting, Tradeoff
from ..accumulation.executor import with_accumulation
from ..comfyui.execution import is_on_several_devices, is_oom
from ..comfyui.model_facts import bytes_by_storage, held_storages, model_facts, record_of, storages
from ..comfyui.page import show_progress
from ..guard.planned import with_compute
from ..load.devices import current_device, free_device_memory, nvidia_driver
from ..load.files import open_model
from ..load.identity import metadata_of
from ..load.kept_speeds import keep_speeds
from ..load.models import load_diffusion_model, load_onto
from ..load.save import BYPASS, LiveWeights
from ..load.tensors import advancing
from ..replay.interceptor import ANALYSIS
from ..reporting.report import report_of
from .sampling import Inputs, bare_clone, picture_of, sample
from .step_timer import StepTimer

STEPS = 4
TURN = 2
"""The steps of each setting in the second turn, of which the first is a warm-up."""
NO_MEMORY = "out of memory"
CREATED = 0.01
"""The share of a model's bytes that ComfyUI may create beside those of its file."""


def measure_model(patcher: ModelPatcher, inputs: Inputs, settings: Sequence[Setting]) -> Measurements:
    """Sample four steps with each setting and with the reference, the file's own weights computed
    in fp32, and two more steps with each in reverse order, so that what drifts meanwhile is in the
    spread of each time.

    Weights of another storage are made in both turns, which is not timed. The model is not changed.
    Held at once: the loaded model, which ComfyUI keeps in host memory meanwhile, the weights of its
    file where it was loaded in another storage, and one other, of the setting that is measured.
    Settings of the file's own weights need no other. What is on the device is moved off before each
    setting, so that every one finds it empty.

    Raises:
        HalfsafeError: the reference is not finite or does not fit, or the model is spread over
            several devices.
    """
    if is_on_several_devices(patcher):
        raise HalfsafeError("The model is spread over several devices.", "Measure on one device, before MultiGPU.")
    began = time.perf_counter()
    first = STEPS * inputs.seeds
    bar = comfy.utils.ProgressBar((len(settings) + 1) * (first + TURN))
    what = "measuring takes about {0} sampler steps, plus twice the time to make each set of weights"
    show_progress(Message(what, bar.total))
    given = _stored_as(patcher)
    patcher, is_of_file = _on_weights_of_file(patcher)
    runner = _SettingRunner(patcher, inputs, advancing(bar))
    _clear_device()
    rows = [runner.reference()]
    for place, (setting, *same) in enumerate(_alike(patcher, settings), 1):
        bar.update_absolute(place * first)
        show_progress(Message("measuring {0} ({1} of {2})", setting, place, len(settings)))
        rows.append(replace(runner.row(setting), same=same))
    for place, row in reversed([*enumerate(rows)]):
        show_progress(Message("measuring {0} once more ({1} left)", row.setting, place))
        rows[place] = runner.again(row)
    reference, *rows = rows
    bar.update_absolute(bar.total)
    automatic = _planned(patcher, Setting(AS_FILE, "auto")).compute.choice.used
    layers = model_facts(patcher).layers
    shape = tuple(inputs.latent["samples"].shape)
    device, name = current_device(), type(patcher.model).__name__
    about = device.label, name, _stored_as(patcher), automatic, layers, shape, inputs.seed
    machine = device.name, nvidia_driver(), str(torch.__version__)
    took = time.perf_counter() - began, runner.sampling
    measured = Measurements(*about, reference, rows, given, is_of_file, machine, took, inputs.seeds)
    keep_speeds(measured, patcher)
    return measured


def _on_weights_of_file(patcher: ModelPatcher) -> tuple[ModelPatcher, bool]:
    """Return a model with the weights of its file, and False where that is not known and they are
    as loaded."""
    make, arguments, *_ = patcher.cached_patcher_init or (None, ("",))
    of_core = {comfy.sd.load_diffusion_model: False, comfy.sd.load_checkpoint_guess_config: True}
    whole = bool(arguments[-1]) if make is load_diffusion_model else of_core.get(make)
    if whole is None:
        return patcher, False
    try:
        checkpoint = open_model(arguments[0])
    except CheckpointError:
        return patcher, False
    if _is_as_in_file(patcher, checkpoint):
        return patcher, True
    return _on_other_weights(patcher, checkpoint, AS_FILE, "auto", rules_from(), whole), True


def _is_as_in_file(patcher: ModelPatcher, checkpoint: Checkpoint) -> bool:
    """True if a model holds the weights of its file as they are there: of another loader by storage
    and size."""
    if record := record_of(patcher):
        return not record.asked
    inside = [weight for name, weight in checkpoint.weights.items() if name.startswith(checkpoint.prefix)]
    quantized = {weight.storage for weight in inside if weight.quantized}
    held, size = sum(bytes_by_storage(patcher).values()), sum(weight.data.nbytes for weight in inside)
    return _stored_as(patcher) == (_named(quantized) or file_dtype(checkpoint, checkpoint.prefix)) and (
        abs(held - size) < CREATED * size
    )


def _alike(patcher: ModelPatcher, settings: Sequence[Setting]) -> list[list[Setting]]:
    groups: dict[object, list[Setting]] = {}
    for setting in settings:
        comes_to: object = setting
        if not setting.why_not(current_device()):
            plan = _planned(patcher, setting)
            storage, compute = AS_FILE if _is_held(patcher, plan) else plan.storage.used, plan.compute
            layers = frozenset((name, LayerPlan().with_arithmetic(own)) for name, own in compute.decisions.items())
            comes_to = storage, compute.choice.used, compute.fp8_matmul, layers
        groups.setdefault(comes_to, []).append(setting)
    return list(groups.values())


class _SettingRunner:
    """Measure settings of a model in two turns.

    ``latents``: of the reference, by seed. ``sampling``: seconds of all steps.
    """

    def __init__(self, patcher: ModelPatcher, inputs: Inputs, advance: Callable[[], object]):
        self.patcher = patcher
        self.inputs = inputs
        self.advance = advance
        self.latents: list[list[torch.Tensor]] = []
        self.sampling = 0.0

    def reference(self) -> Tradeoff:
        """Sample the reference, in fp32, or in fp16_safe where fp32 does not fit."""
        row = self.row(Setting(AS_FILE, "fp32"))
        if row.out_of_memory and current_device().capabilities["fp16"]:
            row = self.row(Setting(AS_FILE, SAFE))
        if row.problem:
            why = ended(row.problem)
            problem = Message("The reference {0} gave no result to compare with: {1}", row.setting, why)
            raise HalfsafeError(problem, "Choose a smaller latent, and check the model with the report or NaN Guard.")
        return replace(row, snr_db=None)

    def row(self, setting: Setting) -> Tradeoff:
        """Measure a setting, or say in the row why the device, its memory or the weights do not
        allow it."""
        why = setting.why_not(current_device(), held_storages())
        return Tradeoff(setting, problem=why) if why else self._tried(setting, self._measured)

    def again(self, row: Tradeoff) -> Tradeoff:
        """Time a setting that gave a result in a second turn. A time of the reference without one
        is too noisy."""
        if row.problem:
            return row
        made = self._tried(row.setting, lambda setting: self._timed_again(row))
        return replace(row, spread=row.seconds) if made.problem and row.snr_db is None else replace(made, same=row.same)

    def _tried(self, setting: Setting, measure: Callable[[Setting], Tradeoff]) -> Tradeoff:
        try:
            return measure(setting)
        except (HalfsafeError, RuntimeError) as error:  # RuntimeError: a kernel that this device or its driver refuses
            if is_oom(error):
                return Tradeoff(setting, problem=NO_MEMORY, out_of_memory=True)
            return Tradeoff(setting, problem=str(error).partition("\n")[0] or type(error).__name__)
        finally:
            _clear_device()

    def _measured(self, setting: Setting) -> Tradeoff:
        model, storage = self._prepared(setting, is_reference=not self.latents)
        latents, timer = self._sampled(model, STEPS, self.inputs.seeds)
        self.latents = self.latents or latents
        report, pairs = report_of(model), [*zip(self.latents, latents, strict=True)]
        snrs, cosines = zip(*(closeness(*pair) for pair in pairs), strict=True)
        worst = pairs[cosines.index(min(cosines))]
        pictures = [*map(partial(picture_of, model), worst)] if self.inputs.seeds > 1 else []
        timed = [step for place, step in enumerate(timer.seconds) if place % STEPS]
        seconds, spread = _median_and_spread(timed)
        modes = Counter(layer.mode for layer in report.layers if multiplies(layer.cls))
        size, held = report.model.weight_bytes, report.model.bytes_by_storage
        figures = setting, storage, seconds, size, timer.extra_bytes(), min(snrs), held, modes
        shown = [picture for picture in pictures if picture is not None]
        return Tradeoff(*figures, spread=spread, timed=timed, cosines=cosines, pictures=shown)

    def _timed_again(self, row: Tradeoff) -> Tradeoff:
        model, _ = self._prepared(row.setting, is_reference=row.snr_db is None)
        _, timer = self._sampled(model, TURN, 1)
        timed = [*row.timed, *timer.seconds[1:]]
        seconds, spread = _median_and_spread(timed)
        return replace(row, seconds=seconds, spread=spread, timed=timed)

    def _prepared(self, setting: Setting, is_reference: bool) -> tuple[ModelPatcher, str]:
        model, storage = _prepared(self.patcher, setting)
        return with_accumulation(model, SUMS["quality"][0]) if is_reference else model, storage

    def _sampled(self, model: ModelPatcher, steps: int, seeds: int) -> tuple[list[list[torch.Tensor]], StepTimer]:
        """Sample some steps with each of some seeds. Returns the final latents by seed, and the
        timer of all steps."""
        timer = StepTimer(model.load_device, self.advance)
        model.add_wrapper_with_key(WrappersMP.CALC_COND_BATCH, ANALYSIS, timer.step)
        latents = [sample(model, self.inputs, steps, number) for number in range(seeds)]
        if len(timer.seconds) != steps * seeds:
            called = Message("{0} of {1} steps called the model.", len(timer.seconds), steps * seeds)
            raise HalfsafeError(called, "Remove step caches.")
        self.sampling += sum(timer.seconds)
        return latents, timer


def _median_and_spread(timed: Sequence[float]) -> tuple[float, float]:
    """Return the median of the times of steps, and how far the farthest of them is from it."""
    median = statistics.median(timed)
    return median, max(abs(one - median) for one in timed)


def _clear_device() -> None:
    """Empty the device, and free the model of an earlier setting."""
    # A model's modules refer to each other: only the collector frees them.
    gc.collect()
    comfy.model_management.unload_all_models()
    comfy.model_management.soft_empty_cache()


def _prepared(patcher: ModelPatcher, setting: Setting) -> tuple[ModelPatcher, str]:
    bare, plan = bare_clone(patcher), _planned(patcher, setting)
    if _is_held(patcher, plan):
        record = record_of(patcher)
        return with_compute(bare, setting.compute, Rules()), record.storage.used if record else AS_FILE
    wanted = plan.storage.used
    return _on_other_weights(bare, _checkpoint(patcher), wanted, setting.compute, rules_from()), wanted


def _is_held(patcher: ModelPatcher, plan: ModelPlan) -> bool:
    """True if the weights of a model are stored as planned; of a file quantized in part, all that
    can be."""
    used, held = plan.storage.used, storages(patcher)
    if used in (AS_FILE, *UNQUANTIZED):
        return used in (AS_FILE, _stored_as(patcher))
    return all(own.storage in (AS_FILE, held.get(name)) for name, own in plan.layers.items())


def _planned(patcher: ModelPatcher, setting: Setting) -> ModelPlan:
    device = current_device()
    target = LoadTarget(device, None if device.simulated else free_device_memory(), held_storages())
    return plan_load(model_facts(patcher), setting.storage, setting.compute, rules_from(), target)


def _stored_as(patcher: ModelPatcher) -> str:
    """Name what the loaded weights are stored in: the quantized storages where there are any, else
    that of most."""
    quantized = {*storages(patcher).values()} - {*UNQUANTIZED}
    return _named(quantized) or model_facts(patcher).file_dtype


def _named(storages: set[str]) -> str:
    return joined(sorted(storages), " and ")


def _checkpoint(patcher: ModelPatcher) -> Checkpoint:
    """Return the loaded weights without LoRAs, as a file of them would be read; they are not
    copied."""
    weights = {name: weight.moved("cpu") for name, weight in LiveWeights(patcher).stored.items()}
    name, metadata = "the loaded " + type(patcher.model).__name__, metadata_of(patcher, None, None)
    return Checkpoint(name, ("loaded",), metadata, weights, [])


def _on_other_weights(patcher: ModelPatcher, *weights) -> ModelPatcher:
    """Clone a patcher, LoRAs and all, onto another model of its architecture, without patches of
    single modules. ``weights``: see ``load_onto``."""
    if BYPASS in patcher.injections:
        raise HalfsafeError("A bypass LoRA works on the loaded weights only: measure without it.")
    clone = load_onto(patcher, *weights)
    for name in [name for name in clone.object_patches if name.startswith("diffusion_model")]:
        del clone.object_patches[name]
    return clone
