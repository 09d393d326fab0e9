"""Models with diffusers' names: quantized weights keep their storage where ComfyUI renames them or joins their rows, and the rest is told."""

import re

import pytest
from halfsafe.precision.base.errors import CheckpointError
from safetensors.torch import load_file, save_file
from support import control_files, diffusers_names, families
from support.measures import relative_error

QKV = ("double_blocks.0.img_attn.qkv", "double_blocks.0.txt_attn.qkv")
SWAPPED = ("final_layer.adaLN_modulation.1",)
READ_BY_SHAPE = ("img_in", "txt_in", "vector_in.in_layer")
UNPACKED = {
    ("flux", "int8"): (),
    ("flux", "fp8_e4m3fn"): QKV,
    ("flux", "mxfp8"): SWAPPED,
    ("flux", "nvfp4"): (*QKV, *SWAPPED, *READ_BY_SHAPE),
    ("sd3", "int8"): (),
    ("z_image", "int8"): (),
    ("sd15", "int8"): (),
    ("sd15", "fp8_e4m3fn"): (),
}
"""The layers of a file, all of whose layers are quantized, of which the format has no exact form in ComfyUI's names."""


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    control_files.narrow(monkeypatch)


@pytest.fixture(scope="module")
def made(comfy, models_dir):
    """Family -> its file in diffusers' names, its keys three times as large as its queries, and a call of the model."""
    folder = models_dir / "diffusion_models"
    known = {}

    def get(family):
        if family not in known:
            source = diffusers_names.FAMILIES[family](folder / f"named_{family}.safetensors")
            path = diffusers_names.write(family, source, folder / f"diffusers_{family}.safetensors")
            tensors = load_file(path)
            louder = re.compile(
                "never" if family == "sd15" else r"(to|add)_k(_proj)?\.weight$"
            )  # nothing of it is fused
            for name in filter(louder.search, tensors):
                tensors[name] *= 3
            save_file(tensors, path, families.metadata_of(source))
            known[family] = path, families.capture(families.load(comfy, source), family)
        return known[family]

    return get


@pytest.mark.parametrize(("family", "storage"), UNPACKED)
def test_layers_keep_their_storage_where_it_is_exact_and_the_rest_is_told(comfy, models_dir, made, family, storage):
    source, call = made(family)
    path = models_dir / "diffusion_models" / f"{family}_in_{storage}.safetensors"
    diffusers_names.quantize(source, path, storage)
    model, in_16_bit = families.load(comfy, path), families.load(comfy, path, "bf16")
    plan = model.attachments["halfsafe"]
    asked = {layer for layer, own in plan.layers.items() if own.quantizable and own.stored not in ("int8", storage)}
    unpacked = UNPACKED[family, storage]
    assert asked >= {*unpacked}
    told = " ".join(note for note in plan.notes if "Unpacked to bf16" in note)
    assert all(layer in told for layer in unpacked) and bool(told) == bool(unpacked)
    assert ("unpacked to bf16 while loading" in plan.storage.reason) == bool(unpacked)
    assert sum(own.stored == storage for own in plan.layers.values()) > 20 - len(unpacked)
    assert relative_error(families.replay(in_16_bit, call), families.replay(model, call)) < 0.01


def test_a_fused_tensor_that_lacks_a_part_is_refused(comfy, models_dir, made):
    source, _ = made("flux")
    tensors = load_file(source)
    del tensors["transformer_blocks.0.attn.to_k.weight"]
    path = models_dir / "diffusion_models" / "lacks_a_part.safetensors"
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="lacks a part of double_blocks.0.img_attn.qkv.weight"):
        families.load(comfy, path)
