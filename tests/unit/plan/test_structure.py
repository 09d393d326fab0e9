"""Roles of layers by names and shapes: what is in the repeated blocks, what is outside, and what modulates them."""

from math import prod

import pytest
from halfsafe.precision.plan.facts import LayerSpec
from halfsafe.precision.plan.structure import MODULATION, OUTSIDE, roles_of, stacks_of

WIDTH = 64


def linears(sizes: dict[str, tuple[int, int]]) -> list[LayerSpec]:
    return [LayerSpec(name, "Linear", shape) for name, shape in sizes.items()]


def block(prefix: str, width: int = WIDTH, **more: tuple[int, int]) -> list[LayerSpec]:
    """Attention with a fused qkv, and a plain MLP."""
    sizes = {
        "attn.qkv": (3 * width, width),
        "attn.out": (width, width),
        "mlp.0": (4 * width, width),
        "mlp.2": (width, 4 * width),
    }
    return linears({f"{prefix}.{name.replace('__', '.')}": shape for name, shape in (sizes | more).items()})


def stack(name: str, count: int, width: int = WIDTH, **more: tuple[int, int]) -> list[LayerSpec]:
    return [layer for index in range(count) for layer in block(f"{name}.{index}", width, **more)]


def named(role: str, layers: list[LayerSpec]) -> set[str]:
    return {name for name, found in roles_of(layers).items() if found == role}


FIRST, LAST = linears({"first": (WIDTH, 16)}), linears({"last.linear": (16, WIDTH)})


def test_what_lies_outside_the_blocks_is_outside_whatever_it_is_called():
    layers = [*FIRST, *stack("whatever", 4), *LAST]
    assert roles_of(layers) == {"first": OUTSIDE, "last.linear": OUTSIDE}


def test_a_model_without_blocks_has_no_roles():
    assert roles_of(linears({"0": (64, 64), "2": (64, 64), "head": (8, 64)})) == {}


def test_layers_that_multiply_nothing_have_no_role():
    norms = [LayerSpec("norm", "LayerNorm", (WIDTH,)), LayerSpec("table", "Embedding", (9, WIDTH))]
    assert roles_of([*norms, *stack("blocks", 3)]) == {}


def test_a_numbered_list_of_single_layers_is_no_stack():
    mappers = linears({f"caption_projection.{index}.linear": (WIDTH, 32) for index in range(6)})
    assert named(OUTSIDE, [*mappers, *stack("blocks", 3)]) == {layer.name for layer in mappers}


@pytest.mark.parametrize("names", [("double_blocks", "single_blocks"), ("blocks.block", "net.block")])
def test_several_stacks_are_found(names):
    first, second = (stack(name, count) for name, count in zip(names, (3, 5), strict=True))
    assert sorted(map(len, stacks_of([*FIRST, *first, *second]))) == [3, 5]
    assert named(OUTSIDE, [*FIRST, *first, *second]) == {"first"}


def test_blocks_numbered_in_a_word_are_a_stack():
    layers = [layer for index in range(4) for layer in block(f"blocks.block{index}")]
    assert [len(found) for found in stacks_of(layers)] == [4]


def test_a_unet_whose_levels_differ_in_width_is_its_blocks():
    inputs = [LayerSpec("input_blocks.0.0", "Conv2d", (64, 4, 3, 3))]
    for index, width in enumerate((64, 64, 128, 128), 1):
        inputs += linears(
            {f"input_blocks.{index}.0.{name}": (width, width) for name in ("in_layers.2", "out_layers.3")}
        )
        inputs += block(f"input_blocks.{index}.1.transformer_blocks.0", width) if width > 64 else []
    resnets = [
        linears({f"middle_block.{index}.{name}": (128, 128) for name in ("in_layers.2", "out_layers.3")})
        for index in (0, 2)
    ]
    middle = [*resnets[0], *block("middle_block.1.transformer_blocks.0", 128), *resnets[1]]
    layers = [*inputs, *middle, LayerSpec("out.2", "Conv2d", (4, 64, 3, 3)), *linears({"time_embed.0": (256, 64)})]
    assert named(OUTSIDE, layers) == {"input_blocks.0.0", "out.2", "time_embed.0"}


def test_the_first_and_last_of_plain_sequential_layers_are_outside():
    embedder = linears({"0.table": (WIDTH, 16), "0.position": (WIDTH, 8)})
    blocks = [layer for index in range(1, 6) for layer in block(str(index))]
    head = linears({"6.proj": (WIDTH, WIDTH), "6.out": (16, WIDTH)})
    assert named(OUTSIDE, [*embedder, *blocks, *head]) == {layer.name for layer in (*embedder, *head)}


def test_one_block_is_the_body_of_a_small_model():
    assert named(OUTSIDE, [*FIRST, *stack("blocks", 1), *LAST]) == {"first", "last.linear"}


@pytest.mark.parametrize("name", ["mlp_t5", "t_embedder.1", "label_emb.0"])
def test_an_mlp_whose_name_ends_in_a_number_is_no_block(name):
    """HunyuanDiT projects its second text by ``mlp_t5``, which is more than 5 % of a small model of it."""
    layers = linears({f"{name}.0": (4 * WIDTH, WIDTH), f"{name}.2": (WIDTH, 4 * WIDTH)})
    assert named(OUTSIDE, [*layers, *stack("blocks", 3)]) == {layer.name for layer in layers}


def test_blocks_inside_blocks_do_not_count():
    experts = {f"experts__{index}__{name}": (WIDTH, WIDTH) for index in range(9) for name in ("up", "down")}
    assert named(OUTSIDE, [*FIRST, *stack("blocks", 3, **experts)]) == {"first"}


def test_a_short_stack_is_a_refiner_only_with_few_weights():
    small, large = stack("refiner", 2, WIDTH // 2), stack("refiner", 2)
    assert named(OUTSIDE, [*small, *stack("blocks", 24)]) == {layer.name for layer in small}
    assert named(OUTSIDE, [*large, *stack("blocks", 24)]) == set()
    assert named(OUTSIDE, [*stack("refiner", 2, WIDTH // 8), *stack("blocks", 6)]) == set()


def test_short_stacks_count_together_and_without_their_modulation():
    body = stack("blocks", 30)
    one, two = stack("connector", 1, 72), stack("refiner", 2, 50)
    assert all(
        sum(prod(layer.shape) for layer in side) < 0.045 * sum(prod(layer.shape) for layer in body)
        for side in (one, two)
    )
    embedder = linears({"connector.0.norm": (72, 72), "connector.0.scale": (72, 72)})
    assert named(OUTSIDE, [*two, *body]) == {layer.name for layer in two}
    assert named(OUTSIDE, [*one, *embedder, *two, *body]) == {layer.name for layer in (*one, *embedder)}
    modulated = stack("refiner", 2, 50, adaLN=(12 * 50, 50))
    assert sum(prod(layer.shape) for layer in modulated) > 0.06 * sum(prod(layer.shape) for layer in body)
    assert named(OUTSIDE, [*modulated, *body]) == {layer.name for layer in modulated}


def test_blocks_of_which_each_is_a_little_different_are_a_stack():
    layers = [
        layer
        for index in range(2)
        for layer in block(f"vace_blocks.{index}", **{f"only_{'ab'[index]}": (WIDTH, WIDTH)})
    ]
    assert [len(found) for found in stacks_of(layers)] == [2]


def test_stacks_of_one_length_are_treated_alike_and_shorter_ones_by_themselves():
    body = stack("blocks", 30)
    twins = [*stack("a_refiner", 2, 48), *stack("b_refiner", 2, 48)]
    embedder = linears({"t_embedder.1.linear_1": (WIDTH, 16), "t_embedder.1.linear_2": (WIDTH, WIDTH)})
    weights = sum(prod(layer.shape) for layer in (*body, *twins))
    one = sum(prod(layer.shape) for layer in twins) / 2
    assert one < 0.05 * weights < 2 * one
    assert named(OUTSIDE, [*embedder, *twins, *body]) == {layer.name for layer in embedder}


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("adaLN.1", (6 * WIDTH, WIDTH)),
        ("img_mod.1", (12 * WIDTH, WIDTH)),
        ("norm1.linear", (4 * WIDTH, 16)),
        ("visual.out_layer", (9 * WIDTH, 16)),
        ("cond", (3 * WIDTH, 16)),
    ],
)
def test_modulation_is_found_by_its_shape(name, shape):
    layers = stack("blocks", 4, **{name.replace(".", "__"): shape})
    if shape == (4 * WIDTH, 16):
        layers = [layer for layer in layers if ".mlp" not in layer.name] + _gated(4)
    assert named(MODULATION, layers) == {f"blocks.{index}.{name}" for index in range(4)}


def _gated(count: int, hidden: int = 3 * WIDTH // 2) -> list[LayerSpec]:
    sizes = {"ff.w1": (hidden, WIDTH), "ff.w3": (hidden, WIDTH), "ff.w2": (WIDTH, hidden)}
    return linears({f"blocks.{index}.{name}": shape for index in range(count) for name, shape in sizes.items()})


@pytest.mark.parametrize(
    "sizes",
    [
        {"mlp.fc1": (8 * WIDTH, WIDTH), "mlp.fc2": (WIDTH, 4 * WIDTH)},
        {"linear1": (7 * WIDTH, WIDTH), "linear2": (WIDTH, 5 * WIDTH)},
        {"linear1": (9 * WIDTH, WIDTH), "linear2": (WIDTH, 4 * WIDTH)},
        {"attn.qkv": (6 * WIDTH, WIDTH), "attn.out": (WIDTH, 2 * WIDTH), "q": (WIDTH, WIDTH)},
        {"mlp.gate": (4 * WIDTH, WIDTH), "mlp.up": (4 * WIDTH, WIDTH), "mlp.down": (WIDTH, 4 * WIDTH)},
        {"cross.kv": (2 * WIDTH, 48), "cross.q": (WIDTH, WIDTH), "cross.out": (WIDTH, WIDTH)},
        {
            "qkv_x": (3 * WIDTH, WIDTH),
            "qkv_y": (3 * WIDTH, WIDTH // 2),
            "out_x": (WIDTH, WIDTH),
            "out_y": (WIDTH // 2, WIDTH),
        },
    ],
    ids=["gated", "flux", "flux2", "wide attention", "gate and up", "cross attention", "two streams"],
)
def test_projections_and_mlps_are_no_modulation(sizes):
    layers = linears({f"blocks.{index}.{name}": shape for index in range(4) for name, shape in sizes.items()})
    assert roles_of([*layers, *FIRST]) == {"first": OUTSIDE}


def test_what_shapes_cannot_tell_is_left_to_the_names():
    fused_like_qkv = stack("blocks", 4, modulation__lin=(3 * WIDTH, WIDTH))
    as_large_as_the_mlp = stack("blocks", 4, adaLN__1=(4 * WIDTH, 16))
    assert named(MODULATION, fused_like_qkv) == named(MODULATION, as_large_as_the_mlp) == set()


NEWER = {
    "qwen_image21": (
        {"img_in": (4096, 64), "proj_out": (64, 4096), "modulation.1": (16384, 4096), "norm_out.linear": (4096, 4096),
         "txt_in.in_layer": (4096, 4096), "time_text_embed.timestep_embedder.linear_1": (4096, 256)},
        {"transformer_blocks.#.attn.to_q": (4096, 4096), "transformer_blocks.#.attn.to_out.0": (4096, 4096),
         "transformer_blocks.#.img_mlp.gate_up": (24576, 4096), "transformer_blocks.#.img_mlp.out": (4096, 12288)},
    ),
    "sensenova_u15": (
        {"language_model.lm_head": (151936, 4096), "fm_modules.timestep_embedder.mlp.0": (4096, 256),
         "fm_modules.timestep_embedder.mlp.2": (4096, 4096)},
        {f"language_model.model.layers.#.{name}{twin}": shape for twin in ("", "_mot_gen") for name, shape in {
            "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (1024, 4096), "self_attn.o_proj": (4096, 4096)}.items()}
        | {f"language_model.model.layers.#.mlp{twin}.{name}": shape for twin in ("", "_mot_gen") for name, shape in {
            "gate_proj": (12288, 4096), "up_proj": (12288, 4096), "down_proj": (4096, 12288)}.items()},
    ),
    "yue2": (
        {"vae2llm": (2048, 64), "llm2vae": (64, 2048), "time_embedder.mlp.0": (2048, 256)},
        {"model.layers.#.self_attn.qkv_proj": (4096, 2048), "model.layers.#.self_attn.o_proj": (2048, 2048),
         "model.layers.#.mlp.gate_up_proj": (12288, 2048), "model.layers.#.mlp.down_proj": (2048, 6144)},
    ),
    "minimax_music3": (
        {"latent_conditioners.0": (2048, 4096), "diffusion_transformer.transformer.project_in": (2048, 2304),
         "diffusion_transformer.to_timestep_embed.0": (2048, 256)},
        {f"diffusion_transformer.transformer.layers.#.{name}": shape for name, shape in {
            "self_attn.to_qkv": (6144, 2048), "self_attn.to_out": (2048, 2048), "ff.ff.0.proj": (16384, 2048), "ff.ff.2": (2048, 8192)}.items()},
    ),
    "trellis2": (
        {f"{model}.{name}": shape for model in ("img2shape", "img2shape_512", "structure_model") for name, shape in {
            "input_layer": (1536, 32), "out_layer": (32, 1536), "adaLN_modulation.1": (9216, 1536), "t_embedder.mlp.0": (1536, 256)}.items()},
        {f"{model}.blocks.#.{name}": shape for model in ("img2shape", "img2shape_512", "structure_model") for name, shape in {
            "self_attn.to_qkv": (4608, 1536), "cross_attn.to_kv": (3072, 1024), "mlp.mlp.0": (8192, 1536), "mlp.mlp.2": (1536, 8192)}.items()},
    ),
}  # fmt: skip
"""Families since ComfyUI 0.30 as its source has them: the layers that stay high, and those of a block."""


@pytest.mark.parametrize("family", NEWER)
def test_what_stays_high_in_families_of_later_comfyuis(family):
    high, low = NEWER[family]
    blocks = {name.replace("#", str(index)): shape for index in range(30) for name, shape in low.items()}
    assert set(roles_of(linears(high | blocks))) == set(high)


def test_the_first_layer_of_an_mlp_beside_an_attention_is_no_modulation():
    """Flux's single block as diffusers names it: its last layer takes the attention and the MLP together."""
    sizes = {f"attn.to_{leaf}": (WIDTH, WIDTH) for leaf in "qkv"}
    sizes |= {"proj_mlp": (4 * WIDTH, WIDTH), "proj_out": (WIDTH, 5 * WIDTH), "norm.linear": (3 * WIDTH, WIDTH)}
    layers = [
        layer for index in range(3) for layer in linears({f"blocks.{index}.{name}": it for name, it in sizes.items()})
    ]
    assert named(MODULATION, [*FIRST, *layers]) == set()
