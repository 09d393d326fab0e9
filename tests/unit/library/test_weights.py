"""Stored weights are computed when they are read: judged beside code that reads, copies, saves, casts, ties them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.errors import HalfsafeError
from halfsafe.precision.library.applied import Applied, apply, restore
from support.measures import relative_error, summed_alike
from support.threads import in_threads
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

pytestmark = pytest.mark.usefixtures("without_gradients")

STORAGES = ["fp8_e4m3fn", "fp8_e5m2", "fp16", "bf16"]
BOUND = {"fp8_e4m3fn": 0.06, "fp8_e5m2": 0.12, "fp16": 1e-3, "bf16": 8e-3}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


class FeedForward(nn.Module):
    """As in T5 and UMT5 of transformers: what is given to ``wo`` is cast to the dtype of its weight."""

    def __init__(self):
        super().__init__()
        self.wi, self.wo = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        hidden = F.gelu(self.wi(x)) * 300
        return self.wo(hidden.to(self.wo.weight.dtype))


class Windows(nn.Module):
    """As in torchvision's Swin and transformers' Mamba: weights are arguments of a function."""

    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        return F.linear(F.scaled_dot_product_attention(q, k, v), self.proj.weight, self.proj.bias)


class LowRank(nn.Module):
    """As PEFT's LoRA: a branch in the dtype of its own weights beside a base layer."""

    def __init__(self):
        super().__init__()
        self.base, self.down, self.up = nn.Linear(32, 32), nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x.to(self.down.weight.dtype))).to(x.dtype)


class FirstParameter(nn.Module):
    """As in transformers and diffusers: the dtype of a model is that of its first parameter."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)

    def forward(self, x):
        return self.down(self.up(x.to(next(self.parameters()).dtype)).relu())


class MyLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias) * 2


class Subclass(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = MyLinear(32, 32)

    def forward(self, x):
        return self.one(x)


class Attention(nn.Module):
    """Torch's fused kernel reads the weights of this layer without a call of the modules inside."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)

    def forward(self, x):
        return self.layer(x[None])[0]


MODELS = [FeedForward, Windows, LowRank, FirstParameter, Subclass, Attention]


def made(cls: Callable[[], nn.Module] = FeedForward, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return cls().eval().to(dtype)


def some(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def weight_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("cls", MODELS)
def test_code_that_reads_weights_runs_in_the_dtype_of_the_module(cls, storage, dtype):
    model = made(cls, dtype)
    exact, before, names = copy.deepcopy(model).float()(some()), weight_bytes(model), set(model.state_dict())
    with apply(model, storage=storage, rules="* storage=" + storage, keep=True) as handle:
        result = model(some(dtype))
        rounding = 0.03 if dtype == torch.bfloat16 else 2e-3
        assert result.dtype == dtype and relative_error(exact, result) < BOUND[storage] + rounding
        assert set(model.state_dict()) == names
        stored_size = 1 if storage.startswith("fp8") else 2
        assert handle.stored or dtype.itemsize == stored_size, handle.kept
        assert weight_bytes(model) < before or dtype.itemsize == stored_size


def test_a_first_parameter_and_a_weight_have_the_dtype_of_the_module():
    model = made(FirstParameter, torch.bfloat16)
    apply(model, storage="fp8_e4m3fn")
    assert next(model.parameters()).dtype == model.up.weight.dtype == torch.bfloat16
    assert type(model.up).__name__ == "Linear" and isinstance(model.up, nn.Linear)


@pytest.mark.parametrize("cls", [FeedForward, Windows, LowRank])
def test_threads_that_share_a_module_get_the_same_results(cls):
    model = made(cls)
    original = model.state_dict()
    with apply(model, storage="fp8_e4m3fn", keep=True):
        expected = model(some())
        found = in_threads(lambda: model(some()))
        assert [one for one in found if not torch.is_tensor(one) or not torch.equal(one, expected)] == []
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_dict_taken_while_applied_is_right_in_a_plain_model(storage, strict):
    model, plain = made(), made(seed=1)
    apply(model, storage=storage)
    state = model.state_dict()
    assert plain.load_state_dict(state, strict=strict) == ([], [])
    assert summed_alike(model(some()), plain(some())) and {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_state_dict_that_is_loaded_while_applied_is_stored(storage, keep, assign):
    model, other = made(), made(seed=1)
    apply(model, storage=storage, keep=keep)
    assert model.load_state_dict(other.state_dict(), assign=assign) == ([], [])
    assert 0 < relative_error(other(some()), model(some())) < BOUND[storage]
    restore(model)
    error = relative_error(other(some()), model(some()))
    assert error == 0 if keep else error < BOUND[storage]
    assert {parameter.data_ptr() for parameter in model.parameters()} & {
        p.data_ptr() for p in other.parameters()
    } == set()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state.pop("wo.weight"), 'Missing key.*"wo.weight"'),
        (
            lambda state: state.update({"wo.weight": torch.zeros(3, 3)}),
            r"wo\.weight: size mismatch, \(3, 3\) for \(32, 64\)",
        ),
        (lambda state: state["wo.weight"].fill_(float("nan")), r"wo\.weight holds NaN"),
        (lambda state: state["wo.weight"].fill_(7e4), r"wo\.weight: values up to 7e\+04 are too large for fp16"),
        (lambda state: state.update({"wo.scale": torch.ones(1)}), 'Unexpected key.*"wo.scale"'),
    ],
)
def test_a_state_dict_that_cannot_be_stored_is_refused(damage, words):
    model = made()
    apply(model, storage="fp16")
    before, state = model(some()), copy.deepcopy(made().state_dict())
    damage(state)
    with pytest.raises((RuntimeError, HalfsafeError), match=words):
        model.load_state_dict(state)
    assert torch.equal(model(some()), before)


def by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


def by_torch(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("copied", [copy.deepcopy, by_pickle, by_torch])
def test_a_copy_of_a_stored_model_is_one_too(copied, keep):
    model = made()
    exact = model(some())
    apply(model, storage="fp8_e4m3fn", keep=keep)
    twin, stored = copied(model), model(some())
    restore(model)
    assert summed_alike(stored, twin(some())) and "fp8_e4m3fn" in repr(twin)
    restore(twin)
    assert type(twin.wo) is nn.Linear and summed_alike(exact if keep else stored, twin(some()))
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_module_that_is_cast_while_applied_and_restored_has_one_dtype(storage, dtype, keep):
    model = made()
    exact = model(some())
    apply(model, storage=storage, keep=keep)
    codes = [buffer.clone() for buffer in model.buffers()]
    model.to(dtype)
    assert all(torch.equal(buffer, code) for buffer, code in zip(model.buffers(), codes, strict=True)), (
        "no code is cast"
    )
    assert model.wi.weight.dtype == dtype and relative_error(exact, model(some(dtype))) < BOUND[storage] + 0.01
    restore(model)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert relative_error(exact, model(some(dtype))) < (0.01 if keep else BOUND[storage] + 0.01)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.one, self.two, self.head = (
            nn.Embedding(64, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 32),
            nn.Linear(32, 64),
        )
        self.two.weight, self.head.weight = self.one.weight, self.table.weight

    def forward(self, tokens):
        return self.head(self.two(self.one(self.table(tokens))))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("how", [lambda model: model, copy.deepcopy, by_pickle, lambda model: model.bfloat16()])
def test_tied_weights_stay_tied_and_get_no_larger(how, keep):
    model = made(Tied)
    before = weight_bytes(model)
    handle = apply(model, storage="fp8_e4m3fn", rules="* storage=fp8_e4m3fn", keep=keep)
    assert handle.stored == dict.fromkeys(("one", "two"), "fp8_e4m3fn") and "table and head" in handle.kept["head"]
    assert weight_bytes(model) < before
    assert model.head.weight is model.table.weight, "an embedding is not stored in fp8, so its twin is not"
    model = how(model)
    model(torch.arange(4))
    restore(model)
    assert model.two.weight is model.one.weight and weight_bytes(model) <= before


@pytest.mark.parametrize("first", ["parent", "child"])
def test_storage_of_a_part_and_compute_of_the_whole_in_either_order(first):
    model = nn.Sequential(made(), made(seed=1))
    exact = model(some())
    steps = [lambda: apply(model, compute="bf16"), lambda: apply(model[1], storage="fp8_e4m3fn", keep=True)]
    for step in steps if first == "parent" else reversed(steps):
        step()
    assert relative_error(exact, model(some())) < 0.07
    restore(model[1] if first == "parent" else model)
    assert relative_error(exact, model(some())) < 0.07
    restore(model if first == "parent" else model[1])
    assert torch.equal(model(some()), exact)


def test_storage_of_a_part_and_of_the_whole():
    model = nn.Sequential(made(), made(seed=1))
    exact = model(some())
    apply(model[1], storage="fp8_e4m3fn", keep=True)
    handle = apply(model, storage="bf16", keep=True)
    assert set(handle.kept) == {"1.wi", "1.wo"} and relative_error(exact, model(some())) < 0.07
    restore(model)
    restore(model[1])
    assert torch.equal(model(some()), exact)


@pytest.mark.parametrize("key", ["0 storage=int8", "0 compute=fp8", "0 compute=int8"])
def test_a_rule_with_a_value_that_no_module_can_have_is_refused(key):
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    before = model[0].weight.clone()
    with pytest.raises(HalfsafeError, match=key):
        apply(model, storage="bf16", compute="bf16", rules=key)
    restore(model)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("settings", "rule", "words"),
    [
        ({"storage": "bf16"}, "nothing.* storage=fp16", "matches no layer"),
        ({"storage": "bf16"}, "0 compute=fp32", "no compute"),
        ({"storage": "bf16"}, "0 stream=fp32", "no stream"),
        ({"compute": "bf16"}, "0 storage=bf16", "no storage"),
        ({"compute": "bf16", "storage": "bf16"}, "0 accumulation=fp32", "no accumulation"),
    ],
)
def test_a_rule_that_cannot_act_is_reported(settings, rule, words):
    handle = apply(nn.Sequential(nn.Linear(32, 32)).eval(), **settings, rules=rule + "\n* storage=fp16")
    assert any(words in reason for found, reason in handle.without_effect if found == rule)
    assert ("* storage=fp16" in dict(handle.without_effect)) is ("storage" not in settings)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp8_e5m2", "fp16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("amax", [1e-30, 1e-7, 3e-5, 1e-3, 1.0, 300.0, 65504.0, 1e20, 3.4e38])
def test_a_weight_is_stored_right_or_kept(storage, dtype, amax):
    layer = nn.Linear(64, 64, bias=False).eval()
    layer.weight.copy_(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).clamp(-4, 4) * (amax / 4))
    layer.to(dtype)
    weight = layer.weight.clone()
    if not weight.isfinite().all() or not weight.any():
        return
    handle = apply(layer, storage=storage)
    assert relative_error(weight, layer.weight) < BOUND[storage] / 2
    assert (
        bool(handle.stored)
        or bool(handle.kept)
        or storage == {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)
    )
    if 1e-3 <= amax <= 300 and dtype == torch.float32:
        assert handle.stored == {"": storage}


def test_a_weight_of_zeros_or_of_no_values_is_stored():
    model = nn.Sequential(nn.Linear(32, 0), nn.Linear(0, 32), nn.Linear(32, 32)).eval()
    model[2].weight.zero_()
    handle = apply(model, storage="fp8_e4m3fn")
    expected = (model[1].bias @ model[2].weight.T + model[2].bias).expand(8, -1)
    assert len(handle.stored) == 3 and summed_alike(expected, model(some()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_weight_that_holds_codes_or_complex_numbers_is_kept(dtype, storage):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    model[0].weight = nn.Parameter(model[0].weight.to(dtype), requires_grad=False)
    handle = apply(model, storage=storage)
    assert (
        set(handle.stored) == {"1"}
        and str(dtype).removeprefix("torch.").split("_")[0].replace("float", "fp") in handle.kept["0"]
    )
    assert model[0].weight.dtype == dtype


@pytest.mark.parametrize(
    "settings", [{"storage": "fp8_e4m3fn"}, {"storage": "bf16"}, {"compute": "fp16_safe"}], ids=str
)
def test_a_module_on_the_meta_device_is_refused_and_can_be_applied_to_later(settings):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).to("meta").eval()
    for _ in range(2):
        with pytest.raises(HalfsafeError, match=r"0\.weight is on the meta device"):
            apply(model, **settings)
    model.to_empty(device="cpu").apply(lambda layer: layer.reset_parameters() if isinstance(layer, nn.Linear) else None)
    apply(model, **settings)
    restore(model)


@pytest.mark.parametrize("settings", [{"storage": "fp8_e4m3fn"}, {"compute": "bf16"}], ids=str)
def test_a_scripted_module_is_refused(settings):
    with pytest.raises(HalfsafeError, match="scripted"):
        apply(torch.jit.script(nn.Sequential(nn.Linear(32, 32))), **settings)


def test_a_layer_whose_forward_was_replaced_is_stored():
    """As accelerate's ``add_hook_to_module`` does."""
    model = made()
    exact, forward = model(some()), model.wo.forward
    model.wo.forward = lambda *args, **kwargs: forward(*args, **kwargs)
    handle = apply(model, storage="fp8_e4m3fn")
    assert set(handle.stored) == {"wi", "wo"} and 0 < relative_error(exact, model(some())) < 0.06


def test_a_layer_is_called_by_keyword():
    layer = nn.Linear(32, 32).eval()
    apply(layer, storage="fp8_e4m3fn")
    assert torch.equal(layer(input=some()), layer(some()))


def test_a_stored_weight_cannot_be_set():
    model = made()
    apply(model, storage="fp8_e4m3fn")
    before = model(some())
    for value in (nn.Parameter(torch.zeros(32, 64)), torch.zeros(32, 64), None):
        with pytest.raises(HalfsafeError, match="fp8_e4m3fn cannot be set.*restore"):
            model.wo.weight = value
    assert torch.equal(model(some()), before)


@pytest.mark.parametrize("compute", [None, "bf16", "fp16_safe"])
@pytest.mark.parametrize("given", [nn.Module.state_dict, lambda model: dict(model.named_parameters())])
def test_a_functional_call_runs_with_the_weights_it_is_given(given, compute):
    model, other = made(Windows), made(Windows, seed=1)
    before = apply(model, storage="fp8_e4m3fn", compute=compute) and model(some())
    assert relative_error(other(some()), torch.func.functional_call(model, given(other), some())) < 0.02
    assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), some()), before)
    assert torch.equal(model(some()), before)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_stored_model_is_exported_mapped_and_traced_on_fake_tensors(storage):
    model = made(Windows)
    apply(model, storage=storage)
    assert torch.equal(torch.export.export(model, (some(),)).module()(some()), model(some()))
    assert relative_error(model(some()), torch.func.vmap(model)(some()[None])[0]) < 1e-6
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(some()).shape == (8, 32)


def test_a_replica_computes_its_weights():
    """As ``torch.nn.parallel.replicate`` does for each device: what it copied is set on a module without parameters."""
    layer = nn.Linear(32, 32).eval()
    apply(layer, storage="fp8_e4m3fn")

    def replicated(module: nn.Module) -> nn.Module:
        replica = module._replicate_for_data_parallel()
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                setattr(replica, name, tensor.clone())
        for name, inner in module._modules.items():
            setattr(replica, name, replicated(inner))
        return replica

    replica = replicated(layer)
    assert summed_alike(layer(some()), replica(some())) and torch.equal(replica.weight, layer.weight)


def test_parameters_have_the_names_and_the_order_of_before():
    model = made(Windows)
    names = [name for name, _ in model.named_parameters()]
    apply(model, storage="fp8_e4m3fn")
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())


IN_PLACE = [name for name in dir(torch.Tensor) if name.endswith("_") and not name.startswith("_")]
WRITES_NO_NUMBERS = {"requires_grad_", "detach_", "share_memory_", "rename_"}
REFUSED_BY_TORCH = {"float_power_"}  # its result is float64
OF_TYPE = {"Tensor": torch.ones(64, 64), "number": 1, "float": 1.0, "int": 0, "List[int]": [64, 64], "str": "sum"}


def arguments(name: str) -> list[tuple]:
    """Arguments for a method of tensors, by each of its schemas; as Python functions take them where it has none."""
    ones, packet = OF_TYPE["Tensor"], getattr(torch.ops.aten, name, None)
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()] if packet else []
    needed = [[str(one.type) for one in schema.arguments[1:] if not one.has_default_value()] for schema in schemas]
    indices = torch.zeros(64, 64, dtype=torch.long)
    by_schema = [tuple(OF_TYPE.get(kind, [indices]) for kind in kinds) for kinds in needed]
    with_indices = [(0, indices, *rest) for rest in [(1,), (ones,), (ones, "sum"), (ones, "mean")]]
    return [*by_schema, *with_indices, (0, indices[0], ones), (0, indices[0], ones, "mean"), (ones, max), (ones, ones, max), (abs,)]


@pytest.mark.parametrize("name", sorted({*IN_PLACE} - WRITES_NO_NUMBERS))
def test_every_method_that_writes_into_a_stored_weight_is_refused(name):
    model, outcomes = made(), []
    apply(model, storage="fp8_e4m3fn")
    for args in arguments(name):
        try:
            getattr(model.wo.weight, name)(*args)
            outcomes.append("lost")
        except Exception as error:
            outcomes.append(type(error).__name__)
    assert "lost" not in outcomes and ("HalfsafeError" in outcomes or name in REFUSED_BY_TORCH), outcomes


WRITERS = {
    "data +=": lambda weight, delta: setattr(weight, "data", weight.data + delta),
    "data = ": lambda weight, delta: setattr(weight, "data", delta),
    "data.copy_": lambda weight, delta: weight.data.copy_(delta),
    "[0] =": lambda weight, delta: weight.__setitem__(0, 1.0),
    "view": lambda weight, delta: weight[0].add_(1.0),
    "set_": lambda weight, delta: weight.set_(delta),
    "set_ of a view": lambda weight, delta: weight[0].set_(delta),
    "chunk": lambda weight, delta: weight.chunk(2)[0].zero_(),
    "split": lambda weight, delta: weight.split(4, 1)[-1].copy_(delta[:, :4]),
    "unbind": lambda weight, delta: [row.zero_() for row in weight],
    "view of a part": lambda weight, delta: weight.chunk(2)[0].T.mul_(2),
    "operator": lambda weight, delta: torch.ops.aten.mul_.Scalar(weight, 2.0),
    "apply_": lambda weight, delta: weight.apply_(abs),
    "map2_": lambda weight, delta: weight.map2_(delta, delta, lambda one, two, three: one),
    "dlpack": lambda weight, delta: torch.from_dlpack(weight).zero_(),
    "all parameters": lambda weight, delta: nn.utils.vector_to_parameters(delta.flatten(), [weight]),
    "view of a view": lambda weight, delta: weight.T[0].detach().zero_(),
    "+=": lambda weight, delta: weight.__iadd__(delta),
    "out": lambda weight, delta: torch.add(delta, delta, out=weight),
    "init": lambda weight, delta: nn.init.normal_(weight),
    "init by name": lambda weight, delta: nn.init.zeros_(tensor=weight),
    "function": lambda weight, delta: torch.relu_(weight),
    "inplace=True": lambda weight, delta: F.relu(weight, inplace=True),
    "list": lambda weight, delta: torch._foreach_add_([delta, weight], 1.0),
}
"""PEFT merges a LoRA by ``weight.data += delta`` and takes a safe merge back by ``weight.data = before``."""


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "bf16"])
@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_what_is_written_into_a_stored_weight_is_refused(write, storage):
    model = made()
    apply(model, storage=storage)
    before = model(some())
    with pytest.raises(HalfsafeError, match=r"cannot be written into.*restore\(module\)"):
        write(model.wo.weight, torch.ones(model.wo.weight.shape))
    assert torch.equal(model(some()), before)


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "fp16"])
@pytest.mark.parametrize("array", [lambda weight: weight.numpy(), np.asarray, lambda weight: weight[0].detach().numpy(), lambda weight: weight.numpy().T])
def test_an_array_of_a_stored_weight_can_be_read_and_not_written_into(array, storage):
    model = made()
    apply(model, storage=storage)
    plain = model.state_dict()["wo.weight"]
    assert np.array_equal(array(model.wo.weight), array(plain)) and model.wo.weight.tolist() == plain.tolist()
    with pytest.raises(ValueError, match="read-only"):
        array(model.wo.weight)[0] = 1.0


@pytest.mark.parametrize("inference", [True, False])
def test_a_copy_of_a_stored_weight_can_be_written_into(inference):
    model = made()
    apply(model, storage="fp8_e4m3fn")
    with torch.inference_mode(inference):
        weight = model.wo.weight
        copies = [weight.clone(), weight.bfloat16(), weight.T.reshape(-1), weight.T.contiguous(), weight.chunk(2)[0] + 0, torch.cat(weight.split(4)), weight.numpy().copy()]
        for one in copies:
            one *= 2
        assert all(type(one) is not type(weight) for one in copies) and torch.equal(model.wo.weight, weight)


def test_a_stored_weight_is_read_by_functions_that_write_elsewhere():
    model = made()
    apply(model, storage="fp8_e4m3fn")
    weight, sums = model.wo.weight, torch.zeros(model.wo.weight.shape)
    sums.add_(weight).copy_(weight)
    torch.mul(weight, 1.0, out=sums)
    nn.Linear(64, 32).weight.data.copy_(weight)
    nn.Parameter(weight.clone()).data.add_(1.0)
    assert torch.equal(sums, weight) and weight.requires_grad_(False) is not None


def test_a_stored_weight_that_is_read_is_saved_and_computed_with_as_a_tensor():
    model = made()
    apply(model, storage="fp8_e4m3fn")
    weight = model.wo.weight
    assert {type(one) for one in (weight + 1, weight.clone(), weight.to(torch.bfloat16), copy.deepcopy(weight))} == {torch.Tensor}
    assert type(pickle.loads(pickle.dumps(weight))) is torch.Tensor
    assert {type(one) for one in model.state_dict().values()} == {torch.Tensor}
    file = io.BytesIO()
    torch.save({"weight": weight}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"], weight)


@pytest.mark.parametrize("settings", [{"storage": "fp8_e4m3fn"}, {"compute": "bf16"}], ids=str)
def test_a_lazy_layer_is_refused(settings):
    model = nn.Sequential(nn.Linear(32, 32), nn.LazyLinear(8)).eval()
    with pytest.raises(HalfsafeError, match=r"1\.weight is .* of a lazy layer"):
        apply(model, **settings)


@pytest.mark.parametrize("settings", [{"storage": "fp8_e4m3fn"}, {"compute": "bf16"}], ids=str)
def test_a_copy_of_a_weight_that_is_computed_already(settings):
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32)).eval()
    apply(model, **settings)
    twin = copy.deepcopy(model)
    assert all(torch.equal(*pair) for pair in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    assert relative_error(model(some()), twin(some())) < (2**-20 if "storage" in settings else 2**-8)


def test_a_weight_that_is_computed_already_is_kept():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32)).eval()
    handle = apply(model, storage="fp8_e4m3fn")
    assert set(handle.kept) == {"0"} and set(handle.stored) == {"1"}


def test_parameters_keep_their_order():
    model = made(Windows)
    names = [name for name, _ in model.named_parameters()]
    apply(model, storage="fp8_e4m3fn")
    restore(model)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("storage", STORAGES)
def test_stored_weights_are_traced_into_one_graph(storage):
    model = made()
    apply(model, storage=storage)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(some()), model(some()))


def test_the_result_tells_what_was_done():
    handle = apply(nn.Sequential(nn.Linear(32, 32), nn.Conv1d(4, 4, 1)).eval(), storage="fp8_e4m3fn")
    assert isinstance(handle, Applied) and handle.stored == {"0": "fp8_e4m3fn"} and list(handle.kept) == ["1"]
    assert handle.without_effect == []
    handle.remove()
