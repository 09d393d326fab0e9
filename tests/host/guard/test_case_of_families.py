"""Faults planted in one layer of models that are built otherwise than Wan: each gets its own verdict, with the layer's name."""

import contextlib
import math

import pytest
from halfsafe.precision.guard.verdicts import NonFinite
from safetensors.torch import load_file, save_file
from support import families, rare_families
from support.guarding import guarded, loaded_once

LAYERS = {
    "sdxl": "input_blocks.4.1.transformer_blocks.0.ff.net.2",
    "flux": "double_blocks.0.img_mlp.2",
    "cosmos1": "blocks.block1.blocks.2.block.layer2",
}
RARE = ("cosmos1",)
every_family = pytest.mark.parametrize("family", LAYERS)


@pytest.fixture(scope="module")
def files(models_dir):
    """(family, kind) -> its file, with NaN in a weight for any kind but None."""
    folder = models_dir / "diffusion_models"
    made = {}

    def get(family, kind=None):
        if (family, None) not in made:
            rare = family in RARE
            path = folder / f"planted_{family}.safetensors"
            made[family, None] = rare_families.write(family, path) if rare else families.write_narrow(family, folder)
        if (family, kind) not in made:
            tensors = load_file(str(made[family, None]))
            (name,) = (name for name in tensors if name.endswith(f"{LAYERS[family]}.weight"))
            tensors[name][1, 2] = math.nan
            made[family, kind] = folder / f"planted_{family}_{kind}.safetensors"
            save_file(tensors, str(made[family, kind]), metadata=families.metadata_of(made[family, None]))
        return made[family, kind]

    return get


@pytest.fixture(scope="module")
def models(comfy, files):
    return loaded_once(comfy, files)


def sample(model, family, text=None):
    cond = rare_families.conditioning(family) if family in RARE else families.conditioning(family)
    if text is not None:
        cond[0][0][:, 0] = text
    return rare_families.sample(model, family, 1, cond) if family in RARE else families.sample(model, family, 1, cond)


def stopped(model, family, **options):
    with pytest.raises(NonFinite) as error:
        sample(model, family, **options)
    return error.value


@every_family
def test_nan_in_a_file(comfy, files, family):
    path = files(family, "nan")
    error = stopped(guarded(comfy, comfy.core["UNETLoader"]().load_unet(path.name, "default")[0]), family)
    assert error.verdict == "bad_weights" and f"{LAYERS[family]}.weight" in str(error) and path.name in str(error)


@contextlib.contextmanager
def spoiled(model, family):
    """The layer's weight has NaN in memory, as of a copy that failed, while the context lasts."""
    weight = model.model.diffusion_model.get_submodule(LAYERS[family]).weight.data
    before = weight.clone()
    weight[1, 2] = math.nan
    try:
        yield
    finally:
        weight.copy_(before)


@every_family
def test_a_weight_that_went_bad_after_it_was_read(comfy, models, family):
    plain = models(family, None, "bf16")
    with spoiled(plain, family):
        error = stopped(guarded(comfy, plain), family)
    assert error.verdict == "bad_weights" and f"{LAYERS[family]}.weight" in str(error) and "it is finite" in str(error)
