"""Weights quantized on an NVIDIA card as a model is loaded: through pinned buffers, equal to the CPU's, and nothing left there."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from halfsafe.nodes.host.load import tensors as loading
from halfsafe.precision.devices import on_device, pinned
from halfsafe.precision.devices.on_device import OnDevice
from halfsafe.precision.errors import NonFiniteWeight
from halfsafe.precision.formats import comfy_format
from halfsafe.precision.formats.checkpoint import StoredWeight
from halfsafe.precision.formats.comfy_state import planned_tensors
from halfsafe.precision.plan.weights import plan_weights
from support import families, model_files
from support.families import load
from support.mapped_loading import tensors_of
from support.quantizing import Quantizing, assert_near, assert_same
from support.second_machine import _Event, _Stream

aten = torch.ops.aten
GIB = 1024**3
STORAGES = ("fp8_e4m3fn", "fp8_e5m2", "int8", "w6a8", "w4a8")
WEIGHT = "blocks.1.ffn.0.weight"
MATRICES = 20
"""Layers of the model that are quantized."""


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Weights of 64 to 1024 KB go there too, in several parts."""
    monkeypatch.setattr(on_device, "SMALL", 1)
    monkeypatch.setattr(pinned, "PART", 100_000)


def parts_of(model) -> list[torch.Tensor]:
    return tensors_of(model.model.diffusion_model)


def assert_nothing_left(device) -> None:
    torch.cuda.synchronize()  # raises for a buffer that was written too early
    device.copies.check_freed()
    assert (device.used(device.device()), device.pinned(), device.copies.of_pageable) == (0, 0, 0)


@pytest.mark.parametrize(("storage", "operation"), [("fp8_e4m3fn", "mul"), ("fp8_e5m2", "mul"), ("int8", "mm")])
def test_a_model_is_quantized_there_and_is_as_the_cpus(comfy, wan, on, storage, operation, monkeypatch):
    expected = parts_of(load(comfy, wan, storage, "fp32"))
    device, emptied = on("cuda"), []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(device.used(device.device())))
    with Quantizing() as spy:
        found = parts_of(load(comfy, wan, storage, "fp32"))
    assert emptied and emptied[0] == 0
    assert spy.where[operation].count("cuda") >= MATRICES and "cpu" not in spy.where[operation]
    assert_same(found, expected)
    assert_nothing_left(device)


def backwards(a, b, *, out):
    return torch.mm(a.flip(1), b.flip(0), out=out)


def test_another_order_of_sums_differs_by_a_last_bit_and_a_step(comfy, wan, on):
    expected = parts_of(load(comfy, wan, "int8", "fp32"))
    device = on("cuda")
    device.book = replace(device.book, answers={**device.book.answers, aten.mm.out: backwards})
    found = parts_of(load(comfy, wan, "int8", "fp32"))
    assert assert_near(found, expected) > 10, "the sums are in another order"


def made(weights: dict[str, torch.Tensor], storages: dict[str, str], making=None, read=True, done=lambda name, size: None) -> dict[str, torch.Tensor]:
    stored = {name: StoredWeight(name, tensor) for name, tensor in weights.items()}
    plans = plan_weights(stored, storages, "m.safetensors")
    return dict(planned_tensors(stored, plans, "m.safetensors", done, read=read, making=making))


def both(on, weights: dict[str, torch.Tensor], storages: dict[str, str], free: int = 8 * GIB, change=None, **options):
    """The tensors that a card and the CPU make of weights; the machine and what made them there."""
    expected = made(weights, storages, **options)
    device = on("cuda")
    if change:
        change(device)
    with OnDevice(device.device(), free) as there:
        found = made(weights, storages, there.weights, **options)
    assert list(found) == list(expected)
    assert_same(list(found.values()), list(expected.values()))
    return device, there


DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_all_sizes_are_as_the_cpus(on, storage, dtype):
    shapes = {"larger": (96, 1024), "smaller": (16, 64), "none": (0, 64), "one part": (32, 1024)}
    weights = {f"{name}.weight": (torch.randn(shape) * 0.05).to(dtype) for name, shape in shapes.items()}
    weights["turned.weight"] = torch.randn(64, 256).to(dtype).T.contiguous().T
    weights["with levels of its own.weight"] = torch.arange(512 * 1024).reshape(512, 1024).sin().to(dtype)
    weights["large.weight"] = (torch.randn(64, 256) * 6e3).to(dtype)
    device, there = both(on, weights, dict.fromkeys(weights, storage))
    assert_nothing_left(device)
    assert there.made > 0


@pytest.mark.parametrize("shape", [(100_000,), (99_999,), (100_001,), (300_000,), (7,), (0,), (), (3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int8], ids=str)
def test_copies_there_and_back(on, shape, dtype):
    device = on("cuda")
    tensor = (torch.randn(shape) * 20).to(dtype)
    copies = pinned.PinnedCopies(device.device())
    assert device.pinned() == 2 * pinned.PART
    for source in (tensor, tensor.reshape(*tensor.shape, 1).expand(*tensor.shape, 2)):
        there, arrived = copies.upload(source)
        torch.cuda.current_stream().wait_event(arrived)
        assert there.device == device.device() and there.shape == source.shape
        assert_same([copies.download(there)], [source])
    del there
    copies.close()
    assert_nothing_left(device)


def test_a_weight_is_uploaded_while_the_one_before_is_made(on, monkeypatch):
    order = []
    real = {"upload": pinned.PinnedCopies.upload, "tensors_of": on_device.tensors_of}
    monkeypatch.setattr(pinned.PinnedCopies, "upload", lambda copies, tensor: order.append(f"upload {len(tensor)}") or real["upload"](copies, tensor))
    monkeypatch.setattr(on_device, "tensors_of", lambda weight, *rest: order.append(f"make {weight.shape[0]}") or real["tensors_of"](weight, *rest))
    weights = {"1.weight": torch.randn(16, 64), "1.bias": torch.randn(64), "2.weight": torch.randn(32, 64), "3.weight": torch.randn(48, 64)}
    both(on, weights, {name: "int8" for name in weights if name.endswith("weight")})
    assert order == ["upload 16", "upload 32", "make 16", "make 64", "upload 48", "make 32", "make 48"]


def test_a_buffer_that_is_not_waited_for_shows(on, monkeypatch):
    device = on("cuda")
    monkeypatch.setattr(_Event, "synchronize", lambda event: None)
    copies = pinned.PinnedCopies(device.device())
    copies.upload(torch.randn(100_000))
    with pytest.raises(RuntimeError, match="was written before its copy"):
        torch.cuda.synchronize()


def test_a_weight_that_is_not_waited_for_shows(on, monkeypatch):
    monkeypatch.setattr(_Stream, "wait_event", lambda stream, event: None)
    with pytest.raises(RuntimeError, match="on stream 0 that stream 1 has not finished"):
        both(on, {"a.weight": torch.randn(16, 64)}, {"a.weight": "int8"})


def test_memory_given_back_too_early_shows(on, monkeypatch):
    device = on("cuda")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    copies = pinned.PinnedCopies(device.device())
    copies.upload(torch.randn(100_000))
    with pytest.raises(RuntimeError, match="given back while stream 1 may still use it"):
        device.copies.check_freed()


def test_a_weight_that_is_dropped_while_it_is_uploaded_keeps_its_memory_until_then(on):
    device = on("cuda")
    copies = pinned.PinnedCopies(device.device())
    copies.upload(torch.randn(100_000))
    device.copies.check_freed()
    copies.close()
    assert_nothing_left(device)


def test_memory_that_is_still_in_use_is_not_written(on, monkeypatch):
    """torch gives memory away again as soon as its stream has been asked for the last that uses it."""
    device = on("cuda")
    used = torch.ones(64, device=device.device()).mul_(2)
    copies = pinned.PinnedCopies(device.device())
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **options: used)
        there, arrived = copies.upload(torch.arange(64.0))  # raises where the stream does not wait
    torch.cuda.current_stream().wait_event(arrived)
    assert there.tolist() == list(range(64))


class Full:
    """Raises at an operation's ``at``-th call and those after it, up to ``until``, as torch does where the device is full."""

    def __init__(self, func, at: int, until: int, kind=torch.OutOfMemoryError, says: str = "CUDA out of memory. Tried to allocate 2 GiB."):
        self.func, self.at, self.until, self.calls = func, at, until, 0
        self.kind, self.says = kind, says

    def __call__(self, device) -> None:
        refuse = device.book.operation
        device.book = replace(device.book, operation=lambda func, args, kwargs: self._count(func) or refuse(func, args, kwargs))

    def _count(self, func) -> None:
        self.calls += func is self.func
        if func is self.func and self.at <= self.calls <= self.until:
            raise self.kind(self.says)


WEIGHTS = {f"{number}.weight": torch.arange(64 * 256).reshape(64, 256).sin() / number for number in (1, 2, 3, 4)}
IN_INT8 = dict.fromkeys(WEIGHTS, "int8")


@pytest.mark.parametrize(("func", "at", "until", "there"), [
    (aten.mm.out, 2, 2, 3), (aten.mm.out, 1, 99, 0), (aten.empty.memory_format, 1, 1, 3), (aten.empty.memory_format, 3, 3, 3),
])  # fmt: skip
def test_a_weight_that_the_device_has_no_memory_for_is_made_on_the_cpu(on, func, at, until, there):
    with Quantizing() as spy:
        device, maker = both(on, WEIGHTS, IN_INT8, change=Full(func, at, until))
    assert maker.made == there * (64 * 256 + 64 * 4 + len(b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'))
    assert spy.where["mm"].count("cpu") == 4 + 4 - there
    assert_nothing_left(device)


def test_without_pinned_memory_all_is_made_on_the_cpu(on, monkeypatch):
    def pin(memory):
        raise RuntimeError("CUDA error: out of memory")

    device, maker = both(on, WEIGHTS, IN_INT8, change=lambda device: monkeypatch.setattr(device, "pin", pin))
    assert maker.made == 0 and device.operations.get("aten::mm.out", 0) == 0


def test_nothing_is_pinned_where_comfyui_is_told_to_pin_nothing(comfy, wan, on, monkeypatch):
    from comfy.cli_args import args

    monkeypatch.setattr(args, "disable_pinned_memory", True)
    device, pinned_bytes = on("cuda"), []
    monkeypatch.setattr(device, "pin", lambda memory: pinned_bytes.append(memory.nbytes) or memory)
    with Quantizing() as spy:
        load(comfy, wan, "int8", "fp32")
    assert not pinned_bytes and set(spy.where["mm"]) == {"cpu"}


def test_a_torch_that_empties_no_pinned_memory_loads(on, monkeypatch):
    device = on("cuda")
    monkeypatch.delattr(torch._C, "_host_emptyCache")
    with OnDevice(device.device(), 8 * GIB) as there:
        assert made(WEIGHTS, IN_INT8, there.weights)
    assert there.made > 0


def test_other_errors_of_the_device_are_raised(on):
    says = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        both(on, WEIGHTS, IN_INT8, change=Full(aten.mm.out, 2, 2, RuntimeError, says))


def test_a_weight_that_does_not_fit_beside_what_is_there_is_made_on_the_cpu(on):
    weights = {"large.weight": torch.randn(512, 1024), "small.weight": torch.randn(16, 64)}
    free = 2 * (on_device.WORK + 2 * (512 * 1024 * 4 + 512 * 1024))
    device, maker = both(on, weights, dict.fromkeys(weights, "int8"), free=free)
    assert 0 < maker.made < 2000, "its scales and its comfy_quant are beside it"
    assert_nothing_left(device)


def test_what_is_held_there_at_once_is_bounded(on, monkeypatch):
    most = []
    weights = {f"{number}.weight": torch.randn(512, 1024) for number in range(6)}
    change = lambda device: monkeypatch.setattr(device, "run", watched(device, device.run, most))  # noqa: E731
    both(on, weights, dict.fromkeys(weights, "fp8_e4m3fn"), change=change)
    from halfsafe.precision.formats.quantize import PART

    assert 2 * 512 * 1024 * 4 < max(most) <= 2 * 512 * 1024 * 5 + 4 * PART


def watched(device, run, most: list[int]):
    def call(*args):
        result = run(*args)
        most.append(device.used(device.device()))
        return result

    return call


def damaged(weights, value=float("nan")):
    changed = {name: weight.clone() for name, weight in weights.items()}
    changed["3.weight"][5, 7] = value
    return changed


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_a_damaged_weight_is_refused_in_the_cpus_words(on, storage, value):
    """Who keeps the error keeps none of the device's memory."""
    weights, said = damaged(WEIGHTS, value), []
    device = on("cuda")
    for making in (None, "there"):
        with pytest.raises(NonFiniteWeight, match=r"m.safetensors: .*3.weight") as caught, OnDevice(device.device(), 8 * GIB) as there:
            made(weights, dict.fromkeys(weights, storage), there.weights if making else None)
        said.append(str(caught.value))
    assert said[0] == said[1] and caught.value.__traceback__
    assert_nothing_left(device)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_a_damaged_file_is_named(comfy, wan, on, storage):
    path = wan.with_name("on_device_nan.safetensors")
    model_files.changed(wan, path, lambda found: found[WEIGHT][3].fill_(float("nan")))
    device = on("cuda")
    with pytest.raises(NonFiniteWeight, match=f"{path.name}: .*{WEIGHT}.*NaN or Inf"):
        load(comfy, path, storage, "fp32")
    assert_nothing_left(device)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_an_interrupt_leaves_nothing_there(comfy, wan, on, storage, monkeypatch):
    from comfy import model_management

    device, calls = on("cuda"), []

    def interrupt():
        calls.append(device.used(device.device()))
        if len(calls) == 20:
            raise model_management.InterruptProcessingException

    monkeypatch.setattr(model_management, "throw_exception_if_processing_interrupted", interrupt)
    with pytest.raises(model_management.InterruptProcessingException) as caught:
        load(comfy, wan, storage, "fp32")
    assert calls[-1] > 0 and caught.value.__traceback__
    assert_nothing_left(device)


@pytest.mark.parametrize("kind", ["mps", "xpu", "privateuseone", "simulated"])
def test_other_devices_have_the_cpu_make_them(comfy, wan, on, kind, monkeypatch):
    expected = parts_of(load(comfy, wan, "int8", "fp32"))
    on("cuda" if kind == "simulated" else kind)
    if kind == "simulated":
        monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    with Quantizing() as spy:
        found = parts_of(load(comfy, wan, "int8", "fp32"))
    assert set(spy.where["mm"]) == {"cpu"} and len(spy.where["mm"]) >= MATRICES
    assert [one.dtype for one in found if one.dtype == torch.int8] == [one.dtype for one in expected if one.dtype == torch.int8]


def test_tf32_is_off_where_a_weight_is_rotated_and_as_it_was_after(on, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    device = on("cuda")
    with OnDevice(device.device(), 8 * GIB) as there, Quantizing() as spy:
        made(WEIGHTS, IN_INT8, there.weights)
    assert len(spy.tf32) == len(WEIGHTS) and not any(spy.tf32)
    assert torch.backends.cuda.matmul.allow_tf32


def test_slices_of_the_file_stay_unread(on):
    weights = {"kept.weight": torch.full((8, 64), float("nan")), "1.weight": torch.randn(16, 64), "kept.bias": torch.full((8,), float("nan"))}
    device, there = both(on, weights, {"1.weight": "int8"}, read=False)
    assert there.made > 0
    assert_nothing_left(device)


def test_what_is_cast_unpacked_or_has_scales_stays_on_the_cpu(on):
    device = on("cuda")
    scaled = StoredWeight("row.weight", torch.randn(32, 64).to(torch.float8_e4m3fn), torch.rand(32, 1) + 0.5, "row")
    stored = {"row.weight": scaled, "cast.weight": StoredWeight("cast.weight", torch.randn(32, 64))}
    plans = plan_weights(stored, {"row.weight": "fp8_e4m3fn", "cast.weight": "fp16"}, "m")
    with OnDevice(device.device(), 8 * GIB) as there:
        found = dict(planned_tensors(stored, plans, "m", lambda name, size: None, making=there.weights))
    assert found["cast.weight"].dtype == torch.float16 and there.made == 0 and not device.operations


def test_small_weights_stay_on_the_cpu(on, monkeypatch):
    monkeypatch.setattr(on_device, "SMALL", 64 * 256 + 1)
    device, there = both(on, WEIGHTS, IN_INT8)
    assert there.made == 0 and not device.operations


def test_the_note_says_that_it_was_the_gpu(comfy, wan, on, monkeypatch):
    now = iter(range(10_000))
    monkeypatch.setattr(loading, "perf_counter", lambda: float(next(now)))
    for machine in (nullcontext, lambda: on("cuda")):
        machine()
        (note,) = [note for note in families.report(comfy, load(comfy, wan, "int8", "fp32"))["notes"] if "Making" in note]
        assert ("of them on the GPU. Save Model" in note) == (machine is not nullcontext)


def test_the_same_functions_make_them(on, monkeypatch):
    """A formula has one place."""
    seen = []
    for name in ("quantize", "finite_bound"):
        real = getattr(comfy_format, name)
        monkeypatch.setattr(comfy_format, name, lambda first, *rest, real=real: seen.append(getattr(first, "data", first).device.type) or real(first, *rest))
    both(on, {"1.weight": torch.randn(16, 64)}, {"1.weight": "fp8_e4m3fn"})
    assert seen == ["cpu", "cpu", "cuda", "cuda"]
