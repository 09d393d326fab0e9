import pytest
from halfsafe.precision.arithmetic.result_bound import largest_fp16_result
from halfsafe.precision.base.dtypes import FP16_MAX

FACTORS = (
    "blocks.0.self_attn.q", "blocks.29.cross_attn.k_img", "blocks.0.ffn.0", "double_blocks.0.img_attn.qkv", "double_blocks.0.txt_mlp.0",
    "single_blocks.3.linear1", "joint_blocks.0.x_block.attn.qkv", "joint_blocks.0.x_block.mlp.fc1", "layers.0.attention.qkv",
    "layers.0.feed_forward.w1", "layers.0.feed_forward.w3", "transformer_blocks.0.attn.add_k_proj", "transformer_blocks.0.attn1.to_q",
    "transformer_blocks.0.ff.net.0.proj", "transformer_blocks.0.img_mlp.net.0.proj", "input_blocks.1.0.in_layers.2",
    "input_blocks.4.1.transformer_blocks.0.attn2.to_k", "txt_in.individual_token_refiner.blocks.0.self_attn.qkv",
)  # fmt: skip
SUMMANDS = (
    "blocks.0.self_attn.o", "blocks.0.ffn.2", "double_blocks.0.img_attn.proj", "single_blocks.3.linear2", "layers.0.attention.out",
    "layers.0.feed_forward.w2", "transformer_blocks.0.attn.to_out.0", "transformer_blocks.0.attn.to_add_out", "joint_blocks.0.x_block.mlp.fc2",
    "transformer_blocks.0.ff.net.2", "output_blocks.1.0.out_layers.3", "noise_refiner.0.attention.out",
)  # fmt: skip
STREAMS = (
    "patch_embedding", "img_in", "txt_in", "time_in.in_layer", "text_embedding.0", "head.head", "final_layer.linear", "input_blocks.0.0",
    "input_blocks.4.1.proj_in", "input_blocks.4.1.proj_out", "input_blocks.4.0.skip_connection", "input_blocks.3.0.op",
    "input_blocks.1.0.emb_layers.1", "double_blocks.0.img_mod.lin", "single_blocks.0.modulation.lin", "transformer_blocks.0.img_mod.1",
    "x_embedder", "layers.0.adaLN_modulation.0", "joint_blocks.0.context_block.adaLN_modulation.1", "time_embed.2", "vace_blocks.0.after_proj",
)  # fmt: skip


@pytest.mark.parametrize(("names", "largest"), [(FACTORS, (FP16_MAX / 2) ** 0.5), (SUMMANDS, FP16_MAX), (STREAMS, None)])
def test_factors_fit_fp16_twice_over_summands_once_and_what_begins_or_scales_a_stream_is_fp32(names, largest):
    found = {name: largest_fp16_result(name) for name in names}
    assert all(each is None if largest is None else 0.7 * largest < each <= largest for each in found.values()), found
