"""Faults planted in one layer of models that are built otherwise than Wan: each gets its own verdict, with the layer's name."""

import math

import pytest
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import load_file, save_file
from support import families, rare_families
from support.guarding import guarded

LAYERS = {
    "sdxl": "input_blocks.4.1.transformer_blocks.0.ff.net.2",
    "flux": "double_blocks.0.img_mlp.2",
    "cosmos1": "blocks.block1.blocks.2.block.layer2",
}
RARE = ("cosmos1",)


@pytest.mark.parametrize("family", LAYERS)
def test_nan_in_a_file(comfy, models_dir, family):
    folder, rare = models_dir / "diffusion_models", family in RARE
    clean = rare_families.write(family, folder / f"planted_{family}.safetensors") if rare else families.write_narrow(family, folder)
    tensors = load_file(str(clean))
    (name,) = (name for name in tensors if name.endswith(f"{LAYERS[family]}.weight"))
    tensors[name][1, 2] = math.nan
    path = folder / f"planted_{family}_nan.safetensors"
    save_file(tensors, str(path), metadata=families.metadata_of(clean))
    model = guarded(comfy, comfy.core["UNETLoader"]().load_unet(path.name, "default")[0])
    with pytest.raises(NonFinite) as error:
        (rare_families if rare else families).sample(model, family, 1)
    assert error.value.verdict == "bad_weights" and f"{LAYERS[family]}.weight" in str(error.value) and path.name in str(error.value)
