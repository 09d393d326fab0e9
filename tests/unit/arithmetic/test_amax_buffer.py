"""Records that compiled graphs write."""

import math

import pytest
import torch
from halfsafe.precision.arithmetic.amax_buffer import NOTHING, AmaxBuffer, Entry
from support.fake_tensors import fake_cuda_tensors
from support.inductor_kernels import Inductor
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made_of(buffer, record=Entry.record):
    """A model that scales its operand, finds an amax and records it once for each entry of a buffer."""

    def model(x):
        found = []
        for entry in buffer.entries:
            down, _ = entry.scale()
            found.append(torch.linalg.vector_norm(x * down, math.inf, dtype=torch.float32))
            record(entry, found[-1])
        return found

    return model


def test_a_graph_copies_nothing_of_the_buffer_at_a_replay():
    """AOTAutograd tells which inputs stay where they are; a CUDA graph copies every other."""
    copied = []

    def compiler(graph, inputs):
        static = set(TracingContext.get().fw_metadata.static_input_indices)
        copied.append([(tuple(given.shape), given.dtype) for index, given in enumerate(inputs) if index not in static])
        return graph.forward

    buffer = AmaxBuffer(3, torch.device("cpu"))
    buffer.clear()
    with torch.no_grad():
        torch.compile(made_of(buffer), backend=aot_autograd(fw_compiler=compiler, inference_compiler=compiler))(torch.ones(4))
    assert copied == [[((4,), torch.float32)]], "the model's own input alone"
    assert buffer.read() == [1.0, 1.0, 1.0]


def test_a_record_takes_no_kernel_of_its_own_in_a_graph():
    def kernels(record):
        torch._dynamo.reset()
        buffer, inductor = AmaxBuffer(3, x.device), Inductor()
        buffer.clear()
        torch.compile(made_of(buffer, record), backend=inductor.backend)(x)
        (graph,) = inductor.graphs
        return graph.written

    with fake_cuda_tensors(), torch.no_grad():
        x = torch.empty(512, 4096, device="cuda", dtype=torch.float16)
        assert kernels(Entry.record) == kernels(lambda entry, magnitude: None) > 0


@pytest.mark.parametrize("inference", [False, True])
def test_a_call_keeps_the_larger_of_graphs_and_eager_code_and_nan(inference):
    buffer = AmaxBuffer(3, torch.device("cpu"))
    with torch.inference_mode(inference):
        for _ in range(2):
            buffer.clear()
            first, second, third = buffer.entries
            record = torch.compile(lambda entry, x: (entry.record(x), x + 1), backend="eager")
            for entry, numbers in ((first, (2.0, 5.0, 3.0)), (second, (1.0, math.nan, 4.0))):
                for number in numbers:
                    record(entry, torch.tensor(number))
            first.record(torch.tensor(4.0))
            found = buffer.read()
            assert found[0] == 5.0 and math.isnan(found[1]) and found[2] == NOTHING
            buffer.clear()
            third.record(torch.tensor(1.0))
            assert buffer.read() == [NOTHING, NOTHING, 1.0]
