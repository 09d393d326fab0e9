"""ComfyUI on a machine with the emulated device of ``second_device``: what torch tells it of such a machine, and the state that its
``comfy/model_management.py`` has after its import there. Its branches are its own.

``machine(kind)``: ``cuda`` (NVIDIA, two cards if asked), ``mps`` (a Mac), ``xpu`` (Intel), ``privateuseone`` (DirectML).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.mps
from support import rule_book
from support.probing import forget_probes
from support.second_device import SecondDevice

GIB = 1024**3
NAMES = {"cuda": "NVIDIA GeForce RTX 4090", "xpu": "Intel(R) Arc(TM) A770 Graphics"}


@contextlib.contextmanager
def machine(kind: str, count: int = 1, memory: int = 8 * GIB) -> Iterator[SecondDevice]:
    """A process of ComfyUI on a machine with devices of a kind."""
    device = SecondDevice(kind, rule_book.BOOKS[kind], memory)
    with ExitStack() as undo:
        for owner, name, value in (*_of_torch(device, count), *_of_comfyui(kind)):
            undo.enter_context(mock.patch.object(owner, name, value))
        undo.enter_context(mock.patch.dict(sys.modules, {"torch.privateuseone": SimpleNamespace(_lazy_init=lambda: None)}))
        if kind in ("cuda", "xpu"):
            undo.enter_context(_attention_of_torch())
        undo.enter_context(device)
        forget_probes()
        undo.callback(forget_probes)
        yield device


def _of_torch(device: SecondDevice, count: int) -> list[tuple[object, str, object]]:
    kind = device.kind
    if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
        pytest.skip("torch 2.8 asks the driver before it works on a device that is not there")
    torch._C._ensureCUDADeviceGuardSet()
    version = [(torch.version, "cuda", "12.8" if kind == "cuda" else None), (torch.cuda, "_lazy_init", lambda: None)]
    if kind in ("cuda", "xpu"):
        module = getattr(torch, kind)
        return version + [(module, name, value) for name, value in _Runtime(device, count).names().items() if hasattr(module, name)]
    if kind == "mps":
        names = {
            "synchronize": lambda: None, "empty_cache": lambda: None, "device_count": lambda: 1,
            "get_rng_state": lambda *where: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *given: None,
        }  # fmt: skip
        mac = [(torch.backends.mps, "is_available", lambda: True), (torch.backends.mps, "get_name", lambda: "Apple M2 Pro"), (sys.modules["platform"], "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))]
        return version + mac + [(torch.mps, name, value) for name, value in names.items()]
    return version


def _of_comfyui(kind: str) -> list[tuple[object, str, object]]:
    from comfy import model_management as core

    shared = kind == "mps"
    state = {
        "cpu_state": core.CPUState.MPS if shared else core.CPUState.GPU,
        "vram_state": core.VRAMState.SHARED if shared else core.VRAMState.NORMAL_VRAM,
        "xpu_available": kind == "xpu",
        "directml_enabled": kind == "privateuseone",
        "lowvram_available": kind != "privateuseone",
        "NUM_STREAMS": 0,
        "MIN_WEIGHT_MEMORY_RATIO": 0.0 if kind == "cuda" else 0.4,
        "MAX_PINNED_MEMORY": -1,
        "ENABLE_PYTORCH_ATTENTION": kind in ("cuda", "xpu"),
        "current_loaded_models": [],
        **{name: {} for name in ("STREAMS", "stream_counters", "STREAM_CAST_BUFFERS", "LORA_COMPUTE_DTYPES", "PINNED_MEMORY")},
        "LARGEST_CASTED_WEIGHT": (None, 0),
        "TOTAL_PINNED_MEMORY": 0,
    }
    core.directml_device = torch.device("privateuseone", 0)
    return [(core, name, value) for name, value in state.items()]


@contextlib.contextmanager
def _attention_of_torch() -> Iterator[None]:
    """ComfyUI chooses at import; on such a machine it takes torch's own."""
    from comfy.ldm.modules import attention

    with ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            for function in ("optimized_attention", "optimized_attention_masked") if name.startswith("comfy.") else ():
                if hasattr(module, function):
                    undo.enter_context(mock.patch.object(module, function, attention.attention_pytorch))
        yield


class _Runtime:
    """What ``torch.cuda`` and ``torch.xpu`` answer."""

    def __init__(self, device: SecondDevice, count: int):
        self.device = device
        self.count = count
        self.chosen = 0

    def names(self) -> dict[str, object]:
        own = {name: getattr(self, name) for name in dir(type(self)) if not name.startswith("_") and name != "names"}
        return {**own, "_lazy_init": lambda: None, "device": self._with_device}

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return self.count

    def current_device(self) -> int:
        return self.chosen

    def set_device(self, device) -> None:
        self.chosen = self._index(device)

    def get_device_name(self, device=None) -> str:
        return NAMES[self.device.kind]

    def get_device_capability(self, device=None) -> tuple[int, int]:
        return (8, 9)

    def get_device_properties(self, device=None) -> SimpleNamespace:
        name = self.get_device_name()
        return SimpleNamespace(name=name, major=8, minor=9, total_memory=self.device.memory, multi_processor_count=128, has_fp16=True)

    def is_bf16_supported(self, including_emulation: bool = True) -> bool:
        return True

    def memory_stats(self, device=None) -> dict[str, int]:
        used = self.memory_allocated(device)
        return {"active_bytes.all.current": used, "reserved_bytes.all.current": used}

    def mem_get_info(self, device=None) -> tuple[int, int]:
        return self.device.memory - self.memory_allocated(device), self.device.memory

    def memory_allocated(self, device=None) -> int:
        return self.device.used(torch.device(self.device.kind, self._index(device)))

    def synchronize(self, device=None) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def ipc_collect(self) -> None:
        pass

    def get_rng_state(self, device=None) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)

    def set_rng_state(self, state, device=None) -> None:
        pass

    @contextlib.contextmanager
    def _with_device(self, device) -> Iterator[None]:
        before, self.chosen = self.chosen, self._index(device)
        try:
            yield
        finally:
            self.chosen = before

    def _index(self, device) -> int:
        if device is None or isinstance(device, int):
            return self.chosen if device is None else device
        index = torch.device(device).index
        return self.chosen if index is None else index
