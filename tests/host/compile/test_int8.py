"""torch.compile of a model with int8 weights: the same numbers, int8 products in the graph, no new compilation later."""

import pytest
import torch
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.compiling import COMPILER, compiled
from support.families import load
from support.matmul_spy import int8_products
from support.measures import relative_error
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("one_graph")
ONE_IN_FP32 = "blocks.0.ffn.2 compute=int8 stream=fp32"


@pytest.mark.parametrize(
    ("compute", "text", "backend"),
    [
        ("int8", "", COMPILER),
        pytest.param("int8", ONE_IN_FP32, "eager", marks=pytest.mark.release),
        ("fp16_safe", ONE_IN_FP32, "eager"),
    ],
)
def test_a_compiled_int8_model_multiplies_as_it_does_uncompiled(comfy, wan, call, monkeypatch, compute, text, backend):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    plain = load(comfy, wan, "int8", compute, rules_from(text))
    families.replay(plain, call)
    with int8_products() as expected:
        reference = families.replay(plain, call)
    model = compiled(load(comfy, wan, "int8", compute, rules_from(text)), backend=backend)
    for _ in range(3):
        with int8_products() as spy:
            result = families.replay(model, call)
    assert len(spy) == len(expected) == (10 if compute == "int8" else bool(text))
    assert relative_error(reference, result) < 2e-3
    graphs = counters["stats"]["unique_graphs"]
    families.replay(model, call)
    assert counters["stats"]["unique_graphs"] == graphs
    assert torch.isfinite(result).all()
