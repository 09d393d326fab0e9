"""Weights quantized on an NVIDIA card as a model is loaded: equal to the CPU's, on the CPU where the card has no room, and nothing left there."""

from dataclasses import replace

import pytest
import torch
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.formats.checkpoint import StoredWeight
from halfsafe.precision.formats.comfy_format import made_here, tensors_made
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.make import on_gpu
from halfsafe.precision.make.on_gpu import OnGpu
from halfsafe.precision.plan.layers import plan_weights
from support.families import load, report
from support.mapped_loading import tensors_of
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
GIB = 1024**3
ROTATING = (aten.mm.out, aten.matmul.default)
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
STORAGES = ("fp8_e4m3fn", "fp8_e5m2", "int8")
WEIGHTS = {f"{number}.weight": torch.arange(64 * 256).reshape(64, 256).sin() / number for number in (1, 2, 3, 4)}
IN_INT8 = dict.fromkeys(WEIGHTS, "int8")


def is_rotation(func, args: tuple, most: int = 1 << 13) -> bool:
    """Whether an operation rotates a weight: probes of a device multiply fewer numbers."""
    return func in ROTATING and args[0].numel() > most and args[1].shape in ((256, 256), (64, 64), (16, 16))


class Quantizing(TorchDispatchMode):
    """``where``: the devices of each cast to fp8 (``cast``) and each rotation to int8 (``mm``); ``tf32``: whether it was on for a rotation on a card."""

    def __init__(self):
        super().__init__()
        self.where: dict[str, list[str]] = {"cast": [], "mm": []}
        self.tf32: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is aten.copy_.default and args[0].dtype in FP8 and args[1].dtype not in FP8:
            self.where["cast"].append(args[0].device.type)
        if is_rotation(func, args, 1 << 15):  # fewer rows are a sample, for the error of what is written
            self.where["mm"].append(args[0].device.type)
        if is_rotation(func, args):
            self.tf32 += [torch.backends.cuda.matmul.allow_tf32] if args[0].device.type == "cuda" else []
        return func(*args, **(kwargs or {}))


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Bit for bit, in host memory."""
    for one, other in zip(found, expected, strict=True):
        assert one.device.type == "cpu" and one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8))


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch):
    monkeypatch.setattr(on_gpu, "SMALL", 1)


def parts_of(model) -> list[torch.Tensor]:
    return tensors_of(model.model.diffusion_model)


def made(weights, storages, making=made_here, **options) -> dict[str, torch.Tensor]:
    stored = {name: StoredWeight(name, tensor) for name, tensor in weights.items()}
    plans = plan_weights(stored, {name: LayerPlan(storage) for name, storage in storages.items()}, "m.safetensors")
    return dict(tensors_made(making(stored, plans, "m.safetensors", **options), lambda name, size: None))


def both(device, weights, storages, free=8 * GIB, **options) -> OnGpu:
    """Make weights on a card and on the CPU, and hold one to the other. Returns what made them on the card."""
    there = OnGpu(device.device(), free)
    found, expected = made(weights, storages, there.weights, **options), made(weights, storages, **options)
    assert list(found) == list(expected)
    assert_same(list(found.values()), list(expected.values()))
    return there


@pytest.mark.parametrize(("storage", "operation"), [("fp8_e4m3fn", "cast"), ("int8", "mm")])
def test_a_model_is_quantized_there_and_is_as_the_cpus(comfy, wan, on, storage, operation):
    expected = parts_of(load(comfy, wan, storage, "fp32"))
    device = on("cuda")
    detect(device.device())
    before = device.used(device.device())  # comfy-kitchen keeps the matrix that its int8 product rotates by
    with Quantizing() as spy:
        found = parts_of(load(comfy, wan, storage, "fp32"))
    assert spy.where[operation].count("cuda") >= 10 and "cpu" not in spy.where[operation]
    assert_same(found, expected)
    assert device.used(device.device()) == before


@pytest.mark.parametrize(
    ("storage", "dtype"), [*zip(STORAGES, (torch.bfloat16, torch.float16, torch.float32), strict=True)], ids=str
)
def test_weights_of_all_sizes_are_as_the_cpus(on, storage, dtype):
    shapes = {"larger": (96, 1024), "smaller": (16, 64), "none": (0, 64)}
    weights = {f"{name}.weight": (torch.randn(shape) * 0.05).to(dtype) for name, shape in shapes.items()}
    weights["turned.weight"] = torch.randn(64, 256).to(dtype).T.contiguous().T
    device = on("cuda")
    there = both(device, weights, dict.fromkeys(weights, storage))
    assert there.made > 0 and device.used(device.device()) <= 1 << 26


def full(device, kind=torch.OutOfMemoryError, says="CUDA out of memory. Tried to allocate 2 GiB."):
    """Raise at the second rotation."""
    refuse, calls = device.book.operation, []

    def operation(func, args, kwargs):
        calls.extend([func] * is_rotation(func, args))
        if is_rotation(func, args) and len(calls) == 2:
            raise kind(says)
        refuse(func, args, kwargs)

    device.book = replace(device.book, operation=operation)


def test_a_weight_that_the_device_has_no_memory_for_is_made_on_the_cpu(on):
    device = on("cuda")
    full(device)
    there = both(device, WEIGHTS, IN_INT8)
    assert there.made == 3 * there.without_room > 0


def test_a_weight_without_room_on_the_device_is_made_on_the_cpu(on):
    weights = {"large.weight": torch.randn(512, 1024), "small.weight": torch.randn(16, 64)}
    there = both(on("cuda"), weights, dict.fromkeys(weights, "int8"), free=2 * (on_gpu.WORK + 512 * 1024 * 4))
    assert 0 < there.made < 2000 < there.without_room


def test_a_load_says_what_had_no_room_there(comfy, wan, on):
    full(on("cuda"))
    notes = report(comfy, load(comfy, wan, "int8", "fp32"))["notes"]
    assert [note for note in notes if note.endswith("were quantized on the CPU: the GPU had too little memory.")]


@pytest.mark.parametrize("kind", ["mps", "xpu", "simulated"])
def test_other_devices_have_the_cpu_make_them(comfy, wan, on, kind, monkeypatch):
    on("cuda" if kind == "simulated" else kind)
    if kind == "simulated":
        monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    with Quantizing() as spy:
        load(comfy, wan, "int8", "fp32")
    assert set(spy.where["mm"]) == {"cpu"} and len(spy.where["mm"]) >= 10


def test_tf32_is_off_where_a_weight_is_rotated_and_as_it_was_after(on, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    there = OnGpu(on("cuda").device(), 8 * GIB)
    with Quantizing() as spy:
        made(WEIGHTS, IN_INT8, there.weights)
    assert len(spy.tf32) == len(WEIGHTS) and not any(spy.tf32)
    assert torch.backends.cuda.matmul.allow_tf32


def test_what_comfyui_would_unload_counts_as_free(comfy, wan, on):
    from comfy import model_management
    from halfsafe.nodes.host.load.devices import free_device_memory

    device = on("cuda")
    before = free_device_memory()
    model = load(comfy, wan, "fp16", "fp16")
    model_management.load_models_gpu([model])
    assert device.used(device.device()) > 5e6
    assert abs(before - free_device_memory()) < 1e6
