"""Records that compiled graphs write."""

import math
from contextlib import ExitStack
from unittest import mock

import pytest
import torch
from halfsafe.precision.arithmetic.proofs import NOTHING, AmaxBuffer, AmaxEntry
from support.fake_tensors import fake_cuda_tensors
from torch._dynamo.backends.common import aot_autograd


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def made_of(buffer, record=AmaxEntry.record):
    """A model that scales its operand, finds an amax and records it once for each entry of a buffer."""

    def model(x):
        found = []
        for entry in buffer.entries:
            down, _ = entry.scale()
            found.append(torch.linalg.vector_norm(x * down, math.inf, dtype=torch.float32))
            record(entry, found[-1])
        return found

    return model


H100 = dict(
    type="cuda",
    index=0,
    multi_processor_count=132,
    cc=90,
    major=9,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    warp_size=32,
)


def kernels_written(graph, inputs):
    """How many kernels inductor writes for a graph on fake CUDA tensors, as on a machine with an H100; Triton compiles none of them."""
    from torch._inductor import metrics
    from torch._inductor.debug import DebugContext
    from torch._inductor.fx_passes.post_grad import post_grad_passes
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime.hints import DeviceProperties
    from torch._inductor.virtualized import V

    fakes = torch._guards.detect_fake_mode(inputs)
    device = DeviceProperties(**H100)
    with ExitStack() as as_with_a_gpu, V.set_fake_mode(fakes), V.set_debug_handler(DebugContext()):
        as_with_a_gpu.enter_context(mock.patch.object(DeviceProperties, "create", staticmethod(lambda _: device)))
        as_with_a_gpu.enter_context(mock.patch("torch._inductor.scheduler.has_triton", lambda: True))
        as_with_a_gpu.enter_context(mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: ""))
        as_with_a_gpu.enter_context(mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)))
        post_grad_passes(graph, is_inference=True)
        lowered = GraphLowering(graph, shape_env=fakes.shape_env, is_inference=True)
        with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
            lowered.run(*inputs)
            metrics.reset()
            lowered.codegen()
    return metrics.generated_kernel_count


def test_a_record_takes_no_kernel_of_its_own_in_a_graph():
    pytest.importorskip("triton", reason="inductor writes CUDA kernels in Triton")
    from torch._inductor.decomposition import select_decomp_table

    def kernels(record):
        torch._dynamo.reset()
        written, buffer = [], AmaxBuffer(3, x.device)
        buffer.clear()
        lower = lambda graph, inputs: written.append(kernels_written(graph, inputs)) or graph  # noqa: E731
        torch.compile(
            made_of(buffer, record), backend=aot_autograd(fw_compiler=lower, decompositions=select_decomp_table())
        )(x)
        return sum(written)

    with fake_cuda_tensors(), torch.no_grad():
        x = torch.empty(512, 4096, device="cuda", dtype=torch.float16)
        assert kernels(AmaxEntry.record) == kernels(lambda entry, magnitude: None) > 0


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
