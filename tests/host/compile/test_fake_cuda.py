"""A compiled toy model on fake CUDA tensors is one graph, as on a GPU, where products have fp32 results."""

import pytest
import torch
from halfsafe.precision.devices import probes
from support import families
from support.compiling import compiled
from support.fake_cuda import FakeCuda
from support.families import load
from torch._dynamo.utils import counters


@pytest.mark.parametrize("family", [pytest.param("wan", marks=pytest.mark.release), "flux"])
def test_a_compiled_model_is_one_graph(comfy, models_dir, monkeypatch, family):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    monkeypatch.setattr(probes, "canary", lambda device, dtype: (True, ""))
    path = families.files_in(models_dir / "diffusion_models", "one_graph")(family)
    call, model = (
        families.capture(load(comfy, path), family),
        compiled(load(comfy, path, "fp16", "fp16_safe"), backend="eager"),
    )
    torch._dynamo.reset()
    counters.clear()
    try:
        with FakeCuda(model) as fake:
            for _ in range(3):
                fake.call(call)
        assert (counters["stats"]["unique_graphs"], dict(counters["graph_break"])) == (1, {})
    finally:
        torch._dynamo.reset()
