import pytest
from halfsafe.precision.base.errors import HalfsafeError, RuleError
from halfsafe.precision.plan.facts import LayerSpec
from halfsafe.precision.plan.layers import plan_storage
from halfsafe.precision.plan.presets import PRESETS
from halfsafe.precision.plan.rules import TEXT_ENCODER_RULES, Rules, rules_from


def storage_of(rules, name, cls="Linear"):
    found = rules.setting("storage", name, cls)
    return found[0] if found else None


def test_later_lines_win():
    rules = rules_from("blocks.* storage=fp16\nblocks.1.* storage=bf16", "none")
    assert [storage_of(rules, f"blocks.{i}.ffn.0") for i in (0, 1)] == ["fp16", "bf16"]


def test_own_lines_win_over_presets_even_over_a_later_nodes_preset():
    first = rules_from("time_embedding.0 storage=fp8_e4m3fn", "none")
    assert storage_of(rules_from("", "keep sensitive layers", first), "time_embedding.0") == "fp8_e4m3fn"


def test_previous_rules_are_built_on():
    rules = rules_from("a storage=fp16", "none", rules_from("a storage=bf16\nb storage=bf16", "wan"))
    assert (storage_of(rules, "a"), storage_of(rules, "b"), storage_of(rules, "head.head")) == (
        "fp16",
        "bf16",
        "as_file",
    )


@pytest.mark.parametrize(
    ("pattern", "name", "cls", "matches"),
    [
        ("blocks.0.*", "blocks.0.ffn.0", "Linear", True),
        ("blocks.0.*", "xblocks.0.ffn.0", "Linear", False),
        ("blocks.?.ffn.[02]", "blocks.3.ffn.2", "Linear", True),
        ("re:ffn\\.(0|2)$", "blocks.3.ffn.2", "Linear", True),
        ("re:^ffn", "blocks.3.ffn.2", "Linear", False),
        ("class:Linear", "anything", "Linear", True),
        ("class:*Norm*", "norm", "RMSNorm", True),
        ("class:Linear", "Linear", "Conv2d", False),
        ("Blocks.*", "blocks.0", "Linear", False),
    ],
)
def test_patterns(pattern, name, cls, matches):
    assert rules_from(f"{pattern} storage=bf16").own[0].matches(name, cls) is matches


def test_one_line_sets_several_keys_and_each_is_looked_up_alone():
    rules = rules_from("a storage=bf16 compute=fp32 accumulation=fp32 stream=fp32\na storage=fp16", "none")
    assert rules.setting("storage", "a", "")[0] == "fp16"
    assert rules.setting("compute", "a", "")[0] == "fp32"
    assert rules.setting("stream", "b", "") is None


@pytest.mark.parametrize(
    ("pattern", "matches"),
    [("blocks.1", True), ("blocks.1.*", True), (r"re:^blocks\.1\.", True), ("class:Block", True), ("*", True), ("blocks.1?", False), ("blocks.1.ffn*", False), ("class:Linear", False)],
)  # fmt: skip
def test_a_pattern_on_a_block_or_on_all_that_is_in_it(pattern, matches):
    rule = rules_from(f"{pattern} attention=fp32").own[0]
    assert rule.matches_block("blocks.1", "Block") is matches
    assert rules_from(str(rule), "wan").all[-1:] == (rule,)


def test_spaces_around_the_equals_sign_and_capitals_are_read():
    assert rules_from("blocks.0.* storage = BF16  compute= Fp32").own[0].settings == (
        ("storage", "bf16"),
        ("compute", "fp32"),
    )


def test_comments_and_blank_lines():
    rules = rules_from("# heading\n\n  a storage=bf16   # outlier channels\nre:x#y storage=fp16\n").own
    assert [(rule.pattern, rule.reason) for rule in rules] == [("a", "outlier channels"), ("re:x#y", "")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("blocks.0.*", "has no setting"),
        ("a colour=red", "colour=red"),
        ("a storage=fp4", "'fp4' is not a valid value for 'storage'"),
        ("a storage=auto", "'auto' is not a valid value for 'storage'"),
        ("storage=bf16 a", "not a pattern"),
        ("role:inside storage=bf16", "'inside' is not a layer role.*outside, modulation"),
        ("re:( storage=bf16", "not a regular expression"),
        ("a storage=bf16 nonsense", "nonsense"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(line, words):
    with pytest.raises(RuleError, match=f"line 3: .*{words}") as caught:
        rules_from(f"ok storage=bf16\n# comment\n{line}")
    assert caught.value.line == 3


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(HalfsafeError, match="keep sensitive layers"):
        rules_from("", "best")


@pytest.mark.parametrize("preset", PRESETS)
def test_text_reads_back_as_the_same_decisions(preset):
    rules = rules_from("blocks.1.* storage=fp16 compute=bf16  # mine", preset)
    again = rules_from(rules.to_text(), "none")
    for name in ("blocks.1.ffn.0", "time_embedding.0", "head.head", "img_in", "double_blocks.0.img_mod.lin"):
        assert storage_of(again, name) == storage_of(rules, name)
    assert rules_from(rules.to_text()).own[-1].reason == "mine"


def test_patterns_without_a_match_are_found_among_own_rules_only():
    rules = rules_from("nowhere.* storage=bf16\nclass:Linear storage=fp16", "flux")
    assert [rule.pattern for rule in rules.without_match([("blocks.0", "Linear")])] == ["nowhere.*"]


SENSITIVE = {
    "wan": ["patch_embedding", "text_embedding.0", "time_embedding.2", "time_projection.1", "head.head", "img_emb.proj.1"],
    "flux": ["img_in", "txt_in", "time_in.in_layer", "guidance_in.out_layer", "vector_in.in_layer", "final_layer.linear",
             "double_blocks.3.img_mod.lin", "single_blocks.7.modulation.lin", "final_layer.adaLN_modulation.1"],
    "chroma": ["distilled_guidance_layer.in_proj", "distilled_guidance_layer.layers.0.in_layer"],
    "qwen_image": ["img_in", "txt_in", "time_text_embed.timestep_embedder.linear_1", "norm_out.linear", "proj_out",
                   "transformer_blocks.0.img_mod.1", "transformer_blocks.9.txt_mod.1"],
    "z_image": ["x_embedder", "t_embedder.mlp.0", "cap_embedder.1", "final_layer.linear", "layers.3.adaLN_modulation.0"],
    "hunyuan_video": ["img_in.proj", "txt_in.input_embedder", "vector_in.in_layer", "double_blocks.0.txt_mod.lin"],
    "ltx": ["patchify_proj", "adaln_single.linear", "caption_projection.linear_1", "proj_out"],
    "sd3": ["x_embedder.proj", "context_embedder", "y_embedder.mlp.0", "joint_blocks.0.x_block.adaLN_modulation.1"],
    "sdxl": ["time_embed.0", "label_emb.0.0", "input_blocks.0.0", "input_blocks.4.0.emb_layers.1", "out.2"],
}  # fmt: skip


@pytest.mark.parametrize("family", SENSITIVE)
def test_default_preset_keeps_the_sensitive_layers_of_each_family(family):
    found = {name: rules_from().setting("storage", name, "Linear") for name in SENSITIVE[family]}
    assert all(one and one[0] == "as_file" and one[1].reason for one in found.values()), found
    assert rules_from().setting("storage", "blocks.0.self_attn.q", "Linear") is None


KREA = [
    LayerSpec("first", "Linear", (64, 16)),
    *(LayerSpec(f"blocks.{index}.{name}", "Linear", (64, 64)) for index in range(3) for name in ("wq", "wo")),
    LayerSpec("last.linear", "Linear", (16, 64)),
]


def storages(rules):
    return {
        layer.name: storage_of(rules.on(KREA), layer.name) for layer in KREA if not layer.name.startswith("blocks.1")
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_but_none_keeps_what_lies_outside_the_blocks_and_says_so(preset):
    rules = rules_from("", preset)
    kept = {name for name, storage in storages(rules).items() if storage == "as_file" and not name.startswith("blocks")}
    assert kept == (set() if preset == "none" else {"first", "last.linear"})
    if kept:
        assert rules.on(KREA).setting("storage", "first", "Linear")[1].reason == "outside the repeated blocks"
        assert storages(rules_from(rules.to_text(), "none")) == storages(rules)


def test_own_rules_win_over_the_structure_and_may_be_about_it():
    found = storages(rules_from("role:outside storage=int8\nlast.* storage=bf16"))
    assert (found["first"], found["last.linear"], found["blocks.0.wq"]) == ("int8", "bf16", None)
    assert [
        str(rule) for rule in rules_from("role:modulation storage=int8").on(KREA).without_match([("first", "Linear")])
    ] == ["role:modulation storage=int8"]


def test_text_encoders_keep_what_lies_outside_the_blocks():
    layers = plan_storage(KREA, "fp8_e4m3fn", Rules(presets=TEXT_ENCODER_RULES))
    assert {name for name, own in layers.items() if own.kept} == {"first", "last.linear"}


def test_rules_are_values():
    assert rules_from("a storage=bf16") == rules_from("a storage=bf16") != Rules()
    assert hash(rules_from("a storage=bf16"))


def test_layers_and_reasons_in_any_script():
    rules = rules_from("blöcke.注意.* storage=bf16  # 理由: Größe", "none")
    value, rule = rules.setting("storage", "blöcke.注意.q", "Linear")
    assert (value, rule.reason) == ("bf16", "理由: Größe")
    assert rules_from(rules.to_text(), "none") == rules


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_line_ends_where_an_editor_ends_it(separator, end):
    with pytest.raises(RuleError, match="line 2: 'wrong'"):
        rules_from(f"a storage=bf16  # pasted{separator}from a page{end}b storage=wrong", "none")
