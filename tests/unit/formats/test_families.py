"""Names of models, by the shapes of the real files."""

import pytest
from halfsafe.precision.formats.families import FAMILIES, UNKNOWN, family_of

FAMILY_TENSORS = {family.name: dict.fromkeys(family.names, (8, 8)) for family in FAMILIES}
REAL = [
    ("Flux", "Flux", {"img_in.weight": (3072, 64), "guidance_in.in_layer.weight": (3072, 256)}),
    ("Flux", "Flux.1 Fill", {"img_in.weight": (3072, 384), "guidance_in.in_layer.weight": (3072, 256)}),
    ("Flux", "Flux.2", {"img_in.weight": (6144, 128), "double_stream_modulation_img.lin.weight": (36864, 6144)}),
    ("Hunyuan Video", "Hunyuan Video 1.5", {"byt5_in.fc1.weight": (2048, 1472), "vision_in.proj.0.weight": (1152,)}),
    ("SD 1.x or 2.x", "SDXL", {"label_emb.0.0.weight": (1280, 2816)}),
    ("Qwen-Image", "Qwen-Image", {"txt_in.weight": (3072, 3584)}),
    ("Qwen-Image", "Mage-Flow", {"txt_in.weight": (3072, 2560)}),
    (
        "Qwen-Image 2.1",
        "Qwen-Image 2.1",
        {"img_in.weight": (4096, 64), "transformer_blocks.0.attn.norm_q.weight": (128,)},
    ),
]


@pytest.mark.parametrize(("family", "name", "shapes"), REAL, ids=[row[1] for row in REAL])
def test_a_model_is_called_as_people_call_it(family, name, shapes):
    assert family_of(FAMILY_TENSORS[family] | shapes).name == name


def test_each_family_is_found_by_its_own_tensors():
    by_name = {family.name for family in FAMILIES if not family.inputs}
    assert {name: family_of(FAMILY_TENSORS[name]).name for name in by_name} == {name: name for name in by_name}


def test_what_is_no_diffusion_model_has_no_name():
    assert family_of({"decoder.conv_in.weight": (512, 16, 3, 3)}) == UNKNOWN
