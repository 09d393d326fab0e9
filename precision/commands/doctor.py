"""What this machine is and what ``auto`` would do on it, for ``python -m halfsafe doctor`` and the device node."""

import os
import platform

import torch

from ..arithmetic.flags import read_flags
from ..devices.detect import PROFILE_VARIABLE, Device, detect
from ..devices.hardware import hardware_name
from ..devices.probes import fp8_cast, probe
from ..devices.profiles import CAPABILITIES
from ..formats.families import family_named
from ..plan.auto import auto_compute, smallest_storage, why_int8_is_slow
from ..report.result import DEVICE, DEVICE_PLAIN, Result
from ..report.schema import device_section
from ..text import hanging, on_off, wrapped

# What people call it -> its family, and the dtype its files usually have.
TYPICAL_MODELS = {
    "Wan 2.1, 2.2": ("Wan", "bf16"),
    "SDXL": ("SD or SDXL", "fp16"),
    "Z-Image, Qwen-Image": ("Qwen-Image", "bf16"),
    "Flux": ("Flux", "bf16"),
}
NOT_PROBED = "Simulated profile: the table decides, nothing was probed."


def diagnose(device: torch.device | Device | None = None) -> dict:
    """Collect everything about this machine that decides precision. JSON-safe; changes nothing.

    Args:
        device: the device to look at, or one detected already; the default accelerator, else the CPU, when None.

    Raises:
        UnknownProfile: ``HALFSAFE_DEVICE_PROFILE`` names no profile.
    """
    found = device if isinstance(device, Device) else detect(device)
    flags = {flag.name: {"value": flag.value, "detail": flag.detail} for flag in read_flags().values()}
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "runtime": {"cuda": torch.version.cuda, "hip": torch.version.hip},
        "environment": {PROFILE_VARIABLE: os.environ.get(PROFILE_VARIABLE, "")},
        "devices": _devices(),
        **_description(found),
        "flags": flags,
        "fp8_cast": probe("fp8_cast", fp8_cast, torch.device("cpu"), "fp8_e4m3fn").detail,
    }


def describe(profile: str | None = None) -> dict:
    """Describe one profile, or this device when None: its capabilities with reasons,
    and what ``auto`` chooses. JSON-safe.

    Raises:
        UnknownProfile: no such profile.
    """
    return _description(detect(profile=profile))


def _description(device: Device) -> dict:
    row = device.profile
    return {
        "device": {**device_section(device), "vendor": row.vendor, "type": row.type},
        "capabilities": {name: _capability(device, name) for name in CAPABILITIES},
        "fp8": {"formats": list(row.fp8_formats), "scaling": list(row.scaling)},
        "int8": {"slow": why_int8_is_slow(device)},
        "remarks": row.remarks,
        "probes": [{"name": probe.name, "ok": probe.ok, "detail": probe.detail} for probe in device.probes],
        "auto": [_auto(device, model) for model in TYPICAL_MODELS],
        "too_large": _too_large(device),
    }


def _capability(device: Device, name: str) -> dict:
    return {"value": device.capabilities[name], "table": device.profile.table(name), "reason": device.reason(name)}


def _auto(device: Device, model: str) -> dict:
    family, file_dtype = TYPICAL_MODELS[model]
    compute, reason = auto_compute(device, family_named(family).supported, file_dtype)
    return {"model": model, "file": file_dtype, "compute": compute, "reason": reason}


def _too_large(device: Device) -> dict:
    """Say what storage ``auto`` takes where 16-bit weights do not fit."""
    if device.profile.type in ("cpu", "mps"):
        return {"storage": "as_file", "reason": "There is no separate GPU memory to fit weights into."}
    storage, reason = smallest_storage(device)
    return {"storage": storage, "reason": reason}


def _devices() -> list[dict]:
    kinds = {"cuda": torch.cuda, "xpu": getattr(torch, "xpu", None)}
    found = [
        torch.device(kind, index)
        for kind, module in kinds.items()
        if module and module.is_available()
        for index in range(module.device_count())
    ]
    found += [torch.device("mps")] if torch.backends.mps.is_available() else []
    found.append(torch.device("cpu"))
    return [{"device": str(device), "name": hardware_name(device)} for device in found]


def to_text(diagnosis: dict) -> str:
    """Format the result of ``diagnose`` or ``describe`` as plain text, 80 columns."""
    sections = (
        _machine(diagnosis), _device(diagnosis), _capabilities(diagnosis), _probes(diagnosis), _autos(diagnosis),
        _flags(diagnosis),
    )  # fmt: skip
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def result_of(diagnosis: dict) -> Result:
    """Sum up the result of ``diagnose`` or ``describe`` in a sentence."""
    names = {"fp16": "fp16", "bf16": "bf16", "int8_matmul_gains": "int8", "fp8_matmul_gains": "fp8"}
    fast = [name for key, name in names.items() if diagnosis["capabilities"][key]["value"]]
    used = ", ".join(dict.fromkeys(entry["compute"] for entry in diagnosis["auto"]))
    values = {"device": diagnosis["device"]["label"], "compute": used, "fast": ", ".join(fast)}
    gains = {"int8", "fp8"} & {*fast}
    return Result(DEVICE if gains else DEVICE_PLAIN, values, text=to_text(diagnosis))


def core_text(core: dict) -> str:
    """Format what a ComfyUI has of the names that Halfsafe uses as plain text, 80 columns."""
    known = len(core["used"]) - len(core["missing"]) - len(core["unread"])
    found = f"ComfyUI {core['version'] or 'of unknown version'} in {core['folder']}: "
    lines = wrapped(f"{found}{known} of {len(core['used'])} names found", "")
    remarks = [f"{entry['name']}: {entry['why']}" for entry in core["missing"]]
    remarks += [f"{name}: not checked, its file is not there" for name in core["unread"]]
    remarks += [f"{name}: not in this version: {effect}" for name, effect in core["absent"].items()]
    lines += [line for text in (*remarks, *core["used"]) for line in wrapped(text, "  ")]
    return "\n" + "\n".join(lines) + "\n"


def _machine(diagnosis: dict) -> list[str]:
    if "torch" not in diagnosis:
        return []
    runtime = ", ".join(f"{name} {version}" for name, version in diagnosis["runtime"].items() if version) or "CPU only"
    lines = wrapped(f"torch {diagnosis['torch']} ({runtime}), python {diagnosis['python']}, {diagnosis['system']}", "")
    lines += wrapped(f"torch's own fp8 cast: {diagnosis['fp8_cast']}", "")
    lines += [f"{name}={value}" for name, value in diagnosis["environment"].items() if value]
    return lines + [f"{entry['device']}: {entry['name']}" for entry in diagnosis["devices"]]


def _device(diagnosis: dict) -> list[str]:
    device = diagnosis["device"]
    simulated = f", simulated on {device['name']}" if device["simulated"] else f" on {device['name']}"
    lines = wrapped(f"Profile {device['profile']}: {device['label']}{simulated}", "")
    if diagnosis["fp8"]["formats"]:
        fp8 = diagnosis["fp8"]
        lines += wrapped(f"fp8 matmul: {', '.join(fp8['formats'])}; scales per {', '.join(fp8['scaling'])}", "  ")
    slow = diagnosis["int8"]["slow"]
    remarks = ([f"int8 models gain no speed here: {slow}"] if slow else []) + diagnosis["remarks"]
    return lines + [line for remark in remarks for line in wrapped(remark, "  ")]


def _capabilities(diagnosis: dict) -> list[str]:
    lines = [f"{'Capability':<26}{'here':<8}{'table':<8}"]
    for name, entry in diagnosis["capabilities"].items():
        states = f"{_yes(entry['value']):<8}{_yes(entry['table']):<8}"
        lines += hanging(f"  {name:<24}{states}", entry["reason"])
    return [line.rstrip() for line in lines]


def _probes(diagnosis: dict) -> list[str]:
    if not diagnosis["probes"]:
        return [NOT_PROBED]
    lines = ["Probes, run on the device"]
    for entry in diagnosis["probes"]:
        lines += hanging(f"  {entry['name']:<24}{_passed(entry['ok']):<16}", entry["detail"])
    return lines


def _autos(diagnosis: dict) -> list[str]:
    lines = ["Compute dtype auto chooses"]
    for entry in diagnosis["auto"]:
        lines += hanging(f"  {entry['model']:<24}{entry['compute']:<16}", entry["reason"])
    found = diagnosis["too_large"]
    lines.append("Storage auto chooses where 16 bit does not fit the GPU")
    return lines + hanging(f"  {found['storage']:<38}", found["reason"])


def _flags(diagnosis: dict) -> list[str]:
    flags = diagnosis.get("flags", {})
    return (["Backend flags"] if flags else []) + [line for flag in flags.items() for line in _flag(*flag)]


def _flag(name: str, entry: dict) -> list[str]:
    if entry["value"] is None:
        return wrapped(f"{name}: {entry['detail']}", "  ")
    return hanging(f"  {on_off(entry['value']):<4}", entry["detail"])


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _passed(ok: bool | None) -> str:
    return "no answer" if ok is None else "passed" if ok else "failed"
