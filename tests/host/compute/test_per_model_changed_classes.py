"""A pack that replaces the methods of ComfyUI's layers has its code run, whether the model ran before or not."""

import pytest
import torch
from comfy.ops import CastWeightBiasOp
from support import families
from support.families import load
from support.replaced import of_pack


@pytest.mark.parametrize("method", ["forward", "forward_comfy_cast_weights"])
@pytest.mark.parametrize(("storage", "compute"), [("fp16", "fp16_safe"), ("int8", "int8"), ("fp8_e4m3fn", "bf16")])
def test_code_in_place_of_a_classs_runs_whenever_it_was_put_there(
    comfy, wan, call, monkeypatch, storage, compute, method
):
    model = load(comfy, wan, storage, compute)
    layers = [
        each
        for each in model.model.diffusion_model.modules()
        if isinstance(each, CastWeightBiasOp) and hasattr(each, "in_features")
    ]
    for _ in range(2):  # after a call of ComfyUI's own code, and after one of the pack's
        plain, ran, counted = families.replay(model, call), [], []
        with monkeypatch.context() as pack:
            hooks = [layer.register_forward_hook(lambda *_, ran=ran: ran.append(1)) for layer in layers]
            for cls in {*map(type, layers)}:
                pack.setattr(cls, method, of_pack(counted, getattr(cls, method)))
            families.replay(model, call)
            for hook in hooks:
                hook.remove()
        assert len(counted) == len(ran) > 20
        assert torch.equal(families.replay(model, call), plain)
