"""torch.compile of the core on fake CUDA tensors, which need no GPU."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from halfsafe.precision.arithmetic import linear as operations
from halfsafe.precision.arithmetic.attention import Kernels, SafeAttention
from halfsafe.precision.arithmetic.calibration import Calibration
from halfsafe.precision.arithmetic.linear import SafeOperation
from support.fake_tensors import fake_cuda_tensors
from support.plain_weights import plain_weights
from torch._dynamo.testing import CompileCounter

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def fresh():
    """Nothing compiled, and no pattern either: torch traces through ``re`` only where the pattern is in its cache."""
    torch._dynamo.reset()
    re.purge()
    yield
    torch._dynamo.reset()


def attention(q, k, v, heads, **kwargs):
    q, k, v = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)


def measured(calibration, device):
    """What a first call would find, without numbers to find it from."""
    for proof in calibration.proofs.values():
        proof.device, proof.gain = device, 1.0
    calibration._place(None)
    calibration.calibrating = False


def safe(module, calibration, wide=None):
    """The module, its forward exchanged as in a model."""
    for name, layer in module.named_modules():
        if operations.kind_of(layer):
            operation = SafeOperation(layer, calibration.scale(name), calibration, plain_weights)
            operation.is_wide = operation._is_wide(layer.weight) if wide is None else wide
            layer.forward = operation.__call__
    return module


class Block(torch.nn.Module):
    """A transformer block with two attentions."""

    def __init__(self, calibration, width=32):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width, bias=False)
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.attention = SafeAttention(calibration)
        self.attention.calls_in_fp32 = [False, False]

    def forward(self, x):
        self.attention.begin()
        for _ in range(2):
            q, k, v = self.qkv(F.layer_norm(x, x.shape[-1:])).chunk(3, -1)
            x = x + self.out(self.attention(Kernels(attention, attention), q, k, v, 4))
        return x + self.ffn(x)


CONVOLUTION = (lambda calibration: torch.nn.Conv2d(4, 8, 3, padding=1), (2, 4, 9, 9))
TRANSPOSED = (lambda calibration: torch.nn.ConvTranspose2d(4, 8, 3, stride=2), (2, 4, 9, 9))
LINEARS = (
    lambda calibration: torch.nn.Sequential(*(torch.nn.Linear(16, 16, bias=bias) for bias in (True, False, True))),
    (2, 5, 16),
)
BLOCK = (Block, (1, 12, 32))


@pytest.mark.parametrize(
    ("build", "shape", "wide"),
    [(*LINEARS, None), (*LINEARS, False), (*CONVOLUTION, None), (*TRANSPOSED, None), (*BLOCK, None)],
)
def test_on_cuda_there_is_one_graph_and_no_break(build, shape, wide):
    """``fullgraph`` raises at the first break."""
    with torch.no_grad(), fake_cuda_tensors():
        calibration = Calibration()
        with CUDA:
            module = safe(build(calibration), calibration, wide)
            x = torch.empty(shape)
        measured(calibration, x.device)
        counter = CompileCounter()
        result = torch.compile(module, backend=counter, fullgraph=True)(x)
        assert counter.frame_count == 1
        assert result.dtype == torch.float32 and result.device.type == "cuda"


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_on_cuda_a_linear_multiplies_fp16_operands_into_an_fp32_result(device):
    """The graph itself says which product runs."""
    graphs = []

    def kept(graph, _):
        graphs.append(graph)
        return graph

    with torch.no_grad(), fake_cuda_tensors():
        calibration = Calibration()
        with torch.device(device):
            module, x = safe(torch.nn.Linear(16, 16), calibration), torch.empty(2, 16)
        measured(calibration, x.device)
        torch.compile(module, backend=kept, fullgraph=True)(x)
    wide = [
        node
        for node in graphs[0].graph.nodes
        if node.target is torch.mm and node.kwargs == {"out_dtype": torch.float32}
    ]
    assert len(wide) == (device == "cuda")
    assert all(argument.meta["example_value"].dtype == torch.float16 for node in wide for argument in node.args)


def test_bounded_attention_on_cuda():
    with fake_cuda_tensors():
        calibration = Calibration()
        bounded = SafeAttention(calibration)
        bounded.calls_in_fp32 = [False]
        with CUDA:
            q = torch.empty(1, 8, 32, dtype=torch.float16)
        measured(calibration, q.device)

        def run(q):
            bounded.begin()
            return bounded(Kernels(attention, attention), q, q, q, 4)

        assert torch.compile(run, backend="eager", fullgraph=True)(q).dtype == torch.float16


@pytest.mark.parametrize("inference", [True, False])
def test_compiled_parts_are_watched(inference):
    """What each of two compiled parts has recorded is right after both have run, NaN and inf too."""
    torch.manual_seed(0)
    calibration, backend = Calibration(), CompileCounter()
    parts = [
        safe(torch.nn.Sequential(torch.nn.Linear(16, 16)), calibration),
        torch.nn.Sequential(torch.nn.Linear(16, 16)),
    ]
    scales = [calibration.proofs["0"], calibration.scale("second")]
    parts[1][0].forward = SafeOperation(parts[1][0], scales[1], calibration, plain_weights).__call__
    compiled = [torch.compile(part, backend=backend) for part in parts]
    x = torch.randn(4, 16)

    def call(parts, x):
        return parts[1](parts[0](x))

    with torch.inference_mode(inference), torch.set_grad_enabled(False):
        expected = calibration.run(lambda: call(parts, x))
        for scale in scales:
            scale.largest = 0.0
        for _ in range(3):
            assert torch.equal(calibration.run(lambda: call(compiled, x)), expected)
        sizes = [x.abs().max().item(), parts[0](x).abs().max().item()]
        assert calibration.repeats == 0 and backend.frame_count > 0
        assert [scale.largest for scale in scales] == pytest.approx(sizes, rel=2**-11)
        for bad in (math.nan, math.inf):
            calibration._buffers[x.device][0].clear()
            call(compiled, torch.full((4, 16), bad))
            assert not calibration._holds(None)
            assert all(not math.isfinite(scale.entry.view.item()) for scale in scales)
