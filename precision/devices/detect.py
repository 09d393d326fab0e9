"""Which device this is, what it can do, and the compute and storage dtypes that follow from it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from ..dtypes import DTYPES
from ..errors import UnknownProfile
from ..formats.registry import FORMAT_OF_STORAGE, fp8_dtypes
from ..text import size_text
from .hardware import default_device, hardware_name, indexed, profile_of
from .names import code_of
from .probes import Probe, run_probes, why_not_held
from .profiles import CAPABILITIES, OCP_FP8, PROFILE_NAMES, DeviceProfile, profile_named

__all__ = [
    "CAPABILITIES", "PROFILE_NAMES", "PROFILE_VARIABLE", "Device", "DeviceProfile", "auto_compute", "auto_storage",
    "detect", "fastest_compute", "profile_named", "profile_of", "smallest_storage", "unheld_storages",
    "why_int8_is_slow", "why_low_bits_are_slow", "why_no_bf16", "why_no_fp8",
]  # fmt: skip

PROFILE_VARIABLE = "HALFSAFE_DEVICE_PROFILE"
GIB = 1024**3
ACTIVATION_ROOM = 2 * GIB
UNQUANTIZED = ("fp16", "bf16", "fp32", "fp64")
INT8_COMPUTE = ("auto", "int8")
"""Compute options under which weights held in int8 multiply in int8."""

CONFIRMED_BY = {
    "fp16": ("fp16_gemm",),
    "bf16": ("bf16_native", "bf16_gemm"),
    "fp8_storage": ("fp8_cast",),
    "fp8_matmul": ("fp8_cast", "fp8_matmul"),
    "fp8_matmul_gains": ("fp8_cast", "fp8_matmul"),
    "fp16_accumulation": ("fp16_gemm", "fp16_accumulation"),
    "fp8_fast_accumulation": ("fp8_cast", "fp8_matmul"),
    "int8_matmul": ("int8_matmul",),
    "int8_matmul_gains": ("int8_matmul", "int8_kernels"),
}


@dataclass(frozen=True)
class Device:
    """A real device and the profile every decision follows.

    Args:
        torch_device: where tensors live.
        name: the hardware's own name, also when another profile is simulated.
        profile: the row decisions follow.
        simulated: the profile was asked for; nothing was probed.
        probes: what was executed on it.
        capabilities: capability -> table and probes together.
        reasons: capability -> one sentence.
    """

    torch_device: torch.device
    name: str
    profile: DeviceProfile
    simulated: bool = False
    probes: tuple[Probe, ...] = ()
    capabilities: Mapping[str, bool] = field(default_factory=dict, compare=False)
    reasons: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def label(self) -> str:
        """What a person calls this kind of device."""
        return self.profile.label

    def reason(self, capability: str) -> str:
        """Say why a capability is on or off."""
        return self.reasons[capability]

    def without(self, capability: str, reason: str) -> "Device":
        """Return the same device with a capability off, for a reason that the table and the probes cannot know."""
        capabilities = {**self.capabilities, capability: False}
        return replace(self, capabilities=capabilities, reasons={**self.reasons, capability: reason})


def detect(device: torch.device | None = None, profile: str | None = None) -> Device:
    """Detect a device, its profile and its probed capabilities.

    Args:
        device: the device to describe; the default accelerator, else the CPU, when None.
        profile: decide as on this profile; when None, ``HALFSAFE_DEVICE_PROFILE`` if it is set.

    Raises:
        UnknownProfile: no such profile; names the environment variable when it came from there.
    """
    device = indexed(device or default_device())
    requested = profile_named(profile) if profile else requested_profile()
    if requested:
        return _assemble(device, requested, (), simulated=True)
    row = profile_of(device)
    return _assemble(device, row, run_probes(device, row.fp8_formats[0] if row.fp8_formats else OCP_FP8[0]))


def requested_profile() -> DeviceProfile | None:
    """Read the profile that ``HALFSAFE_DEVICE_PROFILE`` asks for; None when it is not set."""
    name = os.environ.get(PROFILE_VARIABLE, "").strip()
    if not name:
        return None
    try:
        return profile_named(code_of(name))
    except UnknownProfile as error:
        raise UnknownProfile(f"{PROFILE_VARIABLE}={name}: {error.problem}", error.advice) from None


def _assemble(
    device: torch.device, profile: DeviceProfile, probes: tuple[Probe, ...], simulated: bool = False
) -> Device:
    verdicts = {capability: _verdict(profile, probes, capability) for capability in CAPABILITIES}
    capabilities = {capability: on for capability, (on, _) in verdicts.items()}
    reasons = {capability: reason for capability, (_, reason) in verdicts.items()}
    return Device(device, hardware_name(device), profile, simulated, probes, capabilities, reasons)


def _verdict(profile: DeviceProfile, probes: tuple[Probe, ...], capability: str) -> tuple[bool, str]:
    if not profile.capabilities[capability]:
        return False, profile.reason(capability)
    failed = [probe for probe in probes if probe.ok is False and probe.name in CONFIRMED_BY[capability]]
    if failed:
        return False, f"Expected here, but the probe {failed[0].name} failed: {failed[0].detail.rstrip('.')}."
    return True, profile.reason(capability)


def auto_compute(device: Device, supported: Sequence[str], file_dtype: str) -> tuple[str, str]:
    """Choose the compute option that ``auto`` stands for, and say why.

    Nothing that can overflow stands for ``auto``: a LoRA or a finetune can take any model out of fp16's range, and a
    black picture costs the whole run. In the place of fp16 comes ``fp16_safe`` where its cost is estimated, on NVIDIA,
    also where it costs most: SDXL on an H100 or a B200, which are bound by launches, 12 and 7 ms a call. Elsewhere
    comes bf16 where the device multiplies it natively, at the rate of fp16, and the model takes it; else ``fp16_safe``.
    Whoever asks for fp16 gets it.

    Args:
        device: where the model will run.
        supported: the model's own safe compute dtypes in its order of preference, e.g. ("bf16", "fp32").
        file_dtype: storage name of most of the file's weights.

    Returns:
        One of fp16_safe, bf16, fp32, and a sentence or two.
    """
    chosen, reason = fastest_compute(device, supported, file_dtype)
    if chosen != "fp16":
        return chosen, reason
    cost = device.profile.fp16_safe_cost
    if cost:
        return "fp16_safe", f"{reason} fp16_safe cannot overflow and takes {cost} longer by estimate."
    if "bf16" in supported and device.capabilities["bf16"]:
        return "bf16", f"{reason} bf16 is native too and has the range of fp32. What fp16_safe costs here is not known."
    return "fp16_safe", f"{reason} fp16_safe cannot overflow; what it costs here is not known."


def fastest_compute(device: Device, supported: Sequence[str], file_dtype: str) -> tuple[str, str]:
    """Choose the compute option of a model whose activations stay in the range that ComfyUI lists it for, and say why.

    Arguments and result as of :func:`auto_compute`.
    """
    usable = [option for option in supported if option == "fp32" or device.capabilities.get(option)]
    if file_dtype == "fp16" and "fp16" in usable:
        return "fp16", f"The file is fp16, ComfyUI lists fp16 for this model, and it is fast on {device.label}."
    if usable and usable[0] != "fp32":
        return usable[0], _low_precision_reason(device, usable[0])
    why = _why_not(device, supported)
    if _needs_fp16_safe(device, supported):
        return "fp16_safe", f"{why} fp16 matmuls with an fp32 stream are fast here and cannot overflow."
    return "fp32", f"{why} fp32 is what remains."


def _needs_fp16_safe(device: Device, supported: Sequence[str]) -> bool:
    half_model = "bf16" in supported and "fp16" not in supported
    return half_model and device.capabilities["fp16"] and not device.capabilities["bf16"]


def _low_precision_reason(device: Device, option: str) -> str:
    if option == "fp16":
        return f"ComfyUI lists fp16 for this model and it is fast on {device.label}."
    return f"ComfyUI lists bf16 for this model and it is native on {device.label}."


def _why_not(device: Device, supported: Sequence[str]) -> str:
    reasons = [device.reason(option) for option in ("bf16", "fp16") if option in supported]
    unsafe = [option for option in ("bf16", "fp16") if option not in supported]
    if unsafe:
        reasons.append(f"The model is not safe in plain {' or '.join(unsafe)}.")
    return " ".join(reasons)


def auto_storage(
    device: Device,
    weight_bytes_16bit: int,
    file_dtype: str,
    free_device_bytes: int | None,
    compute: str = "auto",
    streamed_from: int | None = None,
) -> tuple[str, str]:
    """Choose the storage option that ``auto`` stands for, and say why.

    Args:
        device: where the weights will be.
        weight_bytes_16bit: size of the weights at 16 bit per value.
        file_dtype: storage name of most of the file's weights; anything but fp16, bf16, fp32, fp64 counts as quantized.
        free_device_bytes: free memory of the device, or None when unknown.
        compute: the compute option asked for: int8 gains nothing where its weights are unpacked.
        streamed_from: free memory of the host, where weights that do not fit are streamed from it at each step, as
            under ComfyUI's dynamic VRAM; None where they are not.

    Returns:
        One of as_file, int8, fp8_e4m3fn, fp16, bf16, and a sentence.
    """
    if file_dtype not in UNQUANTIZED:
        return _quantized_storage(device, file_dtype)
    if free_device_bytes is None:
        return "as_file", f"Kept as in the file: {_unknown_memory(device)}"
    as_file_bytes = weight_bytes_16bit * {"fp32": 2, "fp64": 4}.get(file_dtype, 1)
    room = free_device_bytes - ACTIVATION_ROOM
    if as_file_bytes <= room:
        return "as_file", f"The file's {size_text(as_file_bytes)} fit in {size_text(free_device_bytes)} free."
    if weight_bytes_16bit <= room:
        return _half(device), f"{_shortage(file_dtype, as_file_bytes, free_device_bytes)} 16 bit does."
    storage, reason = _too_large(device, weight_bytes_16bit, free_device_bytes, compute)
    if streamed_from is None or storage == "as_file":
        return storage, reason
    rest = as_file_bytes - room
    if rest > streamed_from:
        slow = f"It would be read from the disk at each step: {size_text(streamed_from)} of the host's memory are free."
        return storage, f"{reason} ComfyUI's dynamic VRAM could stream the rest, {size_text(rest)}. {slow}"
    kept = "as_file" if as_file_bytes == weight_bytes_16bit else _half(device)
    streams = f"ComfyUI's dynamic VRAM streams the rest, {size_text(rest)}, at each step, so that nothing is quantized."
    halves = f"storage={storage} halves the weights to {size_text(weight_bytes_16bit // 2)}."
    return kept, f"{_shortage('16 bit', weight_bytes_16bit, free_device_bytes)} {streams} {halves}"


def smallest_storage(device: Device, compute: str = "auto") -> tuple[str, str]:
    """Choose the 8-bit storage for a model, or as_file where there is none, and say why in a sentence.

    int8 and fp8 take the same bytes. int8 has a third of fp8's error, but its weights are dear to unpack: it is chosen
    where its products are fast and are what runs.
    """
    if compute in INT8_COMPUTE and device.capabilities["int8_matmul_gains"]:
        return "int8", f"{device.reason('int8_matmul_gains')} Its error is a third of fp8's."
    if device.capabilities["fp8_storage"]:
        return "fp8_e4m3fn", _why_not_int8(device, compute)
    return "as_file", device.reason("fp8_storage")


def _why_not_int8(device: Device, compute: str) -> str:
    if compute in INT8_COMPUTE:
        return f"Not int8: {why_int8_is_slow(device)}"
    return f"Not int8: compute={compute} asks for other products."


def why_int8_is_slow(device: Device) -> str:
    """Say why a model with int8 weights is not faster than a 16-bit one on a device; "" where it is."""
    for capability in ("int8_matmul", "int8_matmul_gains"):
        if not device.capabilities[capability]:
            return device.reason(capability)
    return ""


def why_low_bits_are_slow(device: Device) -> str:
    """Say why products of 6- and 4-bit weights are not faster than 16-bit ones on a device; "" where they are."""
    slow, oldest = why_int8_is_slow(device), device.profile.name == "sm_75"  # MIN_SM_VERSION of comfy-kitchen's layout
    kernel = f"comfy-kitchen's product of 4- and 6-bit weights needs sm_80: on {device.label} they are unpacked first."
    return slow or (kernel if oldest else "")


def why_no_fp8(storage: str, device: Device) -> str:
    """Say why a device cannot hold weights in a storage of fp8; empty where it can."""
    reason = _fp8_reason(storage, device)
    return reason and f"not on {device.label}: {reason}"


def unheld_storages(device: Device) -> Mapping[str, str]:
    """Map each storage that a device cannot hold for its fp8 to why."""
    found = {storage: why_no_fp8(storage, device) for storage in {**FORMAT_OF_STORAGE, **DTYPES}}
    return MappingProxyType({storage: why for storage, why in found.items() if why})


def _fp8_reason(storage: str, device: Device) -> str:
    dtypes = fp8_dtypes(storage)
    if dtypes and not device.capabilities["fp8_storage"]:
        return device.reason("fp8_storage")
    # Apple's GPUs hold e4m3 from torch 2.15, and no e5m2
    errors = ((name, why_not_held(device.torch_device, name)) for name in (() if device.simulated else dtypes))
    return next((f"It cannot hold {name} ({error})." for name, error in errors if error), "")


def why_no_bf16(device: Device) -> str:
    """Say why a device cannot hold numbers in bf16, as under DirectML (microsoft/DirectML #688); empty where it can."""
    why = "" if device.simulated else why_not_held(device.torch_device, "bf16")
    return f"{device.name} cannot hold bf16 ({why})" if why else ""


def held_storage(device: Device, file_dtype: str) -> tuple[str, str]:
    """Choose the storage of a file that is kept as it is where the device can hold it, and say why it is another."""
    return _quantized_storage(device, file_dtype) if file_dtype not in UNQUANTIZED else ("as_file", "")


def _quantized_storage(device: Device, file_dtype: str) -> tuple[str, str]:
    if reason := _fp8_reason(file_dtype, device):
        return _half(device), f"The file is {file_dtype}. {reason}"
    return "as_file", f"The file is already {file_dtype}."


def _too_large(device: Device, weight_bytes: int, free_bytes: int, compute: str) -> tuple[str, str]:
    shortage = _shortage("16 bit", weight_bytes, free_bytes)
    storage, reason = smallest_storage(device, compute)
    if storage == "as_file":
        return storage, f"{shortage} {reason} The weights will be moved in and out."
    return storage, f"{shortage} {storage.split('_')[0]} halves the weights to {size_text(weight_bytes // 2)}. {reason}"


def _shortage(what: str, weight_bytes: int, free_bytes: int) -> str:
    return (
        f"{what} weights take {size_text(weight_bytes)}; {size_text(free_bytes)} are free, "
        f"of which {size_text(ACTIVATION_ROOM)} are left for activations."
    )


def _unknown_memory(device: Device) -> str:
    if device.simulated:
        return "the memory of a simulated device is not known."
    if device.torch_device.type == "privateuseone":
        return "DirectML does not tell its free memory."
    return "there is no separate GPU memory to fit it into."


def _half(device: Device) -> str:
    return "bf16" if device.capabilities["bf16"] else "fp16"
