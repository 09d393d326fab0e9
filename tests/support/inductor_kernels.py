"""The kernels that torch.compile makes for a CUDA device that is not there.

Inductor lowers, fuses and writes its kernels for fake CUDA tensors as on a machine with an H100; nothing is compiled by
Triton and nothing runs. Sees: how many kernels a graph takes, products included, and the bytes that they move. Does not
see: time, which products autotuning would write in Triton, and the patterns of inductor's joint graph, which compute
with constants on the device.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

H100 = dict(type="cuda", index=0, multi_processor_count=132, cc=90, major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32)
PRODUCTS = re.compile(r"extern_kernels\.(\w+)\(|torch\.ops\.aten\.(_scaled_dot_product\w+|convolution)\.default\(")


@dataclass(frozen=True)
class Graph:
    """What one graph takes: ``written`` kernels that inductor wrote, ``products`` of libraries, and ``bytes`` of all."""

    written: int
    products: int
    bytes: int


class Inductor:
    """Stands for torch.compile's default backend, and lists the ``graphs`` it is given."""

    def __init__(self) -> None:
        pytest.importorskip("triton", reason="inductor writes CUDA kernels in Triton")
        from torch._dynamo.backends.common import aot_autograd
        from torch._inductor.decomposition import select_decomp_table

        self.graphs: list[Graph] = []
        self.backend = aot_autograd(fw_compiler=self._lower, decompositions=select_decomp_table())

    def _lower(self, graph: torch.fx.GraphModule, inputs: list):
        from torch._inductor import metrics
        from torch._inductor.debug import DebugContext
        from torch._inductor.fx_passes.post_grad import post_grad_passes
        from torch._inductor.graph import GraphLowering
        from torch._inductor.virtualized import V

        fakes = torch._guards.detect_fake_mode(inputs)
        with V.set_fake_mode(fakes), V.set_debug_handler(DebugContext()), _as_with_a_gpu():
            post_grad_passes(graph, is_inference=True)
            lowered = GraphLowering(graph, shape_env=fakes.shape_env, is_inference=True)
            with V.set_graph_handler(lowered), V.set_extern_kernel_nodes([]):
                lowered.run(*inputs)
                metrics.reset()
                code, _ = lowered.codegen()
                products = len(PRODUCTS.findall(code.value))
                self.graphs.append(Graph(metrics.generated_kernel_count, products, lowered.count_bytes()[0]))
        return graph


@contextlib.contextmanager
def _as_with_a_gpu() -> Iterator[None]:
    from torch._inductor.runtime.hints import DeviceProperties

    device = DeviceProperties(**H100)
    with (
        mock.patch.object(DeviceProperties, "create", staticmethod(lambda _: device)),
        mock.patch("torch._inductor.utils.is_big_gpu", lambda *_: False),
        mock.patch("torch._inductor.scheduler.has_triton", lambda: True),
        mock.patch("torch.utils._triton.triton_hash_with_backend", lambda: ""),
        mock.patch("torch.cuda.get_device_capability", lambda *_: (9, 0)),
    ):
        yield
