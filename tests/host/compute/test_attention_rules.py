"""Attention in fp32 in the blocks that rules name: only theirs, seen by a spy at the product, and by modules, not by counting."""

import pytest
import torch
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.families import load, report, with_compute
from support.matmul_spy import MatmulSpy

FAMILIES = {"wan": "blocks.1", "flux": "double_blocks.0", "sdxl": "middle_block.1.transformer_blocks.0"}
LAYERS = ("mm", "addmm", "convolution")
NAMES = ("{}", "{}.*", "re:^{}$")


@pytest.fixture(scope="module")
def model_of(comfy, models_dir):
    """``(path, call)`` of a family's model; of the last family only."""
    state = {}

    def build(family):
        if family not in state:
            state.clear()
            path = families.write_narrow(family, models_dir / "diffusion_models")
            state[family] = path, families.capture(load(comfy, path, "fp32"), family)
        return state[family]

    return build


def attentions(model, call):
    """(result, {module that attends: dtypes of its attention's operands}) of a call after the first."""
    families.replay(model, call)
    with MatmulSpy(model.model.diffusion_model) as spy:
        result = families.replay(model, call)
    met = {}
    for product in spy.seen:
        if product.op not in LAYERS:
            met.setdefault(product.layer, set()).update(product.operands)
    return result, met


def dtypes_in(met, block):
    """(dtypes of the attentions in a block, of the others)"""
    sides = (set(), set())
    for name, dtypes in met.items():
        sides[not f"{name}.".startswith(f"{block}.")].update(dtypes)
    return sides


@pytest.mark.parametrize("pattern", NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_attention_of_the_named_block_runs_in_fp32(comfy, model_of, family, pattern):
    path, call = model_of(family)
    block = FAMILIES[family]
    model = load(comfy, path, "as_file", "bf16", rules_from(f"{pattern.format(block)} attention=fp32"))
    _, met = attentions(model, call)
    assert dtypes_in(met, block) == ({"fp32"}, {"bf16"})
    found = report(comfy, model)
    assert found["without_effect"] == [] and found["attention_in_fp32"] == [block]
    assert found["decisions"]["attention by rule"] == f"fp32 in {block}"
    assert f"{block} attention=fp32" in found["rules"].splitlines()


@pytest.mark.parametrize(("family", "name"), [("wan", "blocks"), ("sdxl", "middle_block"), ("sdxl", "input_blocks.3")])
def test_a_block_that_is_never_called_itself_stands_for_what_is_in_it(comfy, model_of, family, name):
    """ComfyUI goes through a UNet's blocks and lists of blocks itself."""
    path, call = model_of(family)
    model = load(comfy, path, "as_file", "bf16", rules_from(f"{name} attention=fp32"))
    _, met = attentions(model, call)
    assert dtypes_in(met, name) == ({"fp32"}, set() if name == "blocks" else {"bf16"})
    found = report(comfy, model)
    assert found["without_effect"] == [] and all(block.startswith(f"{name}.") for block in found["attention_in_fp32"])


def test_the_attention_of_a_block_that_is_called_by_another_forward(comfy, model_of, monkeypatch):
    """As those of Wan-Animate-2 and SenseNova, whose models call ``forward_gen`` and the like of their blocks."""
    path, call = model_of("wan")
    model = load(comfy, path, "as_file", "bf16", rules_from("blocks.1 attention=fp32"))
    cls = type(model.model.diffusion_model.blocks[1])
    monkeypatch.setattr(cls, "forward_gen", cls.forward, raising=False)
    monkeypatch.setattr(cls, "__call__", lambda block, *args, **kwargs: block.forward_gen(*args, **kwargs))
    _, met = attentions(model, call)
    assert dtypes_in(met, "blocks.1") == ({"fp32"}, {"bf16"})
    found = report(comfy, model)
    assert found["without_effect"] == [] and found["attention_in_fp32"] == ["blocks.1"]


@pytest.mark.parametrize("compute", ["fp16", "bf16", "fp16_safe"])
def test_in_every_arithmetic(comfy, model_of, compute):
    path, call = model_of("wan")
    stored = load(comfy, path, "as_file", compute)
    plain, before = attentions(stored, call)
    model = with_compute(comfy, stored, compute, rules_from("blocks.1.self_attn attention=fp32"))
    ruled, met = attentions(model, call)
    narrow = {"bf16" if compute == "bf16" else "fp16"}
    assert dtypes_in(met, "blocks.1.self_attn") == ({"fp32"}, narrow)
    assert set().union(*before.values()) == narrow
    assert torch.isfinite(ruled).all() and not torch.equal(plain, ruled)
    again, _ = attentions(stored, call)
    assert torch.equal(again, plain), "the model it was cloned from has no rule"


def test_a_rule_that_cannot_act_is_listed_with_its_reason(comfy, model_of):
    path, call = model_of("wan")
    lines = (
        "nothing.* attention=fp32",
        "blocks.0.ffn attention=fp32",
        "class:Linear attention=fp32",
        "blocks.0 attention=fp32",
        "role:outside attention=fp32",
    )
    model = load(comfy, path, "as_file", "bf16", rules_from("\n".join(lines)))
    assert {entry["setting"] for entry in report(comfy, model)["without_effect"]} == {lines[0], lines[2], lines[4]}, (
        "what attends is known after a call"
    )
    families.replay(model, call)
    found = {entry["setting"]: entry["reason"] for entry in report(comfy, model)["without_effect"]}
    assert set(found) == {*lines} - {"blocks.0 attention=fp32"}
    assert (
        "matches no block" in found[lines[0]]
        and found["blocks.0.ffn attention=fp32"]
        == "no attention that ComfyUI allows to be replaced ran in a forward of blocks.0.ffn"
    )


def test_by_class_and_with_settings_of_its_layers(comfy, model_of):
    path, call = model_of("wan")
    model = load(
        comfy,
        path,
        "as_file",
        "fp16",
        rules_from("class:WanSelfAttention attention=fp32\nblocks.0 attention=fp32 stream=fp32"),
    )
    _, met = attentions(model, call)
    assert len(met) == 4
    for name, dtypes in met.items():
        assert dtypes == ({"fp32"} if name == "blocks.0.cross_attn" or name.endswith("self_attn") else {"fp16"})
    settings = {entry["setting"] for entry in report(comfy, model)["without_effect"]}
    assert settings == {"blocks.0 stream=fp32"}, "as a pattern over layers it matches none"
