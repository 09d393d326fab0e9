"""Text encoder classes of ComfyUI with int8 weights, which *Halve the memory* takes for every encoder: they run, closer to the unquantized one than in fp8."""

import pytest
import torch
from halfsafe.precision.formats.checkpoint import read_checkpoint
from halfsafe.precision.formats.comfy_format import tensors_of
from halfsafe.precision.plan.facts import layer_specs
from halfsafe.precision.plan.layers import plan_storage
from halfsafe.precision.plan.rules import TEXT_ENCODER_RULES, Rules
from support import tiny_encoders
from support.measures import relative_error

ENCODERS = [name for name, tiny in tiny_encoders.ENCODERS.items() if tiny.encodes]
CHAOTIC = {"qwen3.5": 1.0}
"""Of a toy that multiplies its rounding errors, 0.6 in fp8: the share of fp8's error that int8's is at most, 0.5 for the others."""


def encoded(clip) -> torch.Tensor:
    with torch.inference_mode():
        return clip.encode_from_tokens(tiny_encoders.tokens(), return_pooled=False).float()


def held_in(clip, name: str, storage: str):
    """The encoder with its weights stored as the loader does it, and how many are."""
    network = clip.cond_stage_model.tiny.transformer
    checkpoint = read_checkpoint(
        {key: tensor for key, tensor in network.state_dict().items() if tensor.dim()}, {}, name
    )
    layers = plan_storage(layer_specs(checkpoint), storage, Rules(presets=TEXT_ENCODER_RULES))
    tensors, count = {}, 0
    for key, weight in checkpoint.weights.items():
        quantized = weight.layer != key and layers[weight.layer].storage == storage
        tensors |= tensors_of(weight, storage, name) if quantized else {key: weight.data}
        count += quantized
    made = tiny_encoders.build(name, quantization_metadata={"mixed_ops": True})
    lacking = made.cond_stage_model.tiny.transformer.load_state_dict(tensors, strict=False, assign=True)
    assert not lacking.unexpected_keys
    return made, count


@pytest.mark.parametrize("name", ENCODERS)
def test_int8_is_closer_than_fp8_in_every_encoder(comfy, name):
    if not tiny_encoders.is_known(name):
        pytest.skip("a class of another ComfyUI")
    plain = tiny_encoders.build(name)
    errors = {}
    for storage in ("fp8_e4m3fn", "int8"):
        made, count = held_in(plain, name, storage)
        errors[storage] = relative_error(encoded(plain), encoded(made))
        assert count >= 12
    print(f"{name}: {errors}")
    assert 0 < errors["int8"] < CHAOTIC.get(name, 0.5) * errors["fp8_e4m3fn"]
