"""What a later call of ``fp16_safe`` costs at most beside plain fp16: kernels, looks, reads, memory and host time."""

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic import linear
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from support.leaf_operations import LeafOperations, aten
from support.plain_weights import plain_weights

WIDE = getattr(aten.mm, "dtype", None)
LOOK, CAST = "linalg_vector_norm", "_to_copy"
NO_KERNEL = (aten._unsafe_view.default, aten.detach.default, aten.empty_like.default)


@pytest.fixture
def as_on_cuda(monkeypatch):
    """A product of fp16 operands has an fp32 result by itself."""
    monkeypatch.setattr(linear, "is_emulated", lambda device: False)
    monkeypatch.setattr(linear, "has_wide_output", lambda device, kind: WIDE is not None)


class Launches(LeafOperations):
    """The operations that are not views, by name, and the bytes of the largest results; wide products too, which a CPU lacks."""

    def __init__(self):
        super().__init__()
        self.names = []
        self.made = []

    def leaf(self, func, args, kwargs):
        result = args[0].float() @ args[1].float() if func is WIDE else func(*args, **kwargs)
        if not func.is_view and func not in NO_KERNEL:
            self.names.append(func.overloadpacket.__name__)
            if isinstance(result, torch.Tensor) and "out" not in kwargs:
                self.made.append(result.nbytes)
        return result


class Block(torch.nn.Module):
    """A transformer block of eleven layers: self attention, cross attention, a gated MLP."""

    def __init__(self, width=64):
        super().__init__()
        names = ("q", "k", "v", "o", "cross_q", "cross_k", "cross_v", "cross_o", "w1", "w3", "w2")
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(width, width, dtype=torch.float16) for name in names})

    def forward(self, x, text, attend):
        layer, h = self.layers, F.layer_norm(x, x.shape[-1:])
        x = x + layer["o"](attend(*(layer[name](h) for name in "qkv")))
        h = F.layer_norm(x, x.shape[-1:])
        x = x + layer["cross_o"](attend(layer["cross_q"](h), layer["cross_k"](text), layer["cross_v"](text)))
        h = F.layer_norm(x, x.shape[-1:])
        return x + layer["w2"](F.silu(layer["w1"](h)) * layer["w3"](h))


def sdpa(q, k, v, heads, **kwargs):
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model:
    """Blocks of a transformer in ``fp16_safe``."""

    def __init__(self, blocks=3):
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks)).requires_grad_(False)
        self.calibration = Calibration()
        self.attention = SafeAttention(self.calibration)
        self.layers = 0
        for name, module in self.blocks.named_modules(prefix="blocks"):
            if isinstance(module, torch.nn.Linear):
                scale, self.layers = self.calibration.scale(name), self.layers + 1
                module.forward = SafeOperation(module, scale, self.calibration, plain_weights).__call__
        self.x, self.text = torch.randn(1, 16, 64), torch.randn(1, 8, 64)

    def call(self):
        self.attention.begin()
        self.calibration.watch_inputs({"x": self.x, "text": self.text})
        x = self.x
        for block in self.blocks:
            x = block(x, self.text, lambda *qkv: self.attention(Kernels(sdpa, sdpa), *qkv, 4))
        return x

    def launched(self):
        with torch.no_grad():
            with Launches():
                for _ in range(2):
                    self.calibration.run(self.call)
            with Launches() as launches:
                self.calibration.run(self.call)
        assert self.calibration.repeats == 0
        return launches


def layer(inputs=64, outputs=64, dtype=torch.float16):
    module = torch.nn.Linear(inputs, outputs, dtype=dtype).requires_grad_(False)
    calibration = Calibration()
    return calibration, SafeOperation(module, calibration.scale("blocks.0.q"), calibration, plain_weights)


def test_a_layer_takes_a_cast_its_product_and_its_bias(as_on_cuda):
    calibration, operation = layer()
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        with Launches():
            calibration.run(lambda: operation(x))
        for given, expected in ((x, [CAST, "mm", "add"]), (x.half(), ["mm", "add"])):
            with Launches() as launches:
                operation(given)
            assert launches.names == expected


def test_a_transformer_is_looked_at_at_inputs_queries_and_result(as_on_cuda):
    model = Model()
    names = model.launched().names
    assert names.count(LOOK) == 3 + 2 * len(model.blocks) and names.count(CAST) <= 19 * len(model.blocks)


def test_a_clean_call_reads_once(monkeypatch):
    model, reads = Model(), []
    with torch.no_grad():
        for _ in range(2):
            model.calibration.run(model.call)
        for name in ("item", "tolist"):
            own = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, lambda x, own=own: reads.append(x) or own(x))
        model.calibration.run(model.call)
    assert len(reads) == 1


def test_a_call_that_measures_reads_at_most_so_often_for_each_layer(monkeypatch):
    model, reads = Model(), []
    assert model.layers == 33
    for name in ("item", "tolist"):
        own = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda x, own=own: reads.append(x) or own(x))
    with torch.no_grad():
        model.calibration.run(model.call)
    assert len(reads) <= 2.5 * model.layers


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 0.5), (torch.bfloat16, 1.5), (torch.float32, 1.0)])
def test_measuring_a_layer_takes_little_more_memory_than_its_weight(dtype, most):
    """Beside the product itself, which a CPU makes in fp32."""
    calibration, operation = layer(2048, 2048, dtype)
    x = torch.randn(1, 2048)
    with torch.no_grad(), Launches() as launches:
        operation._is_wide = lambda x: False
        calibration.run(lambda: operation(x))
    made = [size for size in launches.made if size > 1 << 20]
    assert sum(made) <= most * operation.module.weight.nbytes
