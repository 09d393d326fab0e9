"""The emulated device itself: its memory is its own, copies are late, streams have an order, each rule is raised."""

import threading

import pytest
import torch
from support.held_tensors import is_held

pytestmark = pytest.mark.not_as_on_cuda("the device has rules of its own")


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu", "privateuseone"])
def test_values_and_devices_at_once(on, kind):
    device = on(kind)
    where = device.device()
    x = torch.randn(3, 4)
    y = x.to(where)
    assert type(y) is torch.Tensor and y.device == where and y.is_cuda is (kind == "cuda")
    assert torch.equal((y @ y.t()).cpu(), x @ x.t()) and y.t().stride() == (1, 4)
    assert y[0].fill_(5.0).device == where and y.tolist()[0] == [5.0] * 4
    assert torch.tensor([1.0], device=where).device == torch.zeros(2, device=where).device == where
    assert f"{y.sum():.1f}" and y[[0, 1], [1, 2]].tolist()[0] == 5.0
    layer = torch.nn.Linear(4, 2).to(where)
    assert is_held(layer.weight) and type(layer.weight) is torch.nn.Parameter
    assert not is_held(layer.to("cpu").weight) and not is_held(y.cpu())


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_tensors_of_two_devices_are_not_mixed(on, kind):
    device = on(kind, count=2) if kind == "cuda" else on(kind)
    x, y = torch.ones(2), torch.ones(2, device=device.device())
    assert (y + torch.tensor(2.0)).tolist() == [3.0, 3.0], "a number of the host is no tensor"
    with pytest.raises(RuntimeError, match="same device.*cpu and (cuda|mps):0"):
        y + x
    if kind == "cuda":
        with pytest.raises(RuntimeError, match="cuda:0 and cuda:1"):
            y + torch.ones(2, device=device.device(1))


def test_memory_is_counted_and_given_back(on):
    device = on("cuda", count=2)
    x = torch.zeros(1000, device=device.device(1))
    view = x[10:]
    assert (device.used(device.device()), device.used(device.device(1))) == (0, 4000)
    assert torch.cuda.mem_get_info(1) == (device.memory - 4000, device.memory)
    del x
    assert device.used(device.device(1)) == 4000, "a view keeps it"
    del view
    assert device.used(device.device(1)) == 0


def test_reads_are_counted(on):
    device = on("cuda")
    x = torch.arange(4.0, device=device.device())
    before = device.reads
    x.sum().item(), x.cpu(), bool(x[1] > 0), x.nonzero()
    assert device.reads == before + 4
    x + x, x.to(torch.float16), x.t()
    assert device.reads == before + 4


def test_a_host_buffer_that_is_used_again_too_early_shows(on):
    device = on("cuda")
    buffer = torch.ones(4)
    late = buffer.to(device.device(), non_blocking=True)
    buffer.fill_(7.0)
    assert (late * 1).raw.tolist() == [7.0] * 4, "the copy takes effect late"
    with pytest.raises(RuntimeError, match="was written before its copy"):
        torch.cuda.synchronize()
    buffer.to(device.device(), non_blocking=True)
    torch.cuda.synchronize()
    buffer.fill_(9.0)
    assert buffer.to(device.device()).tolist() == [9.0] * 4


def test_a_copy_to_the_host_is_there_when_the_host_has_waited(on):
    device = on("cuda")
    x = torch.full((4,), 3.0, device=device.device())
    early = x.to("cpu", non_blocking=True)
    assert early.tolist() != [3.0] * 4
    torch.cuda.synchronize()
    assert early.tolist() == [3.0] * 4


def test_a_stream_that_does_not_wait_for_another_is_an_error(on):
    device = on("cuda")
    side, x = torch.cuda.Stream(), torch.ones(4)
    with torch.cuda.stream(side):
        y = x.to(device.device(), non_blocking=True)
    with pytest.raises(RuntimeError, match="mul.* on stream 0 that stream 1 has not finished"):
        y * 2
    torch.cuda.current_stream().wait_stream(side)
    assert (y * 2).tolist() == [2.0] * 4
    y * 2
    with torch.cuda.stream(side), pytest.raises(RuntimeError, match="copy.* on stream 1 that stream 0 has not finished"):
        y.copy_(x, non_blocking=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y.copy_(x, non_blocking=True)
    torch.cuda.current_stream().wait_stream(side)
    y.sum().item()
    with torch.cuda.stream(side):
        y.copy_(x, non_blocking=True)  # the host has waited


def test_another_thread_sees_the_device_too(on):
    device, found = on("cuda"), []
    x = torch.ones(2, device=device.device())
    thread = threading.Thread(target=lambda: found.append((x + torch.ones(2, device=device.device())).tolist()))
    thread.start()
    thread.join()
    assert found == [[2.0, 2.0]]


REFUSED = {
    "a product in another dtype": ("mps", RuntimeError, "Failed to create function", lambda d: torch.mul(torch.ones(2, device=d), 0.5, out=torch.ones(2, device=d).half())),
    "float64 on Metal": ("mps", TypeError, "doesn't support float64", lambda d: torch.ones(2, device=d).double()),
    "fp8 on Metal": ("mps", TypeError, "Trying to convert Float8_e4m3fn", lambda d: torch.ones(2, device=d).to(torch.float8_e4m3fn)),
    "fp8 moved to Metal": ("mps", TypeError, "Trying to convert", lambda d: torch.ones(2).to(torch.float8_e5m2).to(d)),
    "whole numbers on Metal": ("mps", RuntimeError, "non-float inputs", lambda d: torch.ones(2, 2, device=d).int() @ torch.ones(2, 2, device=d).int()),
    "int8 on Metal": ("mps", NotImplementedError, "_int_mm", lambda d: torch._int_mm(*[torch.ones(32, 32, device=d).to(torch.int8)] * 2)),
    "the largest int64 on Metal": ("mps", RuntimeError, "187976", lambda d: torch.arange(3, device=d).amax()),
    "two dtypes on XPU": ("xpu", RuntimeError, "same dtype", lambda d: torch.mm(torch.ones(2, 2, device=d), torch.ones(2, 2, device=d).half())),
    "a wide product on XPU": ("xpu", NotImplementedError, "mm.dtype", lambda d: torch.mm(*[torch.ones(2, 2, device=d).half()] * 2, out_dtype=torch.float32)),
    "float64 on XPU": ("xpu", RuntimeError, "aspect fp64", lambda d: torch.ones(2, dtype=torch.float64).to(d) * 2),
    "bf16 on DirectML": ("privateuseone", RuntimeError, "unsupported data type Bfloat16", lambda d: torch.ones(2).bfloat16().to(d)),
    "float64 on DirectML": ("privateuseone", RuntimeError, r"Double \(Float64\)", lambda d: torch.ones(2, device=d).double()),
    "int8 on DirectML": ("privateuseone", NotImplementedError, "DML", lambda d: torch._int_mm(*[torch.ones(32, 32, device=d).to(torch.int8)] * 2)),
    "two dtypes on CUDA": ("cuda", RuntimeError, "same dtype", lambda d: torch.mm(torch.ones(2, 2, device=d), torch.ones(2, 2, device=d).half())),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_the_rule_book_refuses(on, what):
    kind, error, words, action = REFUSED[what]
    where = on(kind).device()
    with pytest.raises(error, match=words):
        action(where)


def test_norms_of_metal_lose_nan_and_the_pack_finds_that_out(on):
    from halfsafe.precision import amax

    x = torch.tensor([1.0, float("nan")])
    assert torch.linalg.vector_norm(x.to(on("mps").device()), float("inf")).item() == 1.0
    assert amax.norm_loses_nan(torch.device("mps", 0)) and amax.amax(x.to(torch.device("mps", 0))).isnan().item()
