"""Records that a CUDA graph writes: what it finds at the same address in each replay."""

import torch
from halfsafe.precision.arithmetic.amax_buffer import AmaxBuffer
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext


def test_a_graph_copies_nothing_of_the_buffer_at_a_replay():
    """AOTAutograd tells which inputs stay where they are; a CUDA graph copies every other."""
    copied = []

    def compiler(graph, inputs):
        static = set(TracingContext.get().fw_metadata.static_input_indices)
        copied.append([(tuple(given.shape), given.dtype) for index, given in enumerate(inputs) if index not in static])
        return graph.forward

    buffer = AmaxBuffer(3, torch.device("cpu"))
    torch._dynamo.reset()
    buffer.clear()

    def model(x):
        for entry in buffer.entries:
            down, _ = entry.scale()
            entry.record((x * down).abs().amax().float())
        return x * 2

    with torch.no_grad():
        torch.compile(model, backend=aot_autograd(fw_compiler=compiler, inference_compiler=compiler))(torch.ones(4))
    assert copied == [[((4,), torch.float32)]], "the model's own input alone"
    assert buffer.read() == [1.0, 1.0, 1.0]
