"""Names of repeated layers: the block each is in, and whether all blocks are alike."""

import pytest
from halfsafe.precision.base.layer_names import are_alike, block_of


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("blocks.3.attn.q", "blocks.3"),
        ("input_blocks.4.1.transformer_blocks.0.attn2.to_k", "input_blocks.4"),
        ("token_refiner.blocks.0.mlp.fc2", "token_refiner.blocks.0"),
        ("final_layer.linear", ""),
    ],
)
def test_a_layer_is_in_the_outermost_block_that_has_a_number(name, block):
    assert block_of(name) == block


def test_blocks_are_alike_where_each_of_their_layers_is_of_one_kind():
    names = [f"blocks.{block}.{layer}" for block in range(3) for layer in ("qkv", "out")] + ["head"]
    kinds = {name: "fp16" for name in names if "qkv" in name}
    assert are_alike(kinds | {"head": "fp32"}, names) and are_alike({}, names)
    assert not are_alike(kinds | {"blocks.1.qkv": "fp32"}, names) and not are_alike(
        kinds | {"blocks.1.out": "fp32"}, names
    )
