"""torch.compile of models of GGUF files: the same numbers, no new compilation later; with a LoRA too."""

import pytest
import torch
from comfy.sd import load_lora_for_models
from support import families, gguf_files, model_files
from support.compiling import compiled
from support.families import load
from support.measures import relative_error
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("one_graph")
STORED = {"as_file": ("as_file", "bf16"), "as_file fp16_safe": ("as_file", "fp16_safe"), "int8": ("int8", "int8"), "fp8": ("fp8_e4m3fn", "fp16")}


@pytest.mark.parametrize("patched", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("stored", STORED)
def test_a_compiled_model_gives_the_same(comfy, wan, models_dir, call, monkeypatch, stored, patched):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    path = gguf_files.of_model(wan, models_dir / "diffusion_models" / "compiled.gguf", ("Q8_0", "Q5_K"))

    def loaded():
        model = load(comfy, path, *STORED[stored])
        tensors = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=1.0)
        return load_lora_for_models(model, None, tensors, 1.0, 0.0)[0] if patched else model

    plain, model = loaded(), compiled(loaded(), backend="eager")
    references, results = ([families.replay(each, call) for _ in range(3)] for each in (plain, model))
    assert all(torch.isfinite(result).all() and relative_error(*pair) < 2e-3 for result, *pair in zip(results, references, results, strict=True))
    graphs = counters["stats"]["unique_graphs"]
    families.replay(model, call)
    assert graphs and counters["stats"]["unique_graphs"] == graphs
