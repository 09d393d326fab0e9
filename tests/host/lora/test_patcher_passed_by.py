"""Layers with a LoRA that ComfyUI multiplies past their forwards: the LoRA is added to the weight in the same call, and the layers are named."""

from __future__ import annotations

import copy
import functools
import logging

import comfy.ops as operations
import pytest
import torch
import torch.nn.functional as F
from comfy.clip_model import CLIPAttention
from comfy.ldm.wan.model import WanSelfAttention
from comfy.quant_ops import QuantizedTensor
from comfy.sd import load_lora_for_models
from comfy.text_encoders.llama import MLP, Attention
from halfsafe.nodes.host.lora.patcher import IN_WEIGHT, WITHOUT_EFFECT, keep_low_rank_unmerged
from safetensors.torch import save_file
from support import families, model_files, tiny_encoders, tiny_models
from support.families import load
from support.imagined_cores import changed, never_called
from support.measures import relative_error

Q = {f"blocks.{block}.self_attn.q": (256, 256) for block in (0, 1)}
LAYERS = {**Q, "blocks.0.ffn.2": (256, 1024)}


def with_lora(model, layers=LAYERS, strength: float = 4.0):
    return load_lora_for_models(model, None, model_files.lora(layers, rank=8), strength, 0.0)[0]


def together():
    return never_called(WanSelfAttention, "q", "k", "v")


def reasons_of(comfy, model) -> dict[str, str]:
    return {layer["name"]: layer["reason"] for layer in families.report(comfy, model)["layers"]}


@pytest.fixture
def counted(monkeypatch):
    """How often a model was called."""
    from comfy.model_base import BaseModel

    calls, plain = [], BaseModel._apply_model

    @functools.wraps(plain)
    def apply(self, *args, **kwargs):
        calls.append(1)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(BaseModel, "_apply_model", apply)
    return calls


@pytest.mark.parametrize(
    ("storage", "compute"), [("fp8_e4m3fn", "bf16"), ("int8", "int8"), ("fp8_e4m3fn", "fp16_safe")]
)
def test_the_first_picture_is_right_and_the_layers_are_named(comfy, wan, counted, caplog, storage, compute):
    exact = families.sample(with_lora(load(comfy, wan, "fp32", "fp32")), "wan")
    beside = families.sample(with_lora(load(comfy, wan, storage, compute)), "wan")
    plain = families.sample(load(comfy, wan, storage, compute), "wan")
    model = with_lora(load(comfy, wan, storage, compute))
    with together(), caplog.at_level(logging.WARNING, "halfsafe"):
        counted.clear()
        result = families.sample(model, "wan")
        first = len(counted)
        counted.clear()
        assert torch.equal(families.sample(model, "wan"), result)
    assert relative_error(exact, result) < 1.1 * relative_error(exact, beside) < 0.5 * relative_error(exact, plain)
    assert first == len(counted) + 1, "one call is repeated, in the first run alone"
    found = reasons_of(comfy, model)
    assert {name for name, reason in found.items() if IN_WEIGHT in reason} == {*Q}
    assert "LoRAs added to the layer's output: 1" in found["blocks.0.ffn.2"]
    assert caplog.text.count("blocks.0.self_attn.q") == 1 and "blocks.0.ffn.2" not in caplog.text
    assert not any(getattr(module, "weight_function", ()) for module in model.model.diffusion_model.modules())


def test_another_fused_function_of_an_int8_layer(comfy, wan, call):
    """A function that ComfyUI does not have multiplies a block's ``ffn.2`` by its int8 weight, unless something is done to the weight."""

    def forward(self, x):
        *before, last = self
        for module in before:
            x = module(x)
        weight, bias, stream = operations.cast_bias_weight(
            last, x, offloadable=True, compute_dtype=x.dtype, want_requant=True
        )
        weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
        result = F.linear(x, weight.to(x.dtype), bias)
        operations.uncast_bias_weight(last, weight, bias, stream)
        return result

    fused = type("Fused", (torch.nn.Sequential,), {"forward": forward})

    def fusing(model):
        for block in model.model.diffusion_model.blocks:
            block.ffn.__class__ = fused
        return model

    layers = {name: shape for name, shape in LAYERS.items() if "ffn" in name}
    exact = families.replay(with_lora(load(comfy, wan, "fp32", "fp32"), layers), call)
    beside = families.replay(with_lora(load(comfy, wan, "int8", "int8"), layers), call)
    model = with_lora(fusing(load(comfy, wan, "int8", "int8")), layers)
    assert relative_error(exact, families.replay(model, call)) < 1.1 * relative_error(exact, beside)
    assert IN_WEIGHT in reasons_of(comfy, model)["blocks.0.ffn.2"]


def test_layers_that_are_passed_by_at_one_size_of_a_call_alone(comfy, wan, call, call_of_two):
    """As a fused product does that gains in large batches only: the first call of that size shows it, not the first of all."""
    exact, beside, model = (
        with_lora(load(comfy, wan, *how)) for how in (("fp32", "fp32"), ("int8", "int8"), ("int8", "int8"))
    )
    plain = WanSelfAttention.forward
    with together():
        fused = WanSelfAttention.forward
        with changed(
            WanSelfAttention,
            "forward",
            lambda self, x, *args, **kwargs: (fused if len(x) > 1 else plain)(self, x, *args, **kwargs),
        ):
            results = [families.replay(model, each) for each in (call, call_of_two)]
    for each, result in zip((call, call_of_two), results, strict=True):
        expected = families.replay(exact, each)
        assert relative_error(expected, result) < 1.1 * relative_error(expected, families.replay(beside, each))


@pytest.mark.parametrize(("storage", "compute"), [("fp8_e4m3fn", "bf16"), ("int8", "int8")])
def test_layers_that_are_passed_by_from_a_later_step_on(comfy, wan, counted, storage, compute):
    """Of two calls of a step the size is the same: a layer that ran in the first step does not in the last two."""
    plain, steps = WanSelfAttention.forward, 4
    exact = families.sample(with_lora(load(comfy, wan, "fp32", "fp32")), "wan", steps=steps)
    beside = families.sample(with_lora(load(comfy, wan, storage, compute)), "wan", steps=steps)
    model = with_lora(load(comfy, wan, storage, compute))
    with together():
        fused = WanSelfAttention.forward

        def forward(self, x, *args, **kwargs):
            return (fused if len(counted) > 2 else plain)(self, x, *args, **kwargs)

        with changed(WanSelfAttention, "forward", forward):
            counted.clear()
            result = families.sample(model, "wan", steps=steps)
    assert relative_error(exact, result) < 1.1 * relative_error(exact, beside)
    assert len(counted) == steps + 2, (
        "the call that shows it is watched in a repeat, and made again with the LoRAs in the weights"
    )


def test_a_lora_by_hooks_follows_its_strength(comfy, wan, models_dir):
    from comfy_extras import nodes_hooks as nodes

    save_file(model_files.lora(Q, rank=8), str(models_dir / "loras" / "passed_by.safetensors"))
    cond = families.conditioning("wan")
    exact, model, other = (load(comfy, wan, *how) for how in (("fp32", "fp32"), ("int8", "int8"), ("int8", "int8")))
    for strength in (4.0, -2.0):
        (hooks,) = nodes.CreateHookLoraModelOnly().create_hook_model_only("passed_by.safetensors", strength)
        (hooked,) = nodes.ConditioningSetProperties().set_properties(cond, 1.0, "default", hooks=hooks)
        expected, beside = (families.sample(each, "wan", cond=hooked, steps=2) for each in (exact, other))
        with together():
            result = families.sample(model, "wan", cond=hooked, steps=2)
        assert relative_error(expected, result) < 1.2 * relative_error(expected, beside)


def test_a_layer_that_no_call_uses_is_told_to_be_without_effect(comfy, wan, call, counted):
    model = load(comfy, wan, "int8", "int8")
    attention = model.model.diffusion_model.blocks[1].self_attn
    attention.never = copy.copy(attention.q)
    model = with_lora(model, {"blocks.1.self_attn.never": (256, 256)})
    plain = families.replay(load(comfy, wan, "int8", "int8"), call)
    counted.clear()
    assert torch.equal(families.replay(model, call), plain) and torch.equal(families.replay(model, call), plain)
    assert len(counted) == 3
    assert WITHOUT_EFFECT in reasons_of(comfy, model)["blocks.1.self_attn.never"]


# text encoders


def encoder_lora(names: dict[str, tuple[int, int]], prefix: str) -> dict[str, torch.Tensor]:
    tensors = model_files.lora(names, size=0.2)
    return {name.replace("diffusion_model.", prefix): tensor for name, tensor in tensors.items()}


def encode(clip, tokens=None):
    return clip.encode_from_tokens(tokens or clip.tokenize("a lighthouse"))


@pytest.mark.parametrize("storage", ["fp8_e4m3fn", "int8"])
def test_a_clip_whose_parallel_layers_are_one_product(comfy, models_dir, storage, caplog):
    path = tiny_models.narrow_clip_l(models_dir / "text_encoders" / "clip_l_together.safetensors")
    names = {
        f"text_model.encoder.layers.{number}.self_attn.{part}_proj": (256, 256) for number in range(3) for part in "qk"
    }
    lora = encoder_lora(names, "text_encoders.clip_l.transformer.")

    def loaded(storage):
        clip = comfy.run(
            "HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage=storage, compute="auto"
        )[0]
        return clip, load_lora_for_models(None, clip, lora, 0.0, 1.0)[1]

    exact = encode(loaded("fp32")[1])
    clip, with_it = loaded(storage)
    plain, floor = encode(clip), relative_error(exact, encode(with_it))
    assert relative_error(exact, plain) > 2 * floor
    clip, with_it = loaded(storage)
    with never_called(CLIPAttention, "q_proj", "k_proj", "v_proj"), caplog.at_level(logging.WARNING, "halfsafe"):
        assert relative_error(exact, encode(with_it)) < 1.1 * floor
        assert relative_error(exact, encode(with_it)) < 1.1 * floor
        assert relative_error(plain, encode(clip)) < 1e-3, "the encoder without the LoRA"
    assert caplog.text.count("LoRAs are added to weights") == 1
    assert not any(
        "forward" in module.__dict__ or module.__dict__.get("weight_function")
        for module in clip.cond_stage_model.modules()
    )
    assert "encode_token_weights" not in vars(clip.cond_stage_model)


def test_qwen_3_in_fp8_whose_parallel_layers_are_one_product():
    """ComfyUI 0.45 multiplies q, k and v of Qwen 3.x together, and gate and up (#17361)."""
    parts = ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
    transformer = tiny_encoders.build("qwen3").cond_stage_model.tiny.transformer
    names = {
        name: tuple(transformer.get_submodule(name).weight.shape)
        for name in (f"model.layers.{number}.{part}" for number in range(2) for part in parts)
    }
    lora = encoder_lora(names, "text_encoders.tiny.transformer.")

    def built(dtype):
        clip = tiny_encoders.build("qwen3")
        for name, module in clip.cond_stage_model.named_modules():
            if name.endswith("_proj"):
                module.weight = torch.nn.Parameter(module.weight.to(torch.float8_e4m3fn).to(dtype), requires_grad=False)
        keep_low_rank_unmerged(clip.patcher)
        return load_lora_for_models(None, clip, dict(lora), 0.0, 1.0)[1]

    exact = encode(built(torch.float32), tiny_encoders.tokens())
    beside = built(torch.float8_e4m3fn)
    assert beside.patcher.low_rank_patcher()
    floor = relative_error(exact, encode(beside, tiny_encoders.tokens())) + 1e-5
    with never_called(Attention, "q_proj", "k_proj", "v_proj"), never_called(MLP, "gate_proj", "up_proj"):
        clip = built(torch.float8_e4m3fn)
        assert relative_error(exact, encode(clip, tiny_encoders.tokens())) < 1.5 * floor
    low_rank = clip.patcher.low_rank_model()
    assert {key.partition("layers.0.")[2] for key in low_rank.by_weight if "layers.0." in key} == {
        f"{part}.weight" for part in parts if "down" not in part
    }
    assert low_rank.asked == low_rank.by_weight


def test_layers_of_an_encoder_that_are_passed_by_in_decoding_alone():
    """One call of the encoder runs them on the prompt, and multiplies past them for each token."""
    plain = Attention.forward
    with never_called(Attention, "q_proj", "k_proj", "v_proj"):
        together = Attention.forward

    def forward(self, hidden_states, *args, **kwargs):
        return (plain if hidden_states.shape[1] > 1 else together)(self, hidden_states, *args, **kwargs)

    clip = tiny_encoders.build("qwen3")
    transformer = clip.cond_stage_model.tiny.transformer
    for name, module in clip.cond_stage_model.named_modules():
        if name.endswith("_proj"):
            module.weight = torch.nn.Parameter(module.weight.to(torch.float8_e4m3fn), requires_grad=False)
    places = (f"model.layers.{number}.self_attn.{part}_proj" for number in range(2) for part in "qk")
    names = {name: tuple(transformer.get_submodule(name).weight.shape) for name in places}
    keep_low_rank_unmerged(clip.patcher)
    clip = load_lora_for_models(None, clip, encoder_lora(names, "text_encoders.tiny.transformer."), 0.0, 1.0)[1]
    clip.generate(tiny_encoders.tokens(), max_length=3, do_sample=False)
    low_rank = clip.patcher.low_rank_model()
    assert not low_rank.by_weight
    with changed(Attention, "forward", forward):
        clip.generate(tiny_encoders.tokens(), max_length=3, do_sample=False)
    assert len(low_rank.by_weight) == len(names) and low_rank.asked == low_rank.by_weight


def test_a_repeat_runs_a_fused_layer_of_an_encoder_in_full_precision(comfy, models_dir):
    """The request for plain products holds where ComfyUI multiplies by an int8 weight past its layer."""
    path = tiny_models.narrow_clip_l(models_dir / "text_encoders" / "clip_l_plain.safetensors")
    in_int8: list[bool] = []
    seen = {}

    def forward(self, x):
        hidden = self.activation(self.fc1(x))
        in_int8.append(not self.fc2.weight_function)
        return F.linear(hidden, self.fc2.weight.dequantize().to(x.dtype), self.fc2.bias.to(x.dtype))

    from comfy.clip_model import CLIPMLP

    with changed(CLIPMLP, "forward", forward):
        for compute in ("auto", "fp32"):
            in_int8.clear()
            encode(
                comfy.run(
                    "HalfsafeLoadCLIP", clip_name1=path.name, type="stable_diffusion", storage="int8", compute=compute
                )[0]
            )
            seen[compute] = {*in_int8}
    assert seen == {"auto": {True}, "fp32": {False}}
