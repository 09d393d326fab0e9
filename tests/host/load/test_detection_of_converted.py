"""A file converted to 4 bits without a preset is detected as the model that it was: ComfyUI takes the widths of packed bytes for those of the layers."""

import comfy.model_detection
import comfy.utils
import pytest
from halfsafe.precision.commands.convert import convert_file
from halfsafe.precision.plan.rules import rules_from
from support import clean_runs, families, rare_families, tiny_models

NARROW = {"chroma": tiny_models.chroma, "lumina2": tiny_models.lumina2, "krea2": tiny_models.krea2}
FAMILIES = (
    *families.OVERFLOWS,
    *NARROW,
    *(name for name in rare_families.CLASSES if name != "anima"),
)  # as cosmos2, and large


def detected(path) -> tuple[type, dict]:
    tensors, metadata = comfy.utils.load_torch_file(str(path), return_metadata=True)
    config = comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    return type(config), config.unet_config if config else {}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_in_4_bits_is_detected_as_itself(comfy, tmp_path, family):
    plain = NARROW[family](tmp_path / "plain.safetensors") if family in NARROW else clean_runs.write(family, tmp_path)
    made = tmp_path / "converted.safetensors"
    convert_file(plain, made, "nvfp4", rules_from(preset="none"))
    assert detected(made) == detected(plain)
