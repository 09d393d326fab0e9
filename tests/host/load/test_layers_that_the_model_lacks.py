"""Files with quantized layers that the model does not have: loaded without them, which a note on a diffusion model names."""

import pytest
from halfsafe.nodes.host.comfyui.model_facts import held_storages
from safetensors.torch import load_file, save_file
from support import dialects, families, tiny_models
from support.measures import relative_error

EXTRA = ("last.down", "blocks.9.ffn.0")
FORMATS = ("fp8_e4m3fn", "int8", "mxfp8", "nvfp4", "w4a8")


def in_extra_layers(storage, folder):
    weights, _ = dialects.reference(EXTRA, (256, 256))
    path = folder / f"extra-{storage}.safetensors"
    if storage == "fp8_e4m3fn":
        return load_file(dialects.comfy_quant(path, weights, {}))
    return load_file(dialects.in_format(path, weights, {}, storage))


@pytest.mark.parametrize("asked", ["as_file", "auto", "bf16", "int8"])
def test_they_are_left_out_and_named(comfy, wan, tmp_path, asked):
    table, wrong = [""], 0
    expected = families.denoise(families.load(comfy, wan, asked, "fp32"))
    for storage in [name for name in FORMATS if name in held_storages()]:
        path = wan.with_name(f"lacks-{storage}.safetensors")
        save_file(load_file(wan) | in_extra_layers(storage, tmp_path), path)
        try:
            model = families.load(comfy, path, asked, "fp32")
            error = relative_error(expected, families.denoise(model))
            notes = " ".join(families.report(comfy, model)["notes"])
        except Exception as failure:
            error, notes = float("inf"), repr(failure)
        good = error < 1e-5 and all(name in notes for name in EXTRA)
        wrong += not good
        table.append(f"{storage:12}{error:10.2g} {'' if good else '  WRONG'} {notes[:150]}")
    assert not wrong, "\n".join(table)


@pytest.mark.parametrize("asked", ["as_file", "bf16", "int8"])
def test_those_of_a_text_encoder_change_nothing(comfy, models_dir, tmp_path, asked):
    plain = tiny_models.narrow_clip_l(models_dir / "text_encoders" / "clip_l_lacks.safetensors")

    def encoded(path):
        clip = comfy.run(
            "HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage=asked, compute="auto"
        )[0]
        return clip.encode_from_tokens(clip.tokenize("a lighthouse"))

    expected = encoded(plain)
    for storage in [name for name in FORMATS if name in held_storages()]:
        path = plain.with_name(f"clip_l_lacks_{storage}.safetensors")
        save_file(load_file(plain) | in_extra_layers(storage, tmp_path), path)
        assert relative_error(expected, encoded(path)) < 1e-5, storage
