"""Norms of a model in 8 bits run without ComfyUI's cast while their weights lie ready, and give the same numbers."""

import pytest
import torch
from halfsafe.nodes.host.compute import planned_model
from support import families


@pytest.mark.parametrize(("family", "storage"), [("sdxl", "int8"), ("z_image", "fp8_e4m3fn")])
def test_a_call_gives_the_bits_of_comfyuis_own_norms(comfy, models_dir, monkeypatch, family, storage):
    path = families.write_narrow(family, models_dir / "diffusion_models")
    exchanged = []
    own = planned_model.uncast_norm
    results = []
    for put_on in (own, lambda module: []):
        monkeypatch.setattr(
            planned_model,
            "uncast_norm",
            lambda module, put_on=put_on: exchanged.extend(found := put_on(module)) or found,
        )
        model = families.load(comfy, path, storage, "bf16")
        results.append(families.replay(model, families.capture(model, family)))
    assert exchanged and torch.equal(*results)
