"""comfy-kitchen's functions of its CUDA backend as layers are bound to them; its library of C notes what it is given."""

from __future__ import annotations

import contextlib
import functools
import types
from types import SimpleNamespace

import pytest
import torch
from comfy_kitchen.backends import cuda
from halfsafe.nodes.host.comfyui import kernels
from halfsafe.nodes.host.comfyui.kernels import EXPORT, kernel_that_takes
from halfsafe.nodes.host.compute.bound import Fp8Linear
from support import families
from support.measures import relative_error

E4M3 = torch.float8_e4m3fn
HALF = torch.randn(32, 256, generator=torch.Generator().manual_seed(0)).half()
CODES = torch.arange(512 * 256, dtype=torch.int32).view(512, 256).to(torch.int8)
ROWS, ONE = torch.rand(512, 1), torch.tensor(0.5)
CALLS = {
    "quantize_per_tensor_fp8": (HALF, ONE, E4M3),
    "dequantize_per_tensor_fp8": (HALF.to(E4M3), ONE, torch.float16),
    "dequantize_int8_simple_dtype": (CODES, ROWS, 1),
    "dequantize_int8_convrot_weight_dtype": (CODES, ROWS, 256, 1),
    "int8_linear": (HALF, CODES, ROWS, torch.nn.Parameter(torch.ones(512).half()), torch.float16, True, 256),
    "int8_linear of groups of 64": (HALF, CODES, ROWS, None, torch.float16, True, 64),
}
"""Function -> the arguments of a call; a bias with a gradient cannot be exported by torch itself."""


class Library:
    """Functions of C by any name, which note the name and their arguments: tensors by address, shape and dtype."""

    def __init__(self):
        self.calls: list[tuple] = []

    def __getattr__(self, name: str):
        return lambda *args, **more: self.calls.append((name, *map(self.noted, (*args, *more.values())))) or True

    def noted(self, value):
        if "capsule" not in type(value).__name__.lower():
            return value
        tensor = torch.from_dlpack(value)
        given = {each.data_ptr() for call in CALLS.values() for each in call if isinstance(each, torch.Tensor)}
        return tensor.data_ptr() if tensor.data_ptr() in given else None, tensor.shape, tensor.stride(), tensor.dtype


@pytest.fixture
def library(monkeypatch) -> Library:
    """Have comfy-kitchen's CUDA backend taken for tensors of the CPU, which its library notes."""
    library = Library()
    stream = SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(cuda, "_C", library)
    monkeypatch.setattr(cuda, "torch", SimpleNamespace(**{**vars(torch), "cuda": stream}))
    monkeypatch.setattr(cuda, "_turing_device_cache", {-1: False})
    monkeypatch.setattr(cuda, "_cuda_device_supports_cutlass_int8_dequant", lambda tensor: True)
    taken = SimpleNamespace(get_implementation=lambda name, kwargs: getattr(cuda, name))
    monkeypatch.setattr(kernels, "registry", taken)
    for cached in ("_exporting_in_c", "_copies", "_is_read"):
        monkeypatch.setattr(kernels, cached, functools.cache(getattr(kernels, cached).__wrapped__))
    return library


def bound_to(name: str):
    name = name.partition(" ")[0]
    return getattr(cuda, name), kernel_that_takes(name, first=CALLS[name][0])


@pytest.mark.parametrize("name", CALLS)
def test_the_library_is_given_the_same_tensors_without_torchs_export_in_python(library, monkeypatch, name):
    own, ours = bound_to(name)
    own(*CALLS[name])
    expected, library.calls = library.calls, []
    monkeypatch.setattr(torch.Tensor, "__dlpack__", None)
    ours(*CALLS[name])
    assert library.calls == expected != []
    assert cuda.__dict__[EXPORT].__module__ == cuda.__name__, "nothing is exchanged in comfy-kitchen itself"


def test_an_export_that_was_not_read_runs_as_it_is_and_is_logged_once(library, monkeypatch, caplog):
    monkeypatch.setattr(cuda, EXPORT, lambda tensor: tensor.__dlpack__(stream=None, max_version=(1, 0)))
    with caplog.at_level("INFO", logger="halfsafe"):
        assert all(ours is own for own, ours in map(bound_to, CALLS))
    assert len(caplog.records) == 1 and "exports tensors" in caplog.text


def test_a_package_without_its_source_runs_its_own_functions(library, monkeypatch):
    def no_source(function):
        raise OSError("could not get source code")

    monkeypatch.setattr(kernels.inspect, "getsource", no_source)
    assert all(ours is own for own, ours in map(bound_to, CALLS))


def test_a_copied_function_keeps_the_defaults_of_its_keywords(library):
    names = kernels._copies(cuda.__name__, torch._C._to_dlpack)
    own = {
        name: each for name, each in vars(cuda).items() if isinstance(each, types.FunctionType) and each.__kwdefaults__
    }
    lost = [name for name, each in own.items() if names[name].__kwdefaults__ != each.__kwdefaults__]
    assert own and lost == []


@pytest.mark.parametrize("is_read", [True, False])
def test_with_several_gpus_a_kernel_runs_on_the_device_of_its_tensors(library, monkeypatch, is_read):
    current = [0]

    @contextlib.contextmanager
    def device(index):
        before, current[0] = current[0], index
        yield
        current[0] = before

    if not is_read:
        monkeypatch.setattr(kernels, "EXPORT_READ", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(Library, "noted", lambda self, value: current[0])
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        on = [torch.empty(2, 2, device=f"cuda:{i}") for i in (1, 0, 1)]
    for x in on:
        kernel_that_takes("dequantize_per_tensor_fp8", x=x)(*CALLS["dequantize_per_tensor_fp8"])
    assert [{*call[1:]} for call in library.calls] == [{1}, {0}, {1}] and current == [0]


@torch.inference_mode()
def test_an_fp8_product_of_the_cuda_kernel_is_as_exact_with_a_scale_in_two_launches(library, comfy, wan, monkeypatch):
    """The library quantizes as ``quantize_fp8_tensor_kernel`` does: in fp32, NaN as the smallest number."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")

    def quantize(x, scale, result, *codes):
        x, scale, result = map(torch.from_dlpack, (x, scale, result))
        result.view(E4M3).copy_((x.float() / scale).nan_to_num(-448.0).clamp(-448.0, 448.0))

    layer = families.load(comfy, wan, "fp8_e4m3fn", "fp8").model.diffusion_model.blocks[0].ffn[0]
    x = 3 * torch.randn(64, 256).bfloat16()
    with monkeypatch.context() as eager:
        eager.setattr(kernels.registry, "get_implementation", lambda name, kwargs: by_torch(name))
        product, weight = Fp8Linear(layer), layer.weight.dequantize().float()
        expected = product(x)
        assert [each.args[0][1] for each in product.products.values()] == [False]
    monkeypatch.setattr(library, "quantize_per_tensor_fp8", quantize, raising=False)
    product = Fp8Linear(layer)
    exact = torch.nn.functional.linear(x.float(), weight, layer.bias.float())
    assert relative_error(exact, product(x)) < 1.05 * relative_error(exact, expected)
    assert [each.args[0][1] for each in product.products.values()] == [True]
    for bad in (torch.nan, torch.inf):
        x[3, 5] = bad
        assert not product(x)[3].isfinite().any()
    assert not product(torch.zeros_like(x)).sub(layer.bias.bfloat16()).any()


def by_torch(name: str):
    from comfy_kitchen.backends import eager

    return getattr(eager, name)
