"""Names of models, by the shapes of the real files."""

import pytest
from halfsafe.precision.formats.families import FAMILIES, UNKNOWN, family_of

FAMILY_TENSORS = {family.name: dict.fromkeys(family.names, (8, 8)) for family in FAMILIES}
CONTEXT = "input_blocks.1.1.transformer_blocks.0.attn2.to_k.weight"
REAL = [
    ("Wan", "Wan 2.1 1.3B", {"patch_embedding.weight": (1536, 16, 1, 2, 2)}),
    ("Wan", "Wan 2.1 or 2.2 text to video 14B", {"patch_embedding.weight": (5120, 16, 1, 2, 2)}),
    ("Wan", "Wan 2.1 image to video 14B", {"patch_embedding.weight": (5120, 36, 1, 2, 2), "img_emb.proj.0.bias": (1280,)}),
    ("Wan", "Wan 2.2 image to video 14B", {"patch_embedding.weight": (5120, 36, 1, 2, 2)}),
    ("Wan", "Wan 2.2 5B", {"patch_embedding.weight": (3072, 48, 1, 2, 2)}),
    ("Wan", "Wan", {"patch_embedding.weight": (256, 16, 1, 2, 2)}),
    ("Flux", "Flux.1 dev", {"img_in.weight": (3072, 64), "guidance_in.in_layer.weight": (3072, 256)}),
    ("Flux", "Flux.1 schnell", {"img_in.weight": (3072, 64)}),
    ("Flux", "Flux.1 Fill", {"img_in.weight": (3072, 384), "guidance_in.in_layer.weight": (3072, 256)}),
    ("Qwen-Image", "Mage-Flow", {"txt_norm.weight": (2560,), "proj_out.weight": (128, 3072)}),
    ("Chroma", "Chroma Radiance", {"img_in_patch.weight": (3072, 3, 16, 16)}),
    ("Hunyuan Video", "Hunyuan Image 2.1", {"byt5_in.fc1.weight": (2048, 1472)}),
    ("Hunyuan Video", "Hunyuan Video 1.5", {"byt5_in.fc1.weight": (2048, 1472), "vision_in.proj.0.weight": (1152,)}),
    ("Flux", "Flux.2", {"img_in.weight": (6144, 128), "double_stream_modulation_img.lin.weight": (36864, 6144)}),
    ("SD or SDXL", "SDXL", {"label_emb.0.0.weight": (1280, 2816)}),
    ("SD or SDXL", "SDXL refiner", {"label_emb.0.0.weight": (1536, 2560)}),
    ("SD or SDXL", "SD 1.x", {CONTEXT: (320, 768)}),
    ("SD or SDXL", "SD 2.x", {CONTEXT: (320, 1024)}),
    ("Z-Image or Lumina 2", "Z-Image", {"cap_embedder.1.weight": (3840, 2560)}),
    ("Z-Image or Lumina 2", "Lumina 2", {"cap_embedder.1.weight": (2304, 2304)}),
    ("SD3", "SD 3.5 Large", {"x_embedder.proj.weight": (2432, 16, 2, 2)}),
    ("SD3", "SD 3 Medium", {"x_embedder.proj.weight": (1536, 16, 2, 2)}),
    ("Qwen-Image", "Qwen-Image", {}),
]


@pytest.mark.parametrize(("family", "name", "shapes"), REAL, ids=[row[1] for row in REAL])
def test_a_model_is_called_as_people_call_it(family, name, shapes):
    assert family_of(FAMILY_TENSORS[family] | shapes).name == name


def test_what_is_no_diffusion_model_has_no_name():
    assert family_of({"decoder.conv_in.weight": (512, 16, 3, 3)}) == UNKNOWN
