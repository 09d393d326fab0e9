"""The device ComfyUI computes on, as the precision core sees it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import comfy.memory_management
import comfy.model_management
import comfy.quant_ops
import torch

from ....precision.base.message import Message
from ....precision.devices import memory
from ....precision.devices.detect import Device, detect, requested_profile
from ....precision.make.on_gpu import OnGpu

DRIVER = Path("/proc/driver/nvidia/version")
QUANTIZING = 2 << 30
"""Bytes that ComfyUI is asked to free of the device before weights are quantized there: room for the largest, twice."""


def compute_device() -> torch.device:
    """Return the device ComfyUI computes on."""
    return comfy.model_management.get_torch_device()


def current_device() -> Device:
    """Describe ComfyUI's compute device, or the profile that ``HALFSAFE_DEVICE_PROFILE`` asks for.

    Unlike a device that is detected without ComfyUI, it lacks int8 kernels where this comfy-kitchen has none for it.
    """
    device = detect(compute_device())
    if device.simulated or not device.capabilities["int8_kernels"]:
        return device
    kitchen = getattr(comfy.quant_ops, "ck", None)  # absent where ComfyUI could not import comfy-kitchen
    backends = kitchen.list_backends() if kitchen else {}
    usable = {name for name, state in backends.items() if state["available"] and not state["disabled"]}
    if any("int8_linear" in backends[name]["capabilities"] for name in usable - {"eager"}):
        return device
    expected = "hip" if device.profile.vendor == "amd" else "cuda"
    reason = backends.get(expected, {}).get("unavailable_reason") or "turned off or too old"
    problem = Message("comfy-kitchen's {0} backend has no kernel ({1})", expected, reason)
    why = Message("torch's general operations run int8 products here: {0}.", problem)
    return device.without("int8_kernels", why)


def nvidia_driver() -> str:
    """Return the version of NVIDIA's driver, as Linux tells it; "-" elsewhere."""
    told = DRIVER.read_text(encoding="utf-8") if DRIVER.is_file() else ""
    return found.group() if (found := re.search(r"\b\d+\.\d+(\.\d+)?\b", told)) else "-"


def device_at(where: torch.device) -> Device:
    """Describe the device that weights are moved to: a CPU unless it is ComfyUI's real compute device."""
    device = current_device()
    return detect(where, "cpu") if device.simulated or where != compute_device() else device


def streams_weights(device: torch.device, disable_dynamic: bool) -> bool:
    """True if a model for a device stays memory-mapped and ComfyUI streams it, as with dynamic VRAM."""
    # As ``ModelPatcherDynamic.__new__`` in comfy/model_patcher.py; the switch came with comfy-aimdo.
    enabled = getattr(comfy.memory_management, "aimdo_enabled", False) and not disable_dynamic
    return enabled and not comfy.model_management.is_device_cpu(device)


def free_device_memory() -> int | None:
    """Count the bytes of the compute device that ComfyUI would give a model: free ones, and those of loaded models.

    None where the device shares the host's memory, and under DirectML.
    """
    device = compute_device()
    # Of DirectML's ComfyUI says 1 GiB, whatever there is (``get_free_memory`` in comfy/model_management.py).
    if device.type in ("cpu", "mps", "privateuseone"):
        return None
    loaded = (entry for entry in comfy.model_management.current_loaded_models if entry.device == device and entry.model)
    return int(comfy.model_management.get_free_memory(device)) + sum(entry.model_loaded_memory() for entry in loaded)


def make_room_to_quantize() -> None:
    """Have ComfyUI free memory of the compute device for weights that are quantized there, one after another."""
    if not comfy.model_management.is_device_cpu(compute_device()):
        comfy.model_management.free_memory(QUANTIZING, compute_device())


@contextmanager
def quantizing_device() -> Iterator[OnGpu | None]:
    """Yield the quantizer on the compute device; None if the CPU quantizes.

    The CPU does without CUDA or ROCm, and for a simulated device.
    """
    device = compute_device()
    if device.type != "cuda" or requested_profile():
        yield None
        return
    make_room_to_quantize()
    maker = OnGpu(device, int(comfy.model_management.get_free_memory(device)))
    try:
        yield maker
    finally:
        comfy.model_management.soft_empty_cache()  # torch keeps the device's memory for the next who asks


def free_host_memory() -> int:
    """Count the bytes of host memory left to this process, its cgroup's limit included."""
    free = int(comfy.model_management.get_free_memory(torch.device("cpu")))
    limit = memory.available_memory()
    return free if limit is None else min(free, limit)
