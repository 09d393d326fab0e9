"""A compute dtype holds wherever a module is called from: judged by value, beside fp32 and the plain cast."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.errors import HalfsafeError
from halfsafe.precision.library.applied import apply, restore
from support.measures import relative_error, summed_alike
from support.threads import in_threads
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("without_gradients")

COMPUTES = ["fp16_safe", "fp16", "bf16", "fp32"]
ACTIVATIONS = {"fp16_safe": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
BOUND = {"fp16_safe": 2e-3, "fp16": 4e-3, "bf16": 0.03, "fp32": 1e-6}
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]


class Timed(nn.Module):
    """As diffusers' models: sines of a timestep, cast to what the latent is."""

    def __init__(self):
        super().__init__()
        self.time, self.up, self.norm = nn.Linear(64, 32), nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, hidden_states, timestep):
        angles = timestep.float()[..., None] * torch.exp(torch.arange(32) * -0.2)
        emb = self.time(torch.cat([angles.cos(), angles.sin()], -1).to(hidden_states.dtype))
        return self.norm(self.up(hidden_states)) + 3 * emb


class Coder(nn.Module):
    """As an autoencoder whose users call ``decode``; hidden values exceed fp16's range."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(8, 32)
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.conv = nn.Conv1d(32, 32, 3, padding=1)
        self.gate = nn.Parameter(torch.ones(32))
        self.register_buffer("offset", torch.zeros(32))
        self.up.weight.mul_(600)
        self.down.weight.mul_(600)

    def decode(self, x):
        return self.conv((self.gate * self.norm(self.down(F.gelu(self.up(x))) / 1000) + self.offset).mT).mT

    def forward(self, x):
        return self.decode(self.norm(x) + self.table(torch.arange(8)))


class Windows(nn.Module):
    """As torchvision's Swin and transformers' Mamba: weights, biases and tables are arguments of functions."""

    def __init__(self):
        super().__init__()
        self.qkv, self.wo = nn.Linear(32, 96), nn.Linear(32, 32, bias=False)
        self.logits = nn.Parameter(torch.randn(8, 8))

    def forward(self, x):
        q, k, v = F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        return self.wo(((q @ k.mT + self.logits).softmax(-1) @ v).to(self.wo.weight.dtype))


def made(cls=Coder, dtype=torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return cls().eval().to(dtype)


def some(dtype=torch.float32, size: float = 1.0) -> torch.Tensor:
    return (torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)) * size).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("cls", [Coder, Windows])
def test_weights_that_are_read_have_the_dtype_of_activations(cls, compute, dtype):
    model = made(cls, dtype)
    exact, classes = copy.deepcopy(model).float()(some()), [type(inner) for inner in model.modules()]
    if cls is Coder and compute == "fp16":
        return
    with apply(model, compute=compute):
        result = model(some(dtype))
        assert result.dtype == ACTIVATIONS[compute]
        assert relative_error(exact, result) < BOUND[compute] + (0.01 if dtype == torch.bfloat16 else 1e-3)
    assert [type(inner) for inner in model.modules()] == classes
    assert {tensor.dtype for tensor in model.state_dict().values()} == {dtype}


@pytest.mark.parametrize("compute", COMPUTES)
def test_a_module_that_is_cast_while_applied_computes_as_before(compute):
    model = made(Windows if compute == "fp16" else Coder, ACTIVATIONS[compute])
    exact = copy.deepcopy(model).float()(some())
    apply(model, compute=compute)
    model.double()
    result = model(some())
    assert result.dtype == ACTIVATIONS[compute] and relative_error(exact, result) < BOUND[compute]


@pytest.mark.parametrize("compute", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "timestep", [torch.tensor([937.3, 12.7]), torch.full((2, 8), 937.3), torch.tensor(937.3)], ids=["1-D", "2-D", "0-D"]
)
@pytest.mark.parametrize("named", [True, False])
def test_timesteps_are_not_rounded(compute, timestep, named):
    model, x = made(Timed), some() if timestep.dim() != 1 else some()[:, 0]
    exact, dtype = model(x, timestep), ACTIVATIONS[compute]
    plain = relative_error(exact, copy.deepcopy(model).to(dtype)(x.to(dtype), timestep))
    with apply(model, compute=compute):
        result = model(hidden_states=x, timestep=timestep) if named else model(x, timestep)
    assert result.dtype == dtype and relative_error(exact, result) < 1.2 * plain < 0.01


def test_an_input_of_one_dimension_by_itself_is_cast():
    model = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32)).eval()
    apply(model, compute="bf16")
    assert model(torch.randn(32)).dtype == torch.bfloat16


@pytest.mark.parametrize("first", ["decode", "forward"])
def test_other_methods_compute_as_planned(first):
    model = made()
    exact = {size: (model.decode(some(size=size)), model(some(size=size))) for size in (1.0, 1e3, 1e-3)}
    apply(model, compute="fp16_safe")
    for size, (decoded, called) in exact.items():
        for method in (first, "decode", "forward"):
            expected = decoded if method == "decode" else called
            assert relative_error(expected, getattr(model, method)(some(size=size))) < 2e-3
    restore(model)
    assert not copy.deepcopy(model).half().decode(some(torch.float16)).isfinite().all(), "plain fp16 overflows here"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compute", ["fp16_safe", "fp32"])
@pytest.mark.parametrize("method", ["forward", "decode"])
def test_autocast_does_not_act_inside(dtype, compute, method):
    model = made()
    exact = getattr(model, method)(some())
    apply(model, compute=compute)
    with torch.autocast("cpu", dtype):
        result = getattr(model, method)(some())
    assert result.dtype == torch.float32 and relative_error(exact, result) < BOUND[compute]


@pytest.mark.parametrize("compute", COMPUTES)
def test_threads_get_the_same_results(compute):
    model = made(Windows if compute == "fp16" else Coder)
    apply(model, compute=compute)
    expected = model(some())
    found = in_threads(lambda: model(some()))
    assert [one for one in found if not torch.is_tensor(one) or not torch.equal(one, expected)] == []


def test_threads_that_begin_together_and_call_other_methods_are_right():
    model = made()
    called, decoded = model(some()), model.decode(some())
    apply(model, compute="fp16_safe", storage="fp16")
    found = in_threads(lambda: (model(some()), model.decode(some())), times=10)
    assert len(found) == 40 and all(isinstance(pair, tuple) for pair in found)
    assert (
        max(relative_error(called, pair[0]) for pair in found)
        < 3e-3
        > max(relative_error(decoded, pair[1]) for pair in found)
    )


def test_a_call_that_is_measured_is_waited_for_by_other_threads():
    model, waits = made(), []
    apply(model, compute="fp16_safe")
    other = threading.Thread(target=lambda: model.decode(some(size=1e3)))

    def meet(module, args):
        if threading.current_thread() is not other and not waits:
            other.start()
            other.join(1.0)
            waits.append(other.is_alive())

    model.norm.register_forward_pre_hook(meet)
    model(some())
    other.join()
    assert waits == [True]


ORDERS = [
    "apply, compile",
    "compile, apply",
    "call, apply, compile",
    "compile, call, apply",
    "apply, call, compile",
    "parts",
]


@pytest.mark.parametrize(
    "settings",
    [{"compute": "fp16_safe"}, {"compute": "bf16"}, {"compute": "fp16_safe", "storage": "fp8_e4m3fn"}],
    ids=str,
)
@pytest.mark.parametrize("order", ORDERS)
def test_a_module_is_compiled_and_applied_to_in_any_order(order, settings):
    torch._dynamo.reset()
    model = compiled = made()
    exact = model(some())
    for step in order.split(", "):
        if step == "apply":
            apply(model, **settings)
        elif step == "compile":
            compiled = torch.compile(model, backend="eager")
        elif step == "call":
            compiled(some())
        else:
            apply(model, **settings)
            model.up.compile(backend="eager")
            model.down.compile(backend="eager")
    bound = 0.06 if "storage" in settings else BOUND[settings["compute"]]
    for size in (1.0, 1.0, 1e3):
        model_at = made()
        assert relative_error(exact if size == 1 else model_at(some(size=size)), compiled(some(size=size))) < bound
    assert relative_error(made().decode(some()), compiled.decode(some())) < bound
    restore(model)
    assert torch.equal(model(some()), exact) or "storage" in settings


@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_plan_that_measures_nothing_is_one_graph(compute):
    torch._dynamo.reset()
    model = made()
    apply(model, compute=compute, storage="fp8_e4m3fn")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(some()), model(some()))


def exported(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return torch.export.export(model, (x,)).module()


def traced(model: nn.Module, x: torch.Tensor) -> nn.Module:
    return torch.jit.trace(model, x, check_trace=False)


@pytest.mark.parametrize("calls", [0, 1])
@pytest.mark.parametrize("graph_of", [exported, traced])
def test_a_graph_without_checks_is_refused_where_they_are_needed(graph_of, calls):
    """Numbers of the call that was traced would decide all later ones: NaN at inputs of 1e6."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval()
    exact = model(some(size=1e6))
    handle = apply(model, compute="fp16_safe")
    for _ in range(calls):
        model(some())
    with pytest.raises(HalfsafeError, match=r"fp16_safe checks each call.*bf16, fp16 or fp32"):
        graph_of(model, some())
    assert relative_error(exact, model(some(size=1e6))) < BOUND["fp16_safe"]
    handle.remove()
    apply(model, compute="bf16")
    assert relative_error(exact, graph_of(model, some())(some(size=1e6))) < BOUND["bf16"]


def test_a_copy_of_a_part_takes_no_other_part_along():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10))).eval()
    apply(model, compute="fp16_safe")
    exact = model[0](some().reshape(-1, 64))
    part = pickle.dumps(model[0])
    assert len(part) < 3 * model[0].weight.nbytes
    assert relative_error(exact, pickle.loads(part)(some().reshape(-1, 64))) < BOUND["fp16_safe"]


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
@pytest.mark.parametrize("compute", ["fp16_safe", "bf16"])
@pytest.mark.parametrize("calls", [0, 1])
def test_a_copy_computes_by_itself(copied, compute, calls):
    model = made()
    exact = model(some())
    apply(model, compute=compute)
    for _ in range(calls):
        model(some())
    twin = copied(model)
    restore(model)
    assert torch.equal(model(some()), exact)
    for size in (1.0, 1e3):
        assert relative_error(made()(some(size=size)), twin(some(size=size))) < BOUND[compute]
    restore(twin)
    assert summed_alike(exact, twin(some())) and type(twin.norm) is nn.LayerNorm
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("compute", COMPUTES)
def test_layers_are_called_by_keyword_and_may_be_empty(compute):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.none, self.back, self.conv = (
                nn.Linear(32, 32),
                nn.Linear(32, 0),
                nn.Linear(0, 32),
                nn.Conv1d(8, 8, 1),
            )

        def forward(self, x):
            return self.conv(input=self.one(input=x) + self.back(self.none(x)))

    model = Model().eval()
    exact = model(some())
    apply(model, compute=compute)
    assert relative_error(exact, model(some())) < BOUND[compute]


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16_safe"])
def test_checkpointed_activations_give_the_same_gradients(compute):
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x = Checkpointed(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).eval(), some()
    with torch.enable_grad():
        x.requires_grad_()
        exact = torch.autograd.grad(model(x).square().sum(), x)[0]
        apply(model, compute=compute)
        for _ in range(2):
            found = torch.autograd.grad(model(x).float().square().sum(), x)[0]
            assert relative_error(exact, found) < max(BOUND[compute], 1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("compute", COMPUTES)
def test_weights_of_other_kinds_are_left_to_their_layers(dtype, compute):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)).eval()
    weight = model[0].weight.mul(20).to(dtype)
    model[0].weight = nn.Parameter(weight, requires_grad=False)
    exact = model[1](F.linear(some(), weight.float(), model[0].bias)) if dtype.is_floating_point else None
    handle = apply(model, compute=compute)
    if exact is not None:
        assert relative_error(exact, model(some())) < BOUND[compute]
    else:
        assert set(handle.modes()) == {"1"} and str(dtype).removeprefix("torch.") in handle.skipped["0"]


def test_a_setting_without_any_layer_to_act_on_is_reported():
    """As accelerate's ``add_hook_to_module`` replaces the forward of every layer."""
    model = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32)).eval()
    forward = model[0].forward
    model[0].forward = lambda *args, **kwargs: forward(*args, **kwargs)
    exact = model(some())
    handle = apply(model, compute="fp16_safe")
    assert "every layer runs by its own forward" in dict(handle.without_effect)["compute=fp16_safe"]
    assert set(handle.skipped) == {"0"} and torch.equal(model(some()), exact)
    nothing = apply(nn.Sequential(nn.Embedding(4, 4)), storage="fp8_e4m3fn", compute="bf16")
    assert set(dict(nothing.without_effect)) == {"storage=fp8_e4m3fn", "compute=bf16"}


@pytest.mark.parametrize("first", ["parent", "child"])
def test_compute_of_a_part_and_of_the_whole_is_refused(first):
    model = nn.Sequential(made(), made())
    exact, parts = model(some()), (model, model[1]) if first == "parent" else (model[1], model)
    apply(parts[0], compute="bf16")
    with pytest.raises(HalfsafeError, match="part of it has a compute dtype.*rules"):
        apply(parts[1], compute="fp32")
    assert relative_error(exact, model(some())) < BOUND["bf16"]
    restore(parts[0])
    assert torch.equal(model(some()), exact)


class Positions(nn.Embedding):
    """As in transformers' Pegasus and Blenderbot: called with a size, not with a tensor."""

    def forward(self, shape, start=0):
        return super().forward(torch.arange(start, start + shape[1], device=self.weight.device))


class Codebook(nn.Module):
    """As in diffusers' VQModel: inputs are compared with the table of an embedding."""

    def __init__(self):
        super().__init__()
        self.inner, self.table, self.places = nn.Linear(32, 32), nn.Embedding(8, 32), Positions(16, 32)

    def forward(self, x):
        hidden = self.inner(x) + self.places(x.shape, start=1)
        return self.table((hidden @ self.table.weight.t()).argmax(-1)) + hidden


@pytest.mark.parametrize("compute", ["fp16_safe", "fp16", "bf16", "fp32"])
def test_the_table_of_an_embedding_is_read_and_called_with_what_its_class_takes(compute):
    torch.manual_seed(0)
    model, x = Codebook().eval(), torch.randn(2, 4, 32)
    exact = model(x)
    with apply(model, compute=compute):
        result, copied = model(x), copy.deepcopy(model)(x)
    assert relative_error(exact, result.float()) < (0.02 if compute == "bf16" else 2e-3)
    assert torch.equal(result, copied) and torch.equal(model(x), exact)
