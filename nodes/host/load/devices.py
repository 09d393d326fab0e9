"""The device ComfyUI computes on, as the precision core sees it."""

import comfy.model_management
import torch

from ....precision.devices.detect import Device, detect
from ....precision.devices.memory import available_memory


def compute_device() -> torch.device:
    return comfy.model_management.get_torch_device()


def current_device() -> Device:
    """ComfyUI's compute device, or the profile that ``HALFSAFE_DEVICE_PROFILE`` asks for."""
    return detect(compute_device())


def free_device_memory() -> int | None:
    """Bytes free on the compute device; None where it shares the host's memory."""
    device = compute_device()
    if device.type in ("cpu", "mps"):
        return None
    return int(comfy.model_management.get_free_memory(device))


def free_host_memory() -> int:
    """Bytes of host memory left to this process, its cgroup's limit included."""
    free = int(comfy.model_management.get_free_memory(torch.device("cpu")))
    limit = available_memory()
    return free if limit is None else min(free, limit)
