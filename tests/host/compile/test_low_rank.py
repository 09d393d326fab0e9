"""torch.compile on a model with a LoRA beside its 8-bit weights."""

import uuid

import pytest
from comfy.sd import load_lora_for_models
from support import families, model_files
from support.compiling import COMPILER, compiled
from support.families import load
from support.measures import relative_error
from torch._dynamo.utils import counters

pytestmark = pytest.mark.usefixtures("one_graph")
LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.0.ffn.2": (256, 1024), "blocks.0.self_attn.v": (256, 256)}


@pytest.mark.parametrize(
    ("order", "storage", "compute", "backend"),
    [
        ("lora first", "fp8_e4m3fn", "fp16_safe", "eager"),
        pytest.param("compile first", "int8", "auto", COMPILER, marks=pytest.mark.release),
    ],
)
def test_a_strength_compiles_nothing_anew(comfy, wan, call, order, storage, compute, backend):
    tensors = model_files.lora(LAYERS, size=0.05)
    model, exact = load(comfy, wan, storage, compute), load(comfy, wan, "fp32", "fp32")
    floor = relative_error(families.replay(exact, call), families.replay(model, call))

    def with_lora(start, strength):
        return load_lora_for_models(start, None, tensors, strength, 0.0)[0]

    first = (
        compiled(with_lora(model, 1.0), backend=backend)
        if order == "lora first"
        else with_lora(compiled(model, backend=backend), 1.0)
    )
    for strength in (1.0, 2.5, 1.0):
        model = at(first, strength)
        for _ in range(2):
            result = families.replay(model, call)
            assert relative_error(families.replay(with_lora(exact, strength), call), result) < 1.1 * floor
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"], strength


def at(model, strength):
    """A clone of the model whose LoRA has another strength."""
    clone = model.clone()
    clone.patches = {key: [(strength, *patch[1:]) for patch in patches] for key, patches in model.patches.items()}
    clone.patches_uuid = uuid.uuid4()
    return clone
