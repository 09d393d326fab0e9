"""The product with an fp32 result in compiled graphs: on this torch, and on one whose compiler does not know it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from halfsafe.precision.arithmetic.linear import has_wide_output
from support.shipped import ROOT

CHILD = f"""
import sys
sys.path[:0] = [{str(ROOT / "tests")!r}]
import conftest, torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

def as_in_torch_2_8():
    import torch._meta_registrations
    from torch._decomp import meta_table
    def meta_mm(a, b):
        return a.new_empty(a.shape[0], b.shape[1])
    product = torch.ops.aten.mm.dtype
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("mm.dtype", meta_mm, allow_override=True)
    meta_table[product] = meta_mm
    product.py_kernels.pop(torch._C.DispatchKey.Meta, None)
    product._dispatch_cache.clear()
    return library

from halfsafe.precision.arithmetic.products import can_be_traced, wide_product

def compiled():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        x, weight = torch.empty(4, 8, dtype=torch.float16, device="cuda"), torch.empty(6, 8, dtype=torch.float16, device="cuda")
        graph = torch.compile(lambda x, weight: wide_product(x * 2, weight.t()) + 1, backend=counter, fullgraph=True)
        result = graph(x, weight)
    found = [str(node.target) for node in counter.graphs[0].graph.nodes if node.op == "call_function"]
    print(can_be_traced(), counter.frame_count, result.dtype, result.device.type, tuple(result.shape), any("wide_product" in name for name in found))

compiled()
kept = as_in_torch_2_8() if can_be_traced() else None
compiled()
"""


@pytest.mark.skipif(
    not has_wide_output(torch.device("cuda"), "linear"), reason="this torch gives no fp32 results on CUDA"
)
def test_a_compiled_model_is_one_graph_of_wide_products():
    """In a process of its own, as torch keeps what it was told of an operation. ``fullgraph`` raises at the first break."""
    ran = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-3000:]
    this, old = (line.split(maxsplit=1) for line in ran.stdout.split("\n")[-3:-1])
    for traced, found in (this, old):
        assert found == f"1 torch.float32 cuda (4, 6) {traced == 'False'}"
    assert old[0] == "False"
