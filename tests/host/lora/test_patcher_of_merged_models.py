"""ComfyUI's merge nodes on models whose weights are in 8 bits."""

import pytest
import torch
from halfsafe.nodes.host.lora.merging import rounded_to_nearest
from support import families
from support.families import load
from support.guarding import core, is_finite
from support.measures import relative_error


@pytest.fixture(scope="module")
def other(wan):
    """A model of which some weights are the first one's, and one is its negative."""
    changes = {r"ffn\.0\.weight": 1.5, r"blocks\.1\.self_attn\.q\.weight": -1.0}
    return families.write_scaled(wan, wan.with_name("merged_other.safetensors"), changes)


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_weights_that_a_merge_makes_zero_stay_zero(comfy, wan, other, storage):
    add = core("comfy_extras.nodes_model_merging").ModelAdd().merge

    def made(stored):
        return families.sample(add(load(comfy, wan, stored, "bf16"), load(comfy, other, stored, "bf16"))[0], "wan", steps=1)

    result = made(storage)
    assert is_finite(result) and relative_error(made("bf16"), result) < 0.15


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_weight_of_zeros_is_zeros_in_each_dtype_that_patches_are_added_in(comfy, wan, storage, dtype):
    """ComfyUI adds patches in fp16 on most NVIDIA cards, where the smallest number is too large to be as good as zero."""
    module = load(comfy, wan, storage, "bf16").model.diffusion_model.blocks[0].ffn[0]
    rounded_to_nearest(module, torch.zeros(module.weight.shape, dtype=dtype))
    assert module.weight.dequantize().float().abs().max() < 1e-30


@pytest.mark.parametrize("storages", [("int8", "int8"), ("fp8_e4m3fn", "fp8_e4m3fn"), ("int8", "fp16")])
def test_a_merge_is_that_of_the_models(comfy, wan, other, storages):
    merge = core("comfy_extras.nodes_model_merging").ModelMergeSimple().merge
    parts = zip((wan, other), storages, strict=True)
    result = families.sample(merge(*(load(comfy, path, storage, "bf16") for path, storage in parts), 0.6)[0], "wan", steps=1)
    expected = families.sample(merge(load(comfy, wan, "fp32", "fp32"), load(comfy, other, "fp32", "fp32"), 0.6)[0], "wan", steps=1)
    assert relative_error(expected, result) < 0.08
