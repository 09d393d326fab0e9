"""Caches between steps on models that are built otherwise than Wan: a UNet, double and single blocks, blocks in a dict, blocks in lists of lists."""

import pytest
import torch
from support import families, rare_families
from support.caches import STEPS, put_at, with_cache
from support.guarding import guarded, is_finite, loaded_once, report_of
from support.measures import relative_error

RARE = {
    "cosmos1": {r"blocks\.block1\.blocks\.2\.block\.layer2\.weight": 1e6},
    "stable_cascade": {r"down_blocks\.1\.0\.channelwise\.4\.weight": 1e6},
}
FAMILIES = ("sdxl", "flux", *RARE)
PLACES = ("closure", "attribute of a block")


@pytest.fixture(scope="module")
def files(models_dir):
    """(family, kind) -> the file of that model."""
    folder = models_dir / "diffusion_models"
    common = families.files_in(folder, "kept")
    made = {}

    def get(family, kind):
        if family not in RARE:
            return common(family, kind)
        if family not in made:
            clean = rare_families.write(family, folder / f"kept_{family}.safetensors")
            loud = families.write_scaled(clean, folder / f"kept_{family}_ffn.safetensors", RARE[family])
            made[family] = {None: clean, "ffn": loud}
        return made[family][kind]

    return get


@pytest.fixture(scope="module")
def models(comfy, files):
    return loaded_once(comfy, files)


def sample(model, family):
    return rare_families.sample(model, family, STEPS) if family in RARE else families.sample(model, family, STEPS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", PLACES)
def test_no_check_shows_in_the_picture(comfy, models, family, place):
    latents, checks = [], []
    for check in ("off", "first step"):
        model = guarded(comfy, with_cache(models(family, None, "bf16"), place, put_at(place)), check=check)
        latents.append(sample(model, family))
        checks += report_of(model).checks
    assert torch.equal(*latents)
    (one,) = checks
    assert one.left_out == "" and one.snr_db > 25


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("place", PLACES)
def test_no_repeat_is_given_the_failed_result_and_none_stays(comfy, models, family, place):
    expected = sample(with_cache(models(family, "ffn", "fp32"), place, put_at(place)), family)
    model = guarded(comfy, with_cache(models(family, "ffn", "fp16"), place, put_at(place)))
    found = sample(model, family)
    report = report_of(model)
    print(family, place, relative_error(expected, found), report.verdict, report.extra_calls)
    assert is_finite(found) and relative_error(expected, found) < 0.05
    assert report.verdict == "recovered" and len(report.events) == 1
