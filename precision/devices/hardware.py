"""Which device this is, by name, and which profile row it has."""

import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from ..base.message import Message
from .probes import cpu_bf16
from .profiles import OCP_FP8, PROFILES, DeviceProfile

# ComfyUI's should_use_fp16 has the same list: Turing chips without tensor cores whose fp16 results
# are wrong.
FAULTY_FP16 = (
    "GTX 16", "1660", "1650", "1630", "T500", "T550", "T600", "MX550", "MX450", "CMP 30HX", "T1000", "T1200", "T2000",
)  # fmt: skip
# Workstation and server cards run fp16 and fp32 accumulation at one rate (NVIDIA data sheets);
# GeForce halves fp32's.
FULL_RATE = re.compile(r"\b(Quadro|Tesla|TITAN RTX|T4|A2|A10G?|A16|A40|A\d[05]00|L4|L40S?|RTX PRO|Ada Generation)\b")
B300_INT8 = "B300 multiplies int8 at a fifteenth of its fp16 rate: 0.15 against 2.25 POPS (NVIDIA Blackwell brief)."

OLDER = "sm_{0}{1} is older than every device profile."
NEWER = "sm_{0}{1} is newer than every device profile."
FULL_RATE_SUMS = "Workstation and server cards add in fp32 at full rate: fp16 accumulation adds a risk and no speed."
NO_INT8: dict[str, Any] = {"int8_matmul": False, "int8_kernels": False}
DIRECTML = replace(
    PROFILES["cpu"], label="DirectML", type="privateuseone", fp16=True, fp8_storage=False, int8_matmul=False,
    notes={
        "bf16": "DirectML has no bf16 (microsoft/DirectML #688).",
        "match": "DirectML uses the CPU's profile with fp16, without fp8 and int8 matmul. Not tested on such a device. "
        "ComfyUI 0.46 removed DirectML.",
    },
)  # fmt: skip
"""What its list of types lacks (DML_TENSOR_DATA_TYPE) is off."""

GFX_ROWS = (
    ("gfx90a", "gfx90a"), ("gfx908", "gfx90a"), ("gfx94", "gfx942"), ("gfx95", "gfx950"),
    ("gfx117", "gfx1201"), ("gfx11", "gfx1100"), ("gfx12", "gfx1201"), ("gfx10", "gfx1030"), ("gfx9", "gfx1030"),
)  # fmt: skip


def device_module(device: torch.device) -> ModuleType | None:
    """Return torch's module of a kind of device, as ``torch.cuda`` is; None for one that has none,
    such as DirectML."""
    return getattr(torch, device.type, None)


def default_device() -> torch.device:
    """Return the first accelerator torch can use, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    xpu = getattr(torch, "xpu", None)
    if xpu and xpu.is_available():
        return torch.device("xpu", xpu.current_device())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def hardware_name(device: torch.device) -> str:
    """Return the name the driver gives, e.g. "NVIDIA GeForce RTX 3090"."""
    if device.type in ("cuda", "xpu"):
        return getattr(torch, device.type).get_device_name(device)
    if device.type == "mps":
        return _metal_name() or "Apple GPU"
    if device.type == "cpu":
        capabilities = getattr(torch.cpu, "get_capabilities", dict)()
        return capabilities.get("cpu_name") or platform.machine() or "CPU"
    return "DirectML device" if device.type == "privateuseone" else str(device)


def _metal_name() -> str:
    """Return the Metal device's name, e.g. "Apple M3 Pro"; "" where this torch cannot tell."""
    get_name = getattr(torch.backends.mps, "get_name", None)
    return get_name() if get_name else ""


def profile_of(device: torch.device) -> DeviceProfile:
    """Return the nearest row for a real device, adjusted and with a note where the row is not
    exact. Probes nothing."""
    if device.type == "cuda":
        if torch.version.hip:
            return _amd_row(torch.cuda.get_device_properties(device).gcnArchName.split(":")[0])
        return _nvidia_profile(device)
    if device.type == "mps":
        return _apple_profile(_metal_name())
    if device.type == "privateuseone":
        return DIRECTML
    if device.type == "cpu" and cpu_bf16():
        return _adapted(PROFILES["cpu"], {"bf16": "This CPU has bf16 instructions."}, bf16=True)
    unmatched = {
        "match": Message("torch device type '{0}' has no device profile; the safest one is used.", device.type)
    }
    return PROFILES.get(device.type) or _adapted(PROFILES["cpu"], unmatched)


def _adapted(profile: DeviceProfile, notes: Mapping[str, str], **changes) -> DeviceProfile:
    """Return a row with changed entries and more notes; ``match`` says how it was chosen."""
    return replace(profile, notes={**profile.notes, **notes}, **changes)


def _nvidia_profile(device: torch.device) -> DeviceProfile:
    capability = tuple(torch.cuda.get_device_capability(device))
    row, name = _nvidia_row(capability), torch.cuda.get_device_name(device)
    if capability == (10, 3):
        return _adapted(row, {"int8_matmul_gains": B300_INT8}, label="B300 (Blackwell Ultra)")
    if row.name == "sm_75" and any(chip in name for chip in FAULTY_FP16):
        wrong = Message("{0} gives wrong or NaN fp16 results, so nothing is computed in fp16.", name)
        notes = {"fp16": wrong, "fp16_accumulation": wrong}
        return _adapted(row, notes, label="GTX 16xx (Turing)", fp16=False, fp16_accumulation=False)
    if row.fp16_accumulation and FULL_RATE.search(name):
        return _adapted(row, {"fp16_accumulation": FULL_RATE_SUMS}, fp16_accumulation=False)
    return row


def _nvidia_row(capability: tuple[int, int]) -> DeviceProfile:
    """Return the highest row not above a compute capability: (8, 7) -> sm_86, (7, 2) -> sm_70, (10,
    3) -> sm_100."""
    names = (name.removeprefix("sm_") for name in PROFILES if name.startswith("sm_"))
    capabilities = sorted((int(digits[:-1]), int(digits[-1])) for digits in names)
    major, minor = max((row for row in capabilities if row <= capability), default=capabilities[0])
    row = PROFILES[f"sm_{major}{minor}"]
    if capability < (6, 0):
        return _adapted(row, {"match": Message(OLDER, *capability)})
    if capability[0] > capabilities[-1][0]:
        return _adapted(row, {"match": Message(NEWER, *capability)})
    return row


def _amd_row(arch: str) -> DeviceProfile:
    """Return the row for a gcnArchName such as gfx1103, gfx942 or gfx950."""
    row = next((row for prefix, row in GFX_ROWS if arch.startswith(prefix)), "")
    if row == "gfx1030":  # RDNA2 and older, and Vega
        notes: dict[str, str] = {
            "bf16": Message("{0} has no bf16; torch emulates it.", arch),
            "int8_matmul": Message("{0} has no int8 matrix units.", arch),
            "match": Message("{0} has no device profile; RDNA3's is used, without bf16.", arch),
        }
        return _adapted(PROFILES["gfx1100"], notes, label="RX 6000 and older", bf16=False, **NO_INT8)
    if row == "gfx950":
        notes = {
            "fp8_matmul": "fp8 matmul units for the OCP formats; needs ROCm 6.5 or later.",
            "match": Message("{0} has no device profile; MI300's is used, with e4m3fn and e5m2 instead of fnuz.", arch),
        }
        return _adapted(PROFILES["gfx942"], notes, label="MI350 (CDNA4)", fp8_matmul=True, fp8_formats=OCP_FP8)
    nearest = {"match": Message("{0} has no device profile; the nearest safe one is used.", arch)}
    return PROFILES.get(row) or _adapted(PROFILES["gfx1100"], nearest)


def _apple_profile(name: str) -> DeviceProfile:
    generation = re.search(r"\bM(\d+)\b", name)
    if not generation:
        note = "torch does not report the chip's generation; the oldest profile is used."
        return _adapted(PROFILES["mps_m1"], {"match": note})
    return PROFILES["mps_m3" if int(generation[1]) >= 3 else "mps_m1"]
