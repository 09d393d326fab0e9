"""Overflow planted in a later call of `fp16_safe`, layer by layer: the inputs stay as they were, and nothing else tells of it."""

import contextlib

import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.precision.base.layer_names import by_pattern
from support import families, tiny_models
from support.families import load
from support.leaf_operations import LeafOperations, aten
from support.measures import relative_error

FAMILIES = ("wan", "flux", "sd3", "hunyuan_video", "ltxv", "sdxl", "qwen_image", "z_image")
LOUD = 1e6


@pytest.fixture(scope="module")
def model_of(comfy, models_dir):
    """Family -> the model in fp32 and in `fp16_safe`, and a call."""

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
    """One layer of each kind."""
    named = {name: module for name, module in model.model.diffusion_model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)}
    return [names[-1] for names in by_pattern(named).values()]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_operand_of_any_layer_that_overflows_later_is_seen(model_of, family):
    """The later call comes as close to fp32 as one that measures every operand."""
    exact, safe, call = model_of(family)
    wrong = []
    for name in layers_of(exact):
        for _ in range(2):
            families.replay(safe, call)
        with louder((exact, safe), name):
            reference = families.replay(exact, call)
            later = relative_error(reference, families.replay(safe, call))
            compute_of(safe).runs.of(safe.model).calibration.recalibrate()
            measured = relative_error(reference, families.replay(safe, call))
        if reference.isfinite().all() and not later <= max(2e-3, 1.2 * measured):
            wrong.append((name, later, measured))
    assert not wrong


class Looks(LeafOperations):
    """How many largest magnitudes are found."""

    count = 0

    def leaf(self, func, args, kwargs):
        self.count += func.overloadpacket is aten.linalg_vector_norm
        return func(*args, **kwargs)


def test_a_later_call_of_a_transformer_looks_at_most_at_a_quarter_of_its_layers(comfy, models_dir, monkeypatch):
    """With a fused attention, as on a GPU; what is looked at outside of the blocks is the same for any number of them."""
    monkeypatch.setattr("comfy.ldm.wan.model.optimized_attention", attention_pytorch)
    found = []
    for blocks in (2, 6):
        path = tiny_models.wan(models_dir / "diffusion_models" / f"looks_of_{blocks}.safetensors", blocks=blocks)
        model = load(comfy, path, "as_file", "fp16_safe")
        call = families.capture(model, "wan")
        families.replay(model, call)
        with Looks() as looks:
            families.replay(model, call)
        found.append((looks.count, sum(isinstance(module, torch.nn.Linear) for module in model.model.diffusion_model.modules())))
    (few, of_few), (many, of_many) = found
    assert many - few <= (of_many - of_few) / 4 and few <= of_few / 4 + 3, "beside two inputs and the result"


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


@pytest.mark.parametrize("family", ["wan", "sdxl"])
def test_a_foreign_attention_that_overflows_changes_no_picture(model_of, family):
    """Sums of p * v kept in fp16 before they are divided, on a fresh model."""
    exact, safe, call = model_of(family)

    def sums_in_fp16(function, q, k, v, heads, *args, **kwargs):
        result = attention_pytorch(q, k, v, heads, *args, **kwargs)
        return result * 3e5 / 3e5

    model = safe.clone()
    model.model_options["transformer_options"]["optimized_attention_override"] = sums_in_fp16
    reference = families.replay(exact, call)
    for _ in range(2):
        assert relative_error(reference, families.replay(model, call)) < 5e-3
