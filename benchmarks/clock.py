"""The time and the kernels of a call on a GPU; on a CPU the time alone."""

from __future__ import annotations

import time
from collections.abc import Callable

CALLS = 3


def timed(call: Callable) -> dict:
    """Seconds a call takes by the clock on the wall and by CUDA's events, over several after one that is not timed:
    ComfyUI exchanges one clone of a model for another at the first."""
    import torch

    on_gpu = torch.cuda.is_available()
    call()
    wait()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu else []
    start = time.perf_counter()
    for event in events[:1]:
        event.record()
    for _ in range(CALLS):
        call()
    for event in events[1:]:
        event.record()
    wait()
    seconds = (time.perf_counter() - start) / CALLS
    return {"seconds": seconds, "device_seconds": events[0].elapsed_time(events[1]) / 1000 / CALLS if on_gpu else None}


def kernels(call: Callable) -> int:
    """How many kernels a call starts on the device, by torch's profiler; 0 on a CPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, supported_activities

    with profile(activities=list(supported_activities() & {ProfilerActivity.CUDA, ProfilerActivity.CPU})) as profiled:
        call()
        wait()
    on_device = (event.name for event in profiled.events() if event.device_type == DeviceType.CUDA)
    return sum(not name.startswith(("Memcpy", "Memset")) for name in on_device)


def wait() -> None:
    """Wait for the device."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
