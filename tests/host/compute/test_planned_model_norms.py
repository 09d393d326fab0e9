"""Norms of a model in 8 bits run without ComfyUI's cast while their weights lie ready, and give the same numbers."""

import pytest
import torch
from halfsafe.nodes.host.compute import planned_model
from support import families
from support.replaced import of_pack


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


WAYS = {
    "on each norm": lambda norms: [(norm, "forward") for norm in norms],
    "the cast of each norm": lambda norms: [(norm, "forward_comfy_cast_weights") for norm in norms],
    "in ComfyUI's classes": lambda norms: [(cls, "forward") for cls in {*map(type, norms)}],
    "the cast of ComfyUI's classes": lambda norms: [(cls, "forward_comfy_cast_weights") for cls in {*map(type, norms)}],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("compute", ["bf16", "fp16_safe"])
def test_a_packs_code_in_place_of_norms_runs_whenever_it_was_put_there(comfy, models_dir, monkeypatch, way, compute):
    path = families.write_narrow("z_image", models_dir / "diffusion_models")
    first = families.load(comfy, path, "fp8_e4m3fn", compute)
    call = families.capture(first, "z_image")
    classes = {type(each) for each in first.model.diffusion_model.modules() if planned_model.uncast_norm(each)}
    for model in (first, families.load(comfy, path, "fp8_e4m3fn", compute)):  # after a call, and before any
        norms = [each for each in model.model.diffusion_model.modules() if type(each) in classes]
        ran, counted = [], []
        with monkeypatch.context() as pack:
            hooks = [norm.register_forward_hook(lambda *_, ran=ran: ran.append(1)) for norm in norms]
            for owner, name in WAYS[way](norms):
                pack.setattr(owner, name, of_pack(counted, getattr(owner, name)), raising=False)
            families.replay(model, call)
            for hook in hooks:
                hook.remove()
        assert len(counted) == len(ran) > len(norms) / 2
