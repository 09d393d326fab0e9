"""What nodes show in the page: badges with the dtypes their output really has, and reports on runs of a sampler."""

from __future__ import annotations

import json
import logging
import uuid
from collections import Counter
from collections.abc import Iterable

import torch
from comfy.model_patcher import ModelPatcher
from comfy.sd import CLIP, VAE

from ....precision.base.dtypes import name_of
from ....precision.base.message import messages_in
from ....precision.base.modes import INT8, MODES
from ....precision.formats.checkpoint import WITHOUT_SCALES
from ....precision.plan.auto import UNQUANTIZED, missing_kernels
from ....precision.plan.compute import WEIGHTS_FOR
from ..comfyui.gate import met_in
from ..comfyui.layers import matrix_layers
from ..comfyui.model_facts import record_of, storage_of, storages
from ..comfyui.page import REPORT_EVENT, send
from ..compute.executor import compute_of
from ..compute.layer_modes import compute_name
from ..guard.notices import encoder_reports
from ..load.controlnet import LoadedControl
from ..load.devices import current_device
from ..replay.interceptor import REPORT, Stage, put_stage
from .report import report_of

BADGE_KEY = "halfsafe_badge"
REPORT_KEY = "halfsafe_report"
TOKEN = "halfsafe_token"
UNMATCHED_KEY = "halfsafe_unmatched"
INSTEAD_KEY = "halfsafe_instead"
MESSAGES_KEY = "halfsafe_messages"
"""The messages of a node's ui output: texts of it -> their templates and values."""
KERNELS_KEY = "halfsafe_kernels"
SHOWN = 20
logger = logging.getLogger("halfsafe")
_told: set[str] = set()
"""What was said of missing kernels in this process."""


def badge(*words: str | None) -> dict[str, list[list[str]]]:
    """Make a node's ui output that puts the words on its badge; empty where there is none to show."""
    shown = list(filter(None, words))
    return {BADGE_KEY: [shown]} if shown else {}


def model_ui(model, *more: str | None) -> dict[str, list]:
    """Make the ui output of a node that gives out a model: its badge, with words for layers that
    ran their own code because of an argument, the rules that match no layer, and why the model does
    not compute in the fp16 that it came in."""
    record = record_of(model)
    compute = compute_of(model)
    idle = list(record.without_effect) if record else []
    instead = []
    if compute:
        idle += compute.plan.without_effect
        instead = list(filter(None, [compute.plan.instead]))
    rules = list(dict.fromkeys(entry.setting for entry in idle if entry.unmatched))
    kernels = _missing_kernels_told(model)
    told = {UNMATCHED_KEY: rules, INSTEAD_KEY: instead, KERNELS_KEY: kernels}
    met = met_in(model.model)
    return badge(*model_words(model), *more, *met, _scales_word(model)) | _told_ui(told)


def _told_ui(told: dict[str, list[str]]) -> dict[str, list]:
    """Make the ui output of texts and of their messages; empty lists give none."""
    shown: dict[str, list] = {key: texts for key, texts in told.items() if texts}
    return {**shown, MESSAGES_KEY: [messages_in(shown)]} if shown else {}


def _missing_kernels_told(patcher: ModelPatcher) -> list[str]:
    """Return and log, once in a process, that the kernels of a model in int8 are missing."""
    missing = missing_kernels(current_device())
    if not missing or missing in _told or not {*WEIGHTS_FOR[INT8.compute]} & {*storages(patcher).values()}:
        return []
    _told.add(missing)
    logger.warning("Halfsafe: %s", missing)
    return [missing]


def model_words(model) -> tuple[str, str]:
    """Return the storages and the compute options of a model, as resolved on this device."""
    return _stored(model.model.diffusion_model.parameters()), _computed(model)


def _computed(model) -> str:
    """Name the compute options of a twentieth of the layers or more, the model's own and those of rules."""
    compute = compute_of(model)
    used = "fp8" if compute and compute.plan.fp8_matmul else compute_name(model)
    if not compute or not compute.plan.ruled:
        return used
    ruled = Counter(MODES[mode].compute for mode in compute.plan.ruled)
    own = Counter({used: sum(1 for _ in matrix_layers(model.model)) - ruled.total()})
    return " + ".join(_shown(own + ruled))


def control_ui(control) -> dict[str, list]:
    """Make the ui output of a ControlNet: its badge, nothing where no compute plan is attached."""
    planned = LoadedControl.of(control).planned
    if not planned:
        return {}
    kernels = _missing_kernels_told(planned.current_patcher)
    patcher = planned.current_patcher
    return badge(*model_words(patcher), _scales_word(patcher)) | _told_ui({KERNELS_KEY: kernels})


def encoder_ui(encoder: CLIP | VAE) -> dict[str, list]:
    """Make the ui output of a text encoder or VAE: its badge, with the storages of a text encoder,
    the dtype that a VAE works in."""
    is_vae = isinstance(encoder, VAE)
    word = name_of(encoder.vae_dtype) if is_vae else _stored(encoder.cond_stage_model.parameters())
    return badge(word, _scales_word(encoder.patcher))


def _scales_word(patcher: ModelPatcher) -> str | None:
    """Return the word for a model, text encoder or VAE whose file lacks the scales of its fp8 weights."""
    record = record_of(patcher)
    return WITHOUT_SCALES if record and WITHOUT_SCALES in record.dialects else None


def _stored(parameters: Iterable[torch.Tensor]) -> str:
    """Name the storages of a twentieth of the weights or more, 8 bit and less first: "fp8_e4m3fn + bf16"."""
    sizes = Counter()
    for parameter in parameters:
        sizes[storage_of(parameter)] += parameter.numel()
    return " + ".join(sorted(_shown(sizes), key=lambda name: name in UNQUANTIZED))


def _shown(sizes: Counter) -> list[str]:
    return [name for name, size in sizes.most_common() if size * SHOWN >= sizes.total()]


def report_json(patcher: ModelPatcher) -> tuple[str, dict]:
    """Return the report of a model as JSON text, and its messages."""
    report = report_of(patcher, encoder_reports()).to_json()
    return json.dumps(report, allow_nan=False), messages_in(report)


def with_live_report(patcher: ModelPatcher, node_id: str | None) -> tuple[ModelPatcher, dict[str, list]]:
    """Return a clone of the model that reports on its runs, and the node's ui output: the report as planned.

    The page knows the node's result by a token, which a cached result keeps.
    """
    clone, token = patcher.clone(), uuid.uuid4().hex

    put_stage(clone, REPORT, _LiveReport(node_id, token))
    report, messages = report_json(clone)
    return clone, {REPORT_KEY: [report], MESSAGES_KEY: [messages], TOKEN: [token]}


class _LiveReport(Stage):
    """Send the page a report after each run of a sampler. ``token``: how the page knows the result of the node."""

    def __init__(self, node_id: str | None, token: str):
        self.node_id = node_id
        self.token = token

    def around_sampling(self, executor, *args, **kwargs):
        """Run a sampler, then report; also on a run that was stopped."""
        try:
            return executor(*args, **kwargs)
        finally:
            report, messages = report_json(executor.class_obj.model_patcher)
            send(REPORT_EVENT, {"node_id": self.node_id, "token": self.token, "report": report}, messages)
