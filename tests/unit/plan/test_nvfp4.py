"""nvfp4 by family: what Comfy-Org's own recipes keep out of it stays out by default, and families that lose quality are told."""

from fnmatch import fnmatch

import pytest
import torch
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.devices.detect import detect
from halfsafe.precision.plan.facts import LayerSpec, ModelFacts
from halfsafe.precision.plan.layers import LoadTarget, plan_storage
from halfsafe.precision.plan.load import plan_load
from halfsafe.precision.plan.nvfp4 import DOUBTS, NOT_IN_NVFP4, nvfp4_doubts, shapes_by_weight
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.study.tradeoffs import Setting, Tradeoff
from safetensors.torch import save_file

# ``include`` and ``exclude`` of ``configs/*nvfp4*.yaml`` in Comfy-Org/comfy-quants, pull request 6 (16c6449d).
RECIPES = {
    "anima_2b_nvfp4": (["net.blocks.*"], ["net.blocks.0.*", "net.blocks.1.adaln_modulation*"]),
    "flux2_nvfp4_mixed": (["double_blocks.*", "single_blocks.*"], ["*_attn.qkv", "*_attn.proj"]),
    "flux_nvfp4": (["double_blocks.*", "single_blocks.*"], []),
    "ideogram4_nvfp4": (["layers.*"], []),
    "ltxv_nvfp4": (["transformer_blocks.*"], []),
    "qwen_image_2512_nvfp4": (
        [
            "transformer_blocks.*.attn.to_*",
            "transformer_blocks.*.attn.add_*_proj",
            "transformer_blocks.*.img_mlp.*",
            "transformer_blocks.*.txt_mlp.*",
            "transformer_blocks.*.img_mod.1",
            "transformer_blocks.*.txt_mod.1",
        ],
        ["transformer_blocks.0.img_mod.1", "*.norm*", "*txt_norm*", "*norm_out*", "*proj_out*"],
    ),
}


def linears(prefix, **shapes):
    return [LayerSpec(f"{prefix}.{name}", "Linear", shape) for name, shape in shapes.items()]


def flux2(hidden=6144, double=8, single=48):
    """Flux.2's layers, by default those of Flux.2 dev."""
    wide = 3 * hidden
    layers = [LayerSpec("img_in", "Linear", (hidden, 128)), LayerSpec("txt_in", "Linear", (hidden, 15360))]
    layers += linears("double_stream_modulation_img", lin=(6 * hidden, hidden))
    for n in range(double):
        for stream in ("img", "txt"):
            attention = {f"{stream}_attn.qkv": (3 * hidden, hidden), f"{stream}_attn.proj": (hidden, hidden)}
            mlp = {f"{stream}_mlp.0": (2 * wide, hidden), f"{stream}_mlp.2": (hidden, wide)}
            layers += linears(f"double_blocks.{n}", **attention, **mlp)
    for n in range(single):
        shapes = {"linear1": (3 * hidden + 2 * wide, hidden), "linear2": (hidden, hidden + wide)}
        layers += linears(f"single_blocks.{n}", **shapes)
    return [*layers, LayerSpec("final_layer.linear", "Linear", (128, hidden))]


def anima(width=256, blocks=3):
    layers = [LayerSpec("x_embedder.proj.1", "Linear", (width, 64))]
    for n in range(blocks):
        attention = {f"{kind}_attn.{part}_proj": (width, width) for kind in ("self", "cross") for part in "qkv"}
        mlp = {"mlp.layer1": (4 * width, width), "mlp.layer2": (width, 4 * width)}
        layers += linears(f"blocks.{n}", **attention, **mlp, **{"adaln_modulation_mlp.2": (3 * width, width)})
    layers += [layer for n in range(2) for layer in linears(f"llm_adapter.blocks.{n}.cross_attn", q_proj=(256, 256))]
    return layers


def in_nvfp4(layers, rules=None, storage="nvfp4"):
    plans = plan_storage(layers, storage, rules or rules_from())
    return {name for name, plan in plans.items() if plan.storage == "nvfp4"}


def by_recipe(layers, name, prefix=""):
    include, exclude = RECIPES[name]
    names = {layer.name: prefix + layer.name for layer in layers}
    inside = {own for own, full in names.items() if any(fnmatch(full, pattern) for pattern in include)}
    return {own for own in inside if not any(fnmatch(names[own], pattern) for pattern in exclude)}


def test_flux2_dev_has_the_128_layers_of_comfy_orgs_mixed_recipe():
    """docs/quantization/flux2.md of that pull request: "This quantizes 128 Linears (vs 160)"."""
    layers = flux2()
    assert in_nvfp4(layers) == by_recipe(layers, "flux2_nvfp4_mixed")
    assert len(in_nvfp4(layers)) == 128 and len(in_nvfp4(layers, rules_from(preset="none"))) == 160


def test_anima_has_no_layer_that_comfy_orgs_recipe_keeps_out():
    layers = anima()
    ours, recipe = in_nvfp4(layers), by_recipe(layers, "anima_2b_nvfp4", "net.")
    assert ours <= recipe and set(recipe - ours) == {"blocks.2.adaln_modulation_mlp.2"}


@pytest.mark.parametrize("layers", [flux2(256, 2, 2), anima()], ids=["Flux.2", "Anima"])
def test_only_nvfp4_and_only_by_default_is_kept_back(layers):
    ours, all_of = in_nvfp4(layers), in_nvfp4(layers, rules_from(preset="none"))
    kept = {layer.name for layer in layers if layer.name in all_of - ours}
    plans = plan_storage(layers, "nvfp4", rules_from())
    assert all(plans[name].kept and plans[name].why_stored for name in kept)
    eight = {name for name, plan in plan_storage(layers, "mxfp8", rules_from()).items() if plan.storage == "mxfp8"}
    assert ours < eight, "mxfp8 keeps none of it back"
    attention = {name for name in kept if "attn" in name}
    assert attention and attention <= in_nvfp4(layers, rules_from("*attn* storage=nvfp4")), "one's own rule wins"


@pytest.mark.parametrize("layers", [flux2(256, 2, 2), anima()], ids=["Flux.2", "Anima"])
def test_rules_of_what_was_measured_keep_the_same_layers_back(layers):
    rules = Tradeoff(Setting("nvfp4", "auto"), storage="nvfp4").rules_for("bf16", layers)
    assert in_nvfp4(layers, rules, "as_file") == in_nvfp4(layers)


KREA = [
    *linears("txtfusion", projector=(1, 12)),
    *(layer for n in range(3) for layer in linears(f"blocks.{n}", **{"attn.wq": (64, 64), "mlp.up": (64, 64)})),
]
TOLD = {
    "Krea 2": KREA,
    "Ideogram 4": [LayerSpec("embed_image_indicator", "Embedding", (2, 64)), *KREA[1:]],
    "Qwen-Image": [
        LayerSpec("txt_norm", "RMSNorm", (64,)),
        *(layer for n in range(2) for layer in linears(f"transformer_blocks.{n}", **{"img_mod.1": (384, 64), "img_mlp.net.2": (64, 64)})),
    ],
    "Z-Image, Ming-Image or Lumina 2": [
        *linears("cap_embedder", **{"1": (64, 64)}),
        *(layer for n in range(2) for layer in linears(f"layers.{n}", **{"attention.qkv": (192, 64), "feed_forward.w1": (64, 64)})),
    ],
}  # fmt: skip


@pytest.mark.parametrize("family", DOUBTS)
def test_a_family_that_is_known_to_lose_quality_is_told_by_the_loader_with_its_source(family):
    facts = ModelFacts(TOLD[family], 10**9, "bf16", ("bf16", "fp32"))
    target = LoadTarget(detect(profile="sm_120"))
    notes = {
        storage: plan_load(facts, storage, "auto", rules_from(), target).costs
        for storage in ("nvfp4", "int8", "mxfp8", "as_file")
    }
    (told,) = notes.pop("nvfp4")
    assert family in told and DOUBTS[family] in told and any(mark in told for mark in ("#", "discussion"))
    assert {*notes.values()} == {()}


def test_other_families_are_not_doubted():
    for layers in (flux2(256, 2, 2), anima()):
        assert nvfp4_doubts(shapes_by_weight(layers), plan_storage(layers, "nvfp4", rules_from()).values()) == []
    assert not NOT_IN_NVFP4.keys() & DOUBTS.keys()


def test_convert_tells_it_and_puts_it_on_the_card(tmp_path):
    pytest.importorskip("comfy_kitchen")
    save_file({f"{layer.name}.weight": torch.randn(layer.shape) for layer in KREA}, tmp_path / "in.safetensors")
    summary = convert_file(tmp_path / "in.safetensors", tmp_path / "out.safetensors", "nvfp4", rules_from(), card=True)
    assert summary.weights["nvfp4"] == 6 and summary.notes[0].startswith(
        "nvfp4 is reported to lose quality in Krea 2: "
    )
    card = (tmp_path / "out.md").read_text(encoding="utf-8")
    assert "## Notes\n\n- nvfp4 is reported to lose quality in Krea 2: " in card and "Comfy-Org/Krea-2" in card
