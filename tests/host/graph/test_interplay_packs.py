"""Models of other packs' loaders, by stand-ins that do what those do, under the pack's nodes."""

import enum
import math

import pytest
import torch
from comfy.ops import manual_cast
from comfy.patcher_extension import CallbacksMP
from halfsafe.precision.base import flags
from safetensors.torch import save_file
from support import families, model_files
from support.guarding import core, guarded, report_of
from support.measures import relative_error
from support.packed_layers import HangingPatcher
from support.summing import FP16_ACCUMULATION, accumulation, states

GGMLQuantizationType = enum.IntEnum("GGMLQuantizationType", {"F32": 0, "F16": 1, "Q8_0": 8})
LAYERS = {"blocks.0.ffn.0": (1024, 256), "blocks.1.ffn.2": (256, 1024)}
BLOCK = 32
BOUND = 0.01


@pytest.fixture(scope="module")
def lora(models_dir):
    save_file(model_files.lora(LAYERS, size=30.0), str(models_dir / "loras" / "packs.safetensors"))
    return "packs.safetensors"


class BlockTensor(torch.Tensor):
    """Bytes in blocks of 32 with a scale each, of GGML's type and the shape of the weight they stand for, as GGUF's are.

    ``torch.Tensor(tensor)`` calls this constructor under a dispatch mode of torch, without the type.
    """

    def __new__(cls, *args, tensor_type):
        return super().__new__(cls, *args)

    def __init__(self, *args, tensor_type):
        self.tensor_type = tensor_type

    @property
    def shape(self):
        return self.__dict__.get("wide_shape", self.size())

    def to(self, *args, **kwargs):
        return self._with(super().to(*args, **kwargs))

    def detach(self):
        return self

    def clone(self, *args, **kwargs):
        return self

    def _with(self, new):
        new.__dict__.update(self.__dict__)
        return new


def packed(weight: torch.Tensor) -> BlockTensor:
    blocks = weight.float().reshape(-1, BLOCK)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-12) / 127
    tensor = (blocks / scale).round().to(torch.int8).flatten().as_subclass(BlockTensor)
    tensor.wide_shape, tensor.scale, tensor.patches, tensor.tensor_type = (
        weight.shape,
        scale,
        [],
        GGMLQuantizationType.Q8_0,
    )
    return tensor


class BlockOps(manual_cast):
    """Layers that unpack their weight in their own cast, LoRA and all, as GGUF's do."""

    class Linear(manual_cast.Linear):
        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features, self.weight, self.bias = in_features, out_features, None, None

        def _load_from_state_dict(self, state_dict, prefix, *args):
            weight = state_dict[prefix + "weight"]
            self.weight = torch.nn.Parameter(packed(weight), requires_grad=False)
            bias = BlockTensor(state_dict[prefix + "bias"].float(), tensor_type=GGMLQuantizationType.F32)
            self.bias = torch.nn.Parameter(bias, requires_grad=False)

        def forward_comfy_cast_weights(self, x):
            wide = (self.weight.as_subclass(torch.Tensor).reshape(-1, BLOCK) * self.weight.scale).reshape(
                self.weight.shape
            )
            for patches, key in self.weight.patches:
                wide = core("comfy.lora").calculate_weight(patches, wide, key)
            return torch.nn.functional.linear(x, wide.to(x.dtype), torch.Tensor(self.bias.to(x.dtype)))


def unpacking(path):
    """A loader with packed weights, in fp16, as it comes from another pack."""
    load = core("comfy.sd").load_diffusion_model
    patcher = load(str(path), model_options={"custom_operations": BlockOps, "dtype": torch.float16})
    patcher.__class__ = HangingPatcher
    patcher.set_model_compute_dtype(torch.float16)
    return patcher


def in_fp32(model):
    clone = model.clone()
    clone.set_model_compute_dtype(torch.float32)
    return clone


def with_lora(comfy, model, lora):
    return comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, lora, 1.0)[0]


@pytest.mark.parametrize("order", ["lora first", "guard first"])
def test_a_lora_hung_on_packed_weights(comfy, overflowing, lora, order):
    model = unpacking(overflowing)
    expected = families.sample(in_fp32(with_lora(comfy, model, lora)), "wan")
    without = families.sample(in_fp32(model), "wan")
    assert relative_error(without, expected) > 5 * BOUND, "the LoRA acts"
    if order == "lora first":
        ours = guarded(comfy, with_lora(comfy, model, lora))
    else:
        ours = with_lora(comfy, guarded(comfy, model), lora)
    assert relative_error(expected, families.sample(ours, "wan")) < BOUND
    assert report_of(ours).verdict == "recovered"
    assert relative_error(without, families.sample(guarded(comfy, model), "wan")) < BOUND, "and is gone afterwards"


def test_compute_dtype_guard_and_report_take_a_model_of_comfyui_gguf(comfy, overflowing, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    model = unpacking(overflowing)
    reference = families.sample(families.with_compute(comfy, model, "fp32"), "wan")
    assert torch.isfinite(reference).all() and not torch.isfinite(families.sample(model, "wan")).all()
    for compute in ("fp16_safe", "auto"):
        planned = families.with_compute(comfy, model, compute)
        assert relative_error(reference, families.sample(planned, "wan")) < 0.02
    ours = guarded(comfy, families.with_compute(comfy, model, "fp16"))
    assert relative_error(reference, families.sample(ours, "wan")) < 0.02
    report = families.report(comfy, ours)
    assert report["guard"]["verdict"] == "recovered" and "gguf Q8_0" in report["model"]["bytes_by_storage"]
    assert {layer["storage"] for layer in report["layers"] if layer["name"] in LAYERS} == {"gguf Q8_0"}


def replaced_attention(model, factor: float = 1.0):
    """Each self-attention's forward exchanged by an object patch that counts and hands on, as attention packs do."""
    clone, ran = model.clone(), []
    for index, block in enumerate(clone.model.diffusion_model.blocks):
        own = type(block.self_attn).forward

        def forward(*args, own=own, module=block.self_attn, **kwargs):
            ran.append(1)
            return own(module, *args, **kwargs) * factor

        clone.add_object_patch(f"diffusion_model.blocks.{index}.self_attn.forward", forward)
    return clone, ran


@pytest.mark.parametrize(("compute", "order"), [("fp16", "patch first"), ("fp16_safe", "guard first")])
def test_object_patches_on_attention(comfy, overflowing, compute, order):
    reference, _ = replaced_attention(families.load(comfy, overflowing, "fp16", "fp32"), 0.5)
    expected = families.sample(reference, "wan")
    assert relative_error(families.sample(families.load(comfy, overflowing, "fp16", "fp32"), "wan"), expected) > 2e-4
    model = families.load(comfy, overflowing, "fp16", compute)
    if order == "patch first":
        patched, ran = replaced_attention(model, 0.5)
        ours = guarded(comfy, patched)
    else:
        ours, ran = replaced_attention(guarded(comfy, model), 0.5)
    for _ in range(2):
        assert relative_error(expected, families.sample(ours, "wan")) < BOUND
    assert len(ran) >= 2 * 4 * 2
    families.sample(model, "wan", steps=1)
    for block in model.model.diffusion_model.blocks:
        assert block.self_attn.forward.__func__ is type(block.self_attn).forward


@pytest.mark.parametrize(("wanted", "order"), [("on", "theirs first"), ("off", "ours first")])
def test_callbacks_that_write_the_flag_for_all(comfy, wan, monkeypatch, wanted, order):
    """A pack that switches fp16 sums on when a run begins, and off when it ends, whatever it was before."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")

    def switching(model):
        clone = model.clone()
        clone.add_callback(CallbacksMP.ON_PRE_RUN, lambda _: flags.SETTINGS[FP16_ACCUMULATION].write(True))
        clone.add_callback(CallbacksMP.ON_CLEANUP, lambda _: flags.SETTINGS[FP16_ACCUMULATION].write(False))
        return clone

    def ours(model):
        return accumulation(comfy, model, fp16_accumulation=wanted)

    before, seen = states(), []
    model = families.load(comfy, wan, "fp16", "fp16")
    model = ours(switching(model)) if order == "theirs first" else switching(ours(model))
    hook = model.model.diffusion_model.head.register_forward_pre_hook(
        lambda *_: seen.append(flags.is_on(FP16_ACCUMULATION))
    )
    try:
        result = families.sample(model, "wan", steps=2)
    finally:
        hook.remove()
        flags.SETTINGS[FP16_ACCUMULATION].write(before[FP16_ACCUMULATION])
    assert seen == [wanted == "on"] * 2, "inside of the calls it is as the node says"
    assert states() == before
    assert math.isfinite(result.norm())
