"""The device ComfyUI computes on, as the precision core sees it."""

import comfy.model_management
import torch

from ....precision.devices import memory
from ....precision.devices.detect import Device, detect


def compute_device() -> torch.device:
    """Return the device ComfyUI computes on."""
    return comfy.model_management.get_torch_device()


def current_device() -> Device:
    """Describe ComfyUI's compute device, or the profile that ``HALFSAFE_DEVICE_PROFILE`` asks for."""
    return detect(compute_device())


def free_device_memory() -> int | None:
    """Count the bytes free on the compute device; None where it shares the host's memory."""
    device = compute_device()
    if device.type in ("cpu", "mps"):
        return None
    return int(comfy.model_management.get_free_memory(device))


def free_host_memory() -> int:
    """Count the bytes of host memory left to this process, its cgroup's limit included."""
    free = int(comfy.model_management.get_free_memory(torch.device("cpu")))
    limit = memory.available_memory()
    return free if limit is None else min(free, limit)


def is_oom(error: BaseException) -> bool:
    """Tell whether an error means that a device has no memory left.

    ComfyUI's own test comes first, as it also clears the error CUDA has pending. On torch 2.8 and later it takes the plain
    RuntimeError of MPS for another.
    """
    return comfy.model_management.is_oom(error) or memory.is_oom(error)
