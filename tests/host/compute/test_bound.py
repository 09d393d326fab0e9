"""A quantized layer whose weight is looked up once: which product runs, what it reads, and its error, for each storage and compute option."""

from __future__ import annotations

import contextlib
import gc
import os
import weakref

import pytest
import torch
import torch.nn.functional as F
from comfy import ops as comfy_ops
from comfy.quant_ops import QuantizedTensor
from halfsafe.nodes.host.comfyui.layers import modules_of
from halfsafe.nodes.host.comfyui.weights import Bound
from halfsafe.nodes.host.compute.bound import Fp8Linear, Int8Linear
from halfsafe.nodes.host.compute.executor import COMPUTE, compute_of
from halfsafe.nodes.host.replay.interceptor import Interceptor
from halfsafe.precision.base.patching import patched
from support import families
from support.bound_layers import note_bound
from support.dynamic_vram import WAYS, dynamic_vram
from support.families import load
from support.leaf_operations import LeafOperations
from support.matmul_spy import Products
from support.measures import relative_error
from support.model_files import WAN_LINEARS
from support.rows import all_of, rotated

COMPUTES = ("auto", "bf16", "fp16", "fp16_safe", "fp32", "fp8", "int8")
STORAGES = ("fp8_e4m3fn", "fp8_e5m2", "int8")
LAYER = "blocks.0.ffn.0"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def _device(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")


@pytest.fixture(scope="module")
def stored(comfy, wan):
    """Storage -> a model whose layers are called alone; no test changes them."""
    with torch.inference_mode():
        return {storage: load(comfy, wan, storage, "bf16") for storage in STORAGES}


def linears(model) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in modules_of(model.model).items() if name in WAN_LINEARS}


def expected_mode(storage: str, compute: str) -> str:
    if storage == "int8" and compute in ("auto", "fp8", "int8"):
        return "int8"
    own = {"auto": "fp16", "int8": "fp16", "fp16_safe": "fp16_wide"}
    return own.get(compute, compute)


class ReadsOfStoredData(LeafOperations):
    """Counts the operations on 8-bit matrices that give a matrix of another dtype, and the products that take one: shape -> names."""

    def __init__(self):
        super().__init__()
        self.seen: dict[torch.Size, list[str]] = {}

    def leaf(self, func, args, kwargs):
        result = func(*args, **kwargs)
        for each in args:
            stored = isinstance(each, torch.Tensor) and each.dtype.itemsize == 1 and each.dim() == 2
            if stored and not (isinstance(result, torch.Tensor) and result.dtype == each.dtype):
                self.seen.setdefault(each.shape, []).append(func.name().removeprefix("aten::"))
        return result


@contextlib.contextmanager
def dispatches(monkeypatch):
    """The operations that comfy-kitchen's tensor subclass is asked for, and its own conversions."""
    seen, own = [], QuantizedTensor.__torch_dispatch__.__func__

    def dispatch(cls, func, types, args=(), kwargs=None):
        seen.append(func.name())
        return own(cls, func, types, args, kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(QuantizedTensor, "__torch_dispatch__", classmethod(dispatch))
        patch.setattr(QuantizedTensor, "dequantize", lambda self: seen.append("dequantize"))
        yield seen


@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("storage", STORAGES)
@torch.inference_mode()
def test_a_clean_call_makes_the_planned_product_without_the_tensor_subclass(
    comfy, wan, call, storage, compute, monkeypatch
):
    model = load(comfy, wan, storage, compute)
    families.replay(model, call)
    with dispatches(monkeypatch) as asked, Products(linears(model)) as products:
        families.replay(model, call)
    assert products.modes() == dict.fromkeys(WAN_LINEARS, expected_mode(storage, compute))
    assert asked == []
    modes = {
        layer["name"]: layer["mode"].replace("fp16_scaled", "fp16_wide")
        for layer in families.report(comfy, model)["layers"]
    }
    assert {name: modes[name] for name in WAN_LINEARS} == products.modes()


@pytest.mark.parametrize(
    ("storage", "compute"),
    [("fp8_e4m3fn", "fp8"), ("fp8_e4m3fn", "bf16"), ("fp8_e4m3fn", "fp16_safe"), ("int8", "int8")],
)
@torch.inference_mode()
def test_a_layers_own_scale_of_its_input_is_applied(comfy, wan, call, storage, compute):
    """`pre_quant_scale`, of AWQ."""
    plain, exact, result = (load(comfy, wan, storage, each) for each in ("fp32", "fp32", compute))
    for model in (exact, result):
        linears(model)[LAYER].register_buffer("pre_quant_scale", torch.full((256,), 40.0))
    plain, exact, result = (families.replay(model, call) for model in (plain, exact, result))
    assert relative_error(exact, result) < 0.3 * relative_error(exact, plain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", STORAGES)
@torch.inference_mode()
def test_a_call_reads_the_stored_data_once(stored, storage, dtype):
    module = linears(stored[storage])[LAYER]
    x = torch.randn(4, 256).to(dtype)
    in_8_bits = (Int8Linear, "comfy_kitchen::int8_linear") if storage == "int8" else (Fp8Linear, "_scaled_mm")
    for product, reads in ((Bound, "to"), in_8_bits):
        bound = product(module)
        bound(x)
        with ReadsOfStoredData() as spy:
            bound(x)
        shape = module.weight.shape[::-1] if product is Fp8Linear else module.weight.shape
        assert [name.partition(".")[0] for name in spy.seen[shape]] == [reads]


def with_scale(weight: torch.Tensor, factor: float, layout: str = "") -> torch.nn.Parameter:
    """A copy of a quantized weight with its scale times a factor that is no power of two."""
    params = weight.params
    changed = type(params)(**{**vars(params), "scale": params.scale * factor})
    return torch.nn.Parameter(
        QuantizedTensor(weight._qdata, layout or weight._layout_cls, changed), requires_grad=False
    )


def exact_numbers(module: torch.nn.Module) -> torch.Tensor:
    return module.weight._qdata.double() * module.weight.params.scale.double()


@pytest.mark.parametrize("factor", [1.0, 1.37])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2"])
@torch.inference_mode()
def test_the_error_to_fp64_is_at_most_comfyuis(stored, storage, dtype, factor, monkeypatch):
    module = linears(stored[storage])[LAYER]
    monkeypatch.setitem(module._parameters, "weight", with_scale(module.weight, factor))
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    exact = F.linear(x.double(), exact_numbers(module), module.bias.double())
    ours, core = (
        relative_error(exact, run(x).double()) for run in (Bound(module), lambda x: type(module).forward(module, x))
    )
    assert ours <= core * (1 + 1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_int8_products_and_unpacked_int8_weights_have_comfyuis_bits(stored, dtype):
    module = linears(stored["int8"])[LAYER]
    x = torch.randn(2, 8, 256, generator=torch.Generator().manual_seed(1)).to(dtype)
    quantized = F.linear(
        x,
        QuantizedTensor(module.weight._qdata, module.weight._layout_cls, module.weight.params).to(dtype),
        module.bias.to(dtype),
    )
    assert torch.equal(Int8Linear(module)(x), quantized)
    assert torch.equal(Bound(module)(x), F.linear(x, module.weight.to(dtype).dequantize(), module.bias.to(dtype)))


@pytest.mark.parametrize("shape", [(256,), (3, 256), (2, 5, 256), (0, 256)])
@pytest.mark.parametrize("product", [Bound, Fp8Linear])
@torch.inference_mode()
def test_every_rank_of_input_with_and_without_a_bias(stored, monkeypatch, product, shape):
    module = linears(stored["fp8_e4m3fn"])[LAYER]
    for bias in (module.bias, None):
        monkeypatch.setitem(module._parameters, "bias", bias)
        x = torch.randn(shape).bfloat16()
        result = product(module)(x)
        expected = F.linear(x.float(), module.weight.dequantize().float(), None if bias is None else bias.float())
        assert result.shape == expected.shape and result.dtype == x.dtype
        assert not x.numel() or relative_error(expected, result) < 0.06


@torch.inference_mode()
def test_fp16_sums_are_those_of_scaled_weights(stored, monkeypatch):
    """torch lets a device keep parts of a sum in fp16, which sums of unscaled fp8 data overflow."""
    module, largest = linears(stored["fp8_e4m3fn"])[LAYER], []
    linear = F.linear
    monkeypatch.setattr(
        F, "linear", lambda x, weight, bias: (largest.append(weight.abs().max()), linear(x, weight, bias))[1]
    )
    Bound(module)(torch.randn(4, 256).half())
    assert largest == [module.weight.to(torch.float16).dequantize().abs().max()] and largest[0] < 1


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_a_scale_of_zero_hides_no_nan(stored, monkeypatch, dtype):
    """cuBLAS and BLAS leave out a product with a factor of 0."""
    module = linears(stored["fp8_e4m3fn"])[LAYER]
    weight = with_scale(module.weight, 0.0)
    weight._qdata = torch.full_like(weight._qdata, torch.nan)
    monkeypatch.setitem(module._parameters, "weight", weight)
    assert Bound(module)(torch.ones(1, 256).to(dtype)).isnan().all()


CHANGES = {
    "a function of the weight": lambda module, patch: patch.setattr(
        module, "weight_function", [lambda weight: weight * 2]
    ),
    "a function of the bias": lambda module, patch: patch.setattr(module, "bias_function", [lambda bias: bias * 2]),
    "a weight in 16 bit": lambda module, patch: patch.setitem(
        module._parameters, "weight", torch.nn.Parameter(module.weight.dequantize().bfloat16(), requires_grad=False)
    ),
    "another layout": lambda module, patch: patch.setitem(
        module._parameters, "weight", with_scale(module.weight, 1.0, "TensorCoreNVFP4Layout")
    ),
}


@pytest.mark.parametrize("product", [Bound, Fp8Linear, Int8Linear])
@pytest.mark.parametrize("change", CHANGES)
@torch.inference_mode()
def test_what_is_not_resolved_runs_comfyuis_own_forward(stored, monkeypatch, product, change):
    module, ran = linears(stored["int8" if product is Int8Linear else "fp8_e4m3fn"])[LAYER], []
    monkeypatch.setattr(type(module), "forward", lambda self, x, *args, **kwargs: ran.append((self, args, kwargs)) or x)
    bound, x = product(module), torch.randn(4, 256).bfloat16()
    assert bound(x).shape == (4, 1024) and not ran
    CHANGES[change](module, monkeypatch)
    assert bound(x) is x and ran == [(module, (), {})]


@pytest.mark.parametrize("product", [Bound, Fp8Linear, Int8Linear])
def test_further_arguments_and_gradients_run_comfyuis_own_forward(stored, monkeypatch, product):
    module, ran = linears(stored["int8" if product is Int8Linear else "fp8_e4m3fn"])[LAYER], []
    monkeypatch.setattr(type(module), "forward", lambda self, x, *args, **kwargs: ran.append(kwargs) or x)
    bound = product(module)
    bound(torch.randn(4, 256), more=1)
    bound(torch.randn(4, 256, requires_grad=True))
    assert ran == [{"more": 1}, {}]


@torch.inference_mode()
def test_a_weight_that_comfyui_moves_is_let_go_and_looked_up_anew(stored, monkeypatch):
    module = linears(stored["fp8_e4m3fn"])[LAYER]
    first = with_scale(module.weight, 2.0)
    first._qdata = first._qdata.clone()
    monkeypatch.setitem(module._parameters, "weight", first)
    bound, x = Bound(module), torch.randn(4, 256).bfloat16()
    before, data = bound(x), weakref.ref(first._qdata)
    module._parameters["weight"] = with_scale(first, 0.5)
    module._parameters["weight"]._qdata = first._qdata.clone()
    del first
    gc.collect()
    bias = module.bias.float()
    assert relative_error(before.float() - bias, 2 * (bound(x).float() - bias)) < 0.01
    assert data() is None


@pytest.mark.parametrize(
    ("storage", "compute", "way"), rotated(all_of(STORAGES, ("bf16", "fp16", "fp8", "int8")), WAYS)
)
@torch.inference_mode()
def test_under_dynamic_vram_a_weight_is_lent_once_and_given_back(comfy, wan, call, storage, compute, way):
    model = load(comfy, wan, storage, compute)
    expected = [families.replay(model, call) for _ in range(2)][-1]
    with dynamic_vram(model, way) as lender:
        results = [families.replay(model, call) for _ in range(2)]
        assert not lender.out
    assert all(torch.equal(result, expected) for result in results)


@torch.inference_mode()
def test_a_model_whose_plan_changes_nothing_has_its_fp8_layers_bound_in_calls_alone(comfy, wan, call, monkeypatch):
    own = load(comfy, wan, "as_file", "bf16")
    model = load(comfy, wan, "fp8_e4m3fn", "bf16")
    assert not compute_of(model).plan.exchanges
    assert COMPUTE in Interceptor.on(model).stages and COMPUTE not in Interceptor.on(own).stages
    seen = note_bound(monkeypatch)
    families.replay(model, call)
    assert {id(module) for module in seen} == {id(module) for module in linears(model).values()}
    assert not [name for name, module in modules_of(model.model).items() if "forward" in vars(module)]


@pytest.mark.skipif(
    not hasattr(comfy_ops, "linear_input_act") or bool(os.environ.get("HALFSAFE_NEXT_CORE")),
    reason="the core under test has no linear_input_act",
)
@torch.inference_mode()
def test_comfyuis_kernel_with_a_fused_activation_runs_beside_a_bound_layer(comfy, wan, call, monkeypatch):
    model, fused = load(comfy, wan, "int8", "int8"), []
    families.replay(model, call)
    run, module = compute_of(model).runs.last_of(model), linears(model)["blocks.0.ffn.2"]
    kitchen = comfy_ops.quant_ops.ck
    own = kitchen.int8_linear
    monkeypatch.setattr(
        kitchen, "int8_linear", lambda *args, **kwargs: fused.append(kwargs["input_act"]) or own(*args, **kwargs)
    )
    with run.calling:
        for dtype in (module.weight.dtype, torch.float32):
            with patched(run.patches):
                comfy_ops.linear_input_act(module, torch.randn(4, 1024).to(dtype), "gelu_tanh")
    assert fused == ["gelu_tanh"], "a weight of another dtype than the input's would be dequantized there"


@torch.inference_mode()
def test_a_refused_fp8_product_unpacks_the_weight_that_was_lent_by_its_own_scale(stored, monkeypatch):
    """A weight with merged patches is lent under dynamic VRAM, with another scale than the module's."""
    module = linears(stored["fp8_e4m3fn"])[LAYER]
    x = torch.randn(4, 256)
    patched_weight = with_scale(module.weight, 3.0)
    bound = Fp8Linear(module)
    assert bound.is_ready(x)

    def refuse(*args, **kwargs):
        raise RuntimeError("refused")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    result = bound.product_for(x, patched_weight)(x, patched_weight._qdata, patched_weight._params.scale, None)
    assert relative_error(F.linear(x, patched_weight.dequantize().float()), result) < 1e-2
