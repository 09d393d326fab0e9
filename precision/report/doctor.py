"""What this machine is and what ``auto`` would do on it, for ``python -m halfsafe doctor`` and the
device node."""

import platform
from collections.abc import Sequence
from dataclasses import asdict

import torch

from ..base.flags import SETTINGS, is_on
from ..base.message import Message, joined
from ..base.text import on_off, paragraph, table, wrapped
from ..devices.detect import Device, detect
from ..devices.measurements import Measurement, gains_in, told, told_here
from ..devices.profiles import CAPABILITIES, GAINS
from ..formats.families import FAMILIES
from ..plan.auto import auto_compute, smallest_storage, why_int8_is_slow
from .result import COMPUTES_IN, FAST, NOT_FASTER, Result
from .schema import device_section

# What people call it -> its family, and the dtype its files usually have.
TYPICAL_MODELS = {
    "Wan 2.1, 2.2": ("Wan", "bf16"),
    "SDXL": ("SDXL", "fp16"),
    "Z-Image, Qwen-Image": ("Qwen-Image", "bf16"),
    "Flux": ("Flux", "bf16"),
}
YES_NO = {True: "yes", False: "no"}
NOT_PROBED = "Simulated profile: its expected values are used, and nothing was probed."


def diagnose(device: torch.device | Device | None = None, profile: str = "") -> dict:
    """Collect the facts of a machine that decide precision: capabilities with reasons, the choices
    of ``auto``, torch and its flags. JSON-safe; changes nothing.

    Args:
        device: the device to look at, or one detected already; the default accelerator, else the
            CPU, when None.
        profile: the device profile to describe instead, without what this machine runs.

    Raises:
        UnknownProfile: ``profile`` or ``HALFSAFE_DEVICE_PROFILE`` names no profile.

    Example:
        >>> from halfsafe.precision.report.doctor import diagnose
        >>> diagnose()["device"]["label"]  # doctest: +SKIP
        'RTX 40xx, L4, L40 (Ada)'
    """
    if profile:
        return _description(detect(profile=profile))
    found = device if isinstance(device, Device) else detect(device)
    return {
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "runtime": {"cuda": torch.version.cuda, "hip": torch.version.hip},
        **_description(found),
        "flags": {name: is_on(name) for name in SETTINGS},
    }


def _description(device: Device) -> dict:
    row = device.profile
    # What ``auto`` takes where 16-bit weights do not fit.
    no_room = ("as_file", "There is no separate GPU memory to fit weights into.")
    storage, reason = no_room if row.type in ("cpu", "mps") else smallest_storage(device)
    return {
        "device": {**device_section(device), "vendor": row.vendor, "type": row.type},
        "capabilities": {
            name: {"value": device.capabilities[name], "table": row.expects(name), "reason": device.reason(name)}
            for name in CAPABILITIES
        },
        "fp8": {"formats": list(row.fp8_formats)},
        "int8": {"slow": why_int8_is_slow(device)},
        "remarks": row.remarks,
        "probes": [asdict(probe) for probe in device.probes],
        "auto": [_auto(device, model) for model in TYPICAL_MODELS],
        "too_large": {"storage": storage, "reason": reason},
    }


def _auto(device: Device, model: str) -> dict:
    family, file_dtype = TYPICAL_MODELS[model]
    supported = next(one.supported for one in FAMILIES if one.name == family)
    compute, reason = auto_compute(device, supported, file_dtype)
    return {"model": model, "file": file_dtype, "compute": compute, "reason": reason}


def _text(diagnosis: dict) -> str:
    """Format the result of ``diagnose`` as plain text, 80 columns."""
    capabilities = [
        (f"  {name}", YES_NO[entry["value"]], YES_NO[entry["table"]], entry["reason"])
        for name, entry in diagnosis["capabilities"].items()
    ]
    autos = [(f"  {entry['model']}", entry["compute"], entry["reason"]) for entry in diagnosis["auto"]]
    stored = [(f"  {diagnosis['too_large']['storage']}", diagnosis["too_large"]["reason"])]
    flags = [(f"  {name}", on_off(value)) for name, value in diagnosis.get("flags", {}).items()]
    sections = [
        _machine(diagnosis) if "torch" in diagnosis else "",
        _device(diagnosis),
        table(capabilities, ("Capability", "here", "table", "")),
        _probes(diagnosis["probes"]),
        "Compute dtype that auto chooses\n" + table(autos),
        "Storage that auto chooses if 16 bit does not fit the GPU\n" + table(stored),
        "Backend flags\n" + table(flags) if flags else "",
        _comfyui(diagnosis.get("comfyui", [])),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def _comfyui(facts: list[dict]) -> str:
    switches = [f" To change it: {fact['switch']}." if fact["switch"] else "" for fact in facts]
    lines = [f"{fact['what']}: {fact['here']}.{switch}" for fact, switch in zip(facts, switches, strict=True)]
    return "\n".join(["What ComfyUI does here", *paragraph(lines, "  ")]) if facts else ""


def diagnosis_result(diagnosis: dict, here: Sequence[Sequence[Measurement]] = ()) -> Result:
    """Sum up the result of ``diagnose`` in a sentence, and write it as plain text of 80 columns.

    ``here``: the measurements of each model on this machine. If there are any, they are shown
    instead of published ones.
    """
    names = {"fp16": "fp16", "bf16": "bf16", "int8_matmul_gains": "int8", "fp8_matmul_gains": "fp8"}
    gains = gains_in(row for rows in here for row in rows)
    fast = [name for key, name in names.items() if gains.get(name, diagnosis["capabilities"][key]["value"])]
    used = joined(dict.fromkeys(entry["compute"] for entry in diagnosis["auto"]), " or ")
    profile = diagnosis["device"]["profile"]
    computes = Message(COMPUTES_IN, device=diagnosis["device"]["label"], compute=used)
    capabilities = diagnosis["capabilities"].items()
    figures = list(map(told_here, here)) or [
        entry["reason"] for name, entry in capabilities if name in GAINS and told(profile, GAINS[name])
    ]
    measured = [Message(FAST, fast=", ".join(fast)), *figures] if figures else [NOT_FASTER]
    speed = "" if here else told(profile, GAINS["int8_matmul_gains"], brief=True)
    return Result(joined([computes, *measured]), text=_text(diagnosis), speed=speed)


def _machine(diagnosis: dict) -> str:
    runtime = ", ".join(f"{name} {version}" for name, version in diagnosis["runtime"].items() if version) or "CPU only"
    lines = wrapped(f"torch {diagnosis['torch']} ({runtime}), python {diagnosis['python']}, {diagnosis['system']}", "")
    return "\n".join(lines)


def _device(diagnosis: dict) -> str:
    device, fp8, slow = diagnosis["device"], diagnosis["fp8"], diagnosis["int8"]["slow"]
    where = "simulated on" if device["simulated"] else "on"
    remarks = [f"fp8 matmul: {', '.join(fp8['formats'])}"] if fp8["formats"] else []
    remarks += [f"int8 models are not known to be faster here: {slow}"] if slow else []
    lines = wrapped(f"Profile {device['profile']}: {device['label']}, {where} {device['name']}", "")
    return "\n".join([*lines, *(line for text in (*remarks, *diagnosis["remarks"]) for line in wrapped(text, "  "))])


def _probes(probes: list[dict]) -> str:
    outcome = {None: "no answer", True: "passed", False: "failed"}
    rows = [(f"  {entry['name']}", outcome[entry["ok"]], entry["detail"]) for entry in probes]
    return "Probes, run on the device\n" + table(rows) if rows else NOT_PROBED
