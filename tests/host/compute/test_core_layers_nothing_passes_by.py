"""Every product with the weight of a layer that has a plan is made inside of a forward of ours, and a layer that is never called says so."""

from __future__ import annotations

import contextlib

import pytest
import torch
from halfsafe.nodes.host.comfyui.layer_forward import LayerForward
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.nodes.host.compute.layer_modes import NOT_CALLED
from halfsafe.precision.plan.rules import rules_from
from support import families, next_core
from support.families import load
from support.leaf_operations import LeafOperations
from support.matmul_spy import INT8_LINEAR, OPERANDS

FAMILIES = ("wan", "flux", "sd3", "ltxv", "qwen_image", "hunyuan_video", "z_image", "sdxl")
CASES = [
    *(("pinned", family, storage) for family in FAMILIES for storage in ("fp16", "int8")),
    *(("next", family, storage) for family in ("wan", "flux") for storage in ("fp16", "int8")),
    *((core, "wan", "fp8_e4m3fn") for core in ("pinned", "next")),
]
"""(core, family, storage), computed in fp16_safe, and int8 weights in int8 over an fp32 stream."""


@pytest.fixture(scope="module")
def files(models_dir):
    return families.files_in(models_dir / "diffusion_models", "passes_by")


@pytest.fixture(scope="module")
def calls(comfy, files):
    """family -> the first call ComfyUI's sampler makes of it, sampled once."""
    made: dict[str, families.Call] = {}

    def get(family: str) -> families.Call:
        if family not in made:
            made[family] = families.capture(load(comfy, files(family)), family)
        return made[family]

    return get


class InsideOfOurs(LeafOperations):
    """Counts the products that are made inside of the forwards that were put on layers: module -> products."""

    def __init__(self):
        super().__init__()
        self.inside: list[torch.nn.Module] = []
        self.products: dict[torch.nn.Module, int] = {}

    def leaf(self, func, args, kwargs):
        if self.inside and (func in OPERANDS or func.name() == INT8_LINEAR):
            self.products[self.inside[-1]] += 1
        return func(*args, **kwargs)


@pytest.fixture
def spied(monkeypatch):
    """A spy that knows each forward that `exchanged` or `int8_patches` puts on a layer."""
    spy, put_on = InsideOfOurs(), LayerForward.put_on

    def put_on_framed(self):
        spy.products[self.module] = 0

        def run(forward, *args, **kwargs):
            spy.inside.append(self.module)
            try:
                return forward(*args, **kwargs)
            finally:
                spy.inside.pop()

        self.frame = run
        return put_on(self)

    monkeypatch.setattr(LayerForward, "put_on", put_on_framed)
    return spy


@pytest.mark.parametrize(("core", "family", "storage"), CASES)
def test_every_layer_with_a_plan_multiplies_inside_of_a_forward_of_ours(
    comfy, files, calls, spied, core, family, storage, monkeypatch
):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    with next_core.installed() if core == "next" else contextlib.nullcontext():
        rules = rules_from(text="* stream=fp32") if storage == "int8" else None
        model = load(comfy, files(family), storage, "int8" if storage == "int8" else "fp16_safe", rules=rules)
        call = calls(family)
        families.replay(model, call)
        planned = {module: name for name, module in compute_of(model).runs.last_of(model).modules.items()}
        spied.products = dict.fromkeys(spied.products.keys() & planned.keys(), 0)
        with spied:
            families.replay(model, call)
    assert len(spied.products) >= 0.9 * len(planned) > 10
    assert [planned[module] for module, count in spied.products.items() if not count] == []


def test_a_layer_that_a_measured_call_did_not_call_says_so(comfy, wan, call):
    model = load(comfy, wan, "fp16", "fp16_safe")
    block = model.model.diffusion_model.blocks[1]
    block.never = type(block.ffn[0])(8, 8, dtype=torch.float16, device="cpu")
    torch.nn.init.zeros_(block.never.weight)
    torch.nn.init.zeros_(block.never.bias)
    planned = families.with_compute(comfy, model, "fp16_safe")
    try:
        families.replay(planned, call)
        reasons = {layer["name"]: layer["reason"] for layer in families.report(comfy, planned)["layers"]}
    finally:
        del block.never
    assert {name for name, reason in reasons.items() if NOT_CALLED in reason} == {"blocks.1.never"}
