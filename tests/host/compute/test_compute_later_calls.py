"""Overflow planted in a later call of `fp16_safe`, layer by layer: the inputs stay as they were, and nothing else tells of it."""

import contextlib
from functools import cache

import pytest
import torch
from halfsafe.nodes.host.compute.executor import compute_of
from support import families
from support.families import load
from support.measures import relative_error

FAMILIES = ("wan", "flux", "z_image")
BEFORE_A_RELEASE = ("sd3", "ltxv", "qwen_image")
"""Families whose kinds of layers the others have too."""
THIRDS = ("hunyuan_video", "sdxl")
"""Families of many kinds of layers: each third of their layers is a test."""
LOUD = 1e6


@pytest.fixture(scope="module")
def model_of(comfy, models_dir):
    """Family -> the model in fp32 and in `fp16_safe`, and a call."""

    @cache
    def build(family):
        path = families.write_narrow(family, models_dir / "diffusion_models")
        exact = load(comfy, path, "fp32")
        return exact, load(comfy, path, "as_file", "fp16_safe"), families.capture(exact, family)

    return build


@contextlib.contextmanager
def louder(models, name, factor=LOUD, row=slice(None)):
    """The input of one layer is multiplied, in all of the models."""

    def multiply(module, args):
        x = args[0].clone()
        x[row] *= factor
        return x.clamp(-3e38, 3e38), *args[1:]

    with contextlib.ExitStack() as undo:
        for model in models:
            layer = model.model.diffusion_model.get_submodule(name)
            undo.callback(layer.register_forward_pre_hook(multiply).remove)
        yield


def layers_of(model):
    """One layer of each kind: the last of those whose names end alike."""
    named = [
        name.split(".")
        for name, module in model.model.diffusion_model.named_modules()
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)
    ]
    kinds = {(*("*" if part.isdigit() else part for part in parts[-3:-1]), parts[-1]): parts for parts in named}
    return [".".join(parts) for parts in kinds.values()]


@pytest.mark.parametrize(
    ("family", "part"),
    [(family, slice(None)) for family in FAMILIES]
    + [(family, slice(start, None, 3)) for family in THIRDS for start in range(3)]
    + [pytest.param(family, slice(None), marks=pytest.mark.release) for family in BEFORE_A_RELEASE],
)
def test_an_operand_of_any_layer_that_overflows_later_is_seen(model_of, family, part):
    """The later call comes as close to fp32 as one that measures every operand."""
    exact, safe, call = model_of(family)
    wrong = []
    for name in layers_of(exact)[part]:
        families.replay(safe, call)
        with louder((exact, safe), name):
            reference = families.replay(exact, call)
            later = relative_error(reference, families.replay(safe, call))
            compute_of(safe).runs.of(safe.model).calibration.recalibrate()
            if not reference.isfinite().all() or later <= 2e-3:
                continue
            measured = relative_error(reference, families.replay(safe, call))
        if not later <= 1.2 * measured:
            wrong.append((name, later, measured))
    assert wrong == [], "layer, error of the later call, error of a call that measures every operand"


@pytest.mark.parametrize("family", ["flux", "sdxl"])
def test_a_node_s_code_is_given_attention_results_in_fp32(model_of, family):
    _, safe, call = model_of(family)
    seen = []

    def patch(result, *args):
        seen.append(result.dtype)
        return result

    patched = safe.clone()
    patched.set_model_attn1_output_patch(patch)
    for _ in range(2):
        families.replay(patched, call)
    assert seen and set(seen) == {torch.float32}
