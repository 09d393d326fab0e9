"""Resolve the accumulation settings for a model on a device: flags to set, and settings without
effect."""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

import torch

from ..base import flags
from ..base.message import Message, ended
from ..base.modes import FP8, FP32, Mode, modes_named
from ..devices.detect import Device
from .choice import WithoutEffect, frozen

Fp16Option = Literal["auto", "on", "off", "unchanged"]
SwitchOption = Literal["on", "off", "unchanged"]
AttentionOption = Literal["auto", "fp32", "unchanged"]
UNCHANGED: Final = "unchanged"
PARTS = {
    "fp16_accumulation": ("fp16_accumulation",),
    "reduced_precision_reduction": ("fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"),
    "tf32": ("tf32_matmul", "tf32_convolution"),
    "fp8_fast_accumulation": (),
}
NO_NODE = "No accumulation node is attached."
EXACT_SUMS = "int8 products are accumulated exactly, in int32"
FP32_RESULTS = "products of fp16_safe return fp32, which fp16 sums cannot produce"
NO_SWITCH = "under torch.compile or on several devices it cannot be switched per layer"


@dataclass(frozen=True)
class Request:
    """The settings that the node requests."""

    fp16_accumulation: Fp16Option = UNCHANGED
    reduced_precision_reduction: SwitchOption = UNCHANGED
    tf32: SwitchOption = UNCHANGED
    fp8_fast_accumulation: Fp16Option = UNCHANGED
    attention: AttentionOption = UNCHANGED

    def over(self, earlier: "Request") -> "Request":
        """Return the request, with unchanged settings from an earlier node's request."""
        return replace(earlier, **{k: v for k, v in vars(self).items() if v != UNCHANGED})

    def plan(self, device: Device, matmuls: "MatmulProfile") -> "AccumulationPlan":
        """Resolve the request for a model on a device. Nothing is raised for a setting that cannot act:
        it is listed, and no flag is turned on for it. Off holds even so: a layer may run in another
        dtype in a later call than it does now."""
        asked = {setting: value for setting in PARTS if (value := getattr(self, setting)) != UNCHANGED}
        problems = {setting: _problem(setting, value, device, matmuls) for setting, value in asked.items()}
        acting = {(setting, value) for setting, value in asked.items() if not problems[setting]}
        held: dict[str, bool] = {}
        idle: list[WithoutEffect] = []
        for setting, value in asked.items():
            if (setting, value) in acting or value != "on":
                held |= dict.fromkeys(PARTS[setting], value == "on")
            reasons = dict.fromkeys((problems[setting], *map(_missing, PARTS[setting])))
            idle += [WithoutEffect(f"{setting}={value}", why) for why in reasons if why]
        in_fp16 = any(mode.operand == torch.float16 for mode in modes_named(matmuls.modes))
        if self.attention != UNCHANGED and not in_fp16:
            modes = _listed(matmuls.modes)
            why = Message("no attention runs in fp16: layers compute in {0}, whose scores cannot overflow", modes)
            idle.append(WithoutEffect(f"attention={self.attention}", why))
        return AccumulationPlan(
            request=self,
            flags=frozen(held),
            trying=("fp16_accumulation", "auto") in acting,
            fp8_fast=("fp8_fast_accumulation", "on") in acting,
            attention=self.attention if in_fp16 else UNCHANGED,
            reasons=frozen({name: _reason(name, asked.get(name), problems.get(name), device) for name in PARTS}),
            without_effect=tuple(idle),
        )


@dataclass(frozen=True)
class MatmulProfile:
    """The modes of a model's layers; ``parallel``: several devices run the model concurrently."""

    modes: Collection[str]
    compiled: bool = False
    parallel: bool = False

    @property
    def whole(self) -> bool:
        """True if all layers share the flags: a graph cannot switch them, nor can concurrent
        threads."""
        return self.compiled or self.parallel

    def why_no_fp16_sums(self, device: Device) -> str | None:
        """Return why fp16 accumulation cannot act on these layers on a device; None if it can."""
        if problem := _missing("fp16_accumulation") or _needs_nvidia(device, 70):
            return problem
        modes = modes_named(self.modes)
        wide = any(mode.is_wide for mode in modes)
        if any(mode.operand == mode.result == torch.float16 for mode in modes):  # what cuBLAS can accumulate in fp16
            return Message("{0}, and {1}", FP32_RESULTS, NO_SWITCH) if wide and self.whole else None
        if wide:
            return FP32_RESULTS
        return Message("it affects fp16 products only, and these layers multiply in {0}", _listed(self.modes))


@dataclass(frozen=True)
class AccumulationPlan:
    """A request resolved.

    Args:
        flags: settings of ``flags.SETTINGS`` to hold while the model runs.
        trying: fp16 sums in each layer until they overflow there.
    """

    request: Request
    flags: Mapping[str, bool] = field(default_factory=dict)
    trying: bool = False
    fp8_fast: bool = False
    attention: AttentionOption = UNCHANGED
    reasons: Mapping[str, str] = field(default_factory=dict)
    without_effect: tuple[WithoutEffect, ...] = ()


def _problem(setting: str, value: str, device: Device, matmuls: MatmulProfile) -> str | None:
    """Return why a setting has no effect; None if it has one. On and off are obeyed even if they
    gain no speed."""
    if setting == "fp16_accumulation":
        problem = matmuls.why_no_fp16_sums(device)
        if problem or value != "auto" or (device.capabilities[setting] and not matmuls.whole):
            return problem
        return NO_SWITCH if device.capabilities[setting] else device.reason(setting)
    if setting == "fp8_fast_accumulation":
        if not device.capabilities[setting]:
            return device.reason(setting)
        if matmuls.compiled:
            return "under torch.compile ComfyUI's own fp8 matmul runs, which this setting does not reach"
        return _without_layer(FP8, matmuls)
    if problem := _needs_nvidia(device, 80 if setting == "tf32" else 0):
        return problem
    if setting == "tf32":
        return _without_layer(FP32, matmuls)
    if any(mode.is_16bit for mode in modes_named(matmuls.modes)):
        return None
    return Message("it affects 16-bit products only, and these layers multiply in {0}", _listed(matmuls.modes))


def _reason(setting: str, asked: str | None, problem: str | None, device: Device) -> str:
    if asked is None:
        return "Not changed."
    if problem:
        return Message("No effect here: {0}", ended(problem))
    if asked == "auto":
        return "fp16 sums in each layer, and fp32 sums in layers where fp16 sums overflow."
    more = ""
    if setting == "fp16_accumulation" and asked == "on" and not device.capabilities[setting]:
        more = device.reason(setting)
    elif setting == "reduced_precision_reduction" and asked == "off":
        more = "Sums may still be split over K: their parts are added in fp32."
    return Message("Switched {0} while this model runs. {1}", asked, more)


def _without_layer(mode: Mode, matmuls: MatmulProfile) -> str | None:
    layers = Message("no layer multiplies in {0}; layers multiply in {1}", mode.name, _listed(matmuls.modes))
    return None if mode.name in matmuls.modes else layers


def _needs_nvidia(device: Device, first: int) -> str | None:
    if device.profile.vendor != "nvidia":
        return Message("it affects NVIDIA's libraries only; this is {0}", device.label)
    number = re.fullmatch(r"sm_(\d+)", device.profile.name)
    return Message("{0} does not support it", device.label) if number and int(number[1]) < first else None


def _missing(name: str) -> str | None:
    if flags.state_of(name) is not None:
        return None
    since = " (it came with 2.7)" if name == "fp16_accumulation" else ""
    return Message("torch {0} has no {1} flag{2}", torch.__version__, name.replace("_", " "), since)


def _listed(modes: Collection[str]) -> str:
    return ", ".join(sorted(modes)) or "nothing"


def flag_report(setting: str, requested: str = UNCHANGED, reason: str = NO_NODE, in_scope: bool | None = None) -> dict:
    """Return the report's entry for an accumulation setting, from torch's present flags.

    ``in_scope``: its state while the model runs; None if that is its state outside. States in the
    entry are true when any part of the setting is on, null when torch has no such flag.
    """
    parts = {name: flags.outside(name) for name in PARTS[setting]}
    told = [on for on in parts.values() if on is not None]
    value = any(told) if told or not parts else None
    inside = value if in_scope is None or value is None else in_scope
    return {"requested": requested, "in_scope": inside, "outside": value, "reason": _with_parts(reason, parts)}


def _with_parts(reason: str, parts: dict[str, bool | None]) -> str:
    if not parts:
        return Message("{0} It is not a torch flag but an argument of each fp8 matmul, off by default.", reason)
    missing = Message("; torch {0} has no such flag", torch.__version__) if None in parts.values() else ""
    if len(parts) == 1 and not missing:
        return reason
    words = {None: "not known", True: "on", False: "off"}
    states = [f"{part.removeprefix('tf32_').split('_')[0]} {words[on]}" for part, on in parts.items()]
    return Message("{0} Outside: {1}{2}.", reason, ", ".join(states), missing)
