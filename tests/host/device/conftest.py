"""The emulated device with values (``support/second_device.py``), and ComfyUI on a machine with it: what torch tells it of such a machine, and the
state that its ``comfy/model_management.py`` has after its import there. Its branches are its own.

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
from comfy_kitchen.registry import registry
from halfsafe.nodes.host.comfyui.metal import hold_8_bits_on_metal
from support import families, one_block, rule_book
from support.probing import forget_probes
from support.second_device import SecondDevice

shared_files, wan, overflowing = one_block.shared_files, one_block.wan, one_block.overflowing
call, call_of_two = one_block.call, one_block.call_of_two
GIB = 1024**3
NAMES = {"cuda": "NVIDIA GeForce RTX 4090", "xpu": "Intel(R) Arc(TM) A770 Graphics"}


@contextlib.contextmanager
def machine(kind: str, count: int = 1, memory: int = 8 * GIB) -> Iterator[SecondDevice]:
    """A process of ComfyUI on a machine with devices of a kind."""
    device = SecondDevice(kind, rule_book.BOOKS[kind], memory)
    with ExitStack() as undo:
        for owner, name, value in (*_of_torch(device, count), *_of_comfyui(kind)):
            undo.enter_context(mock.patch.object(owner, name, value))
        undo.enter_context(
            mock.patch.dict(sys.modules, {"torch.privateuseone": SimpleNamespace(_lazy_init=lambda: None)})
        )
        if kind in ("cuda", "xpu"):
            undo.enter_context(_attention_of_torch())
        if kind == "mps":
            undo.enter_context(mock.patch.object(registry, "_priority", registry._priority))
            hold_8_bits_on_metal()
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
        return version + [
            (module, name, value) for name, value in _runtime(device, count).items() if hasattr(module, name)
        ]
    if kind == "mps":
        names = {
            "synchronize": lambda: None, "empty_cache": lambda: None, "device_count": lambda: 1,
            "get_rng_state": lambda *where: torch.zeros(16, dtype=torch.uint8), "set_rng_state": lambda *given: None,
        }  # fmt: skip
        mac = [
            (torch.backends.mps, "is_available", lambda: True),
            (torch.backends.mps, "get_name", lambda: "Apple M2 Pro"),
            (sys.modules["platform"], "mac_ver", lambda: ("15.5", ("", "", ""), "arm64")),
            (torch, "Generator", lambda device=None, made=torch.Generator: made()),
        ]
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
        **{
            name: {}
            for name in ("STREAMS", "stream_counters", "STREAM_CAST_BUFFERS", "LORA_COMPUTE_DTYPES", "PINNED_MEMORY")
        },
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


def _runtime(device: SecondDevice, count: int) -> dict[str, object]:
    """What ``torch.cuda`` and ``torch.xpu`` answer, by name."""
    chosen = [0]

    def index(where=None) -> int:
        if where is None or isinstance(where, int):
            return chosen[0] if where is None else where
        return chosen[0] if torch.device(where).index is None else torch.device(where).index

    def used(where=None) -> int:
        return device.used(torch.device(device.kind, index(where)))

    @contextlib.contextmanager
    def within(where) -> Iterator[None]:
        before, chosen[0] = chosen[0], index(where)
        try:
            yield
        finally:
            chosen[0] = before

    name = NAMES[device.kind]
    facts = SimpleNamespace(
        name=name, major=8, minor=9, total_memory=device.memory, multi_processor_count=128, has_fp16=True
    )
    silent = dict.fromkeys(
        ("_lazy_init", "synchronize", "empty_cache", "ipc_collect", "set_rng_state"), lambda *given: None
    )
    return silent | {
        "is_available": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: count,
        "current_device": lambda: chosen[0],
        "set_device": lambda where: chosen.__setitem__(0, index(where)),
        "device": within,
        "get_device_name": lambda where=None: name,
        "get_device_capability": lambda where=None: (8, 9),
        "get_device_properties": lambda where=None: facts,
        "memory_stats": lambda where=None: dict.fromkeys(
            ("active_bytes.all.current", "reserved_bytes.all.current"), used(where)
        ),
        "mem_get_info": lambda where=None: (device.memory - used(where), device.memory),
        "memory_allocated": used,
        "get_rng_state": lambda *given: torch.zeros(16, dtype=torch.uint8),
    }


@pytest.fixture
def on():
    """``on(kind, **options)``: the machine the rest of the test runs on."""
    entered = []

    def enter(kind, **options):
        entered.append(machine(kind, **options))
        return entered[-1].__enter__()

    yield enter
    for each in reversed(entered):
        each.__exit__(None, None, None)


@pytest.fixture(scope="package")
def clean(comfy, wan):
    """What the finite model gives in fp32 on the CPU."""
    return families.sample(families.load(comfy, wan, "fp32", "fp32"), "wan", steps=2)


@pytest.fixture(scope="package")
def cured(comfy, overflowing):
    """What the overflowing model gives in fp32 on the CPU."""
    return families.sample(families.load(comfy, overflowing, "fp32", "fp32"), "wan", steps=2)
