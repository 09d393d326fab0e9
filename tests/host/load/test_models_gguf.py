"""A MODEL of ComfyUI-GGUF's loader in every Halfsafe node, on a stand-in of its layers (its ops.py and dequant.py)."""

import enum

import pytest
import torch
from comfy.ops import manual_cast
from comfy.sd import load_diffusion_model
from support import families
from support.measures import relative_error

GGMLQuantizationType = enum.IntEnum("GGMLQuantizationType", {"F32": 0, "F16": 1, "Q8_0": 8})
BLOCK = 32
LAYER = "blocks.0.ffn.0"


class GGMLTensor(torch.Tensor):
    """Bytes of blocks, of GGML's type and the weight's shape."""

    def __new__(cls, *args, tensor_type, tensor_shape, **kwargs):
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args, tensor_type, tensor_shape, **kwargs):
        super().__init__()
        self.tensor_type, self.tensor_shape = tensor_type, tensor_shape

    def to(self, *args, **kwargs):
        new = super().to(*args, **kwargs)
        new.tensor_type, new.tensor_shape = self.tensor_type, self.tensor_shape
        return new

    def clone(self, *args, **kwargs):
        return self

    def detach(self, *args, **kwargs):
        return self

    @property
    def shape(self):
        return getattr(self, "tensor_shape", self.size())


def q8_0(weight: torch.Tensor) -> GGMLTensor:
    """Blocks of 34 bytes: an fp16 scale and 32 numbers."""
    blocks = weight.float().reshape(-1, BLOCK)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half()
    codes = (blocks / scale.float().clamp(min=1e-12)).round().to(torch.int8)
    data = torch.cat((scale.view(torch.uint8), codes.view(torch.uint8)), 1).reshape(len(weight), -1)
    return GGMLTensor(data, tensor_type=GGMLQuantizationType.Q8_0, tensor_shape=weight.shape)


def dequantized(tensor: GGMLTensor, dtype: torch.dtype) -> torch.Tensor:
    blocks = tensor.as_subclass(torch.Tensor).reshape(-1, BLOCK + 2)
    scale, codes = blocks[:, :2].contiguous().view(torch.float16), blocks[:, 2:].contiguous().view(torch.int8)
    return (codes.float() * scale.float()).reshape(tensor.tensor_shape).to(dtype)


class GGMLOps(manual_cast):
    class Linear(manual_cast.Linear):
        def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
            torch.nn.Module.__init__(self)
            self.in_features, self.out_features, self.weight, self.bias = in_features, out_features, None, None

        def _load_from_state_dict(self, state_dict, prefix, *args):
            self.weight = torch.nn.Parameter(q8_0(state_dict[prefix + "weight"]), requires_grad=False)
            bias = state_dict[prefix + "bias"].float()
            bias = GGMLTensor(bias, tensor_type=GGMLQuantizationType.F32, tensor_shape=bias.shape)
            self.bias = torch.nn.Parameter(bias, requires_grad=False)

        def forward_comfy_cast_weights(self, x):
            weight = dequantized(self.weight.to(x.device), x.dtype)
            return torch.nn.functional.linear(x, weight, torch.Tensor(self.bias.to(x.dtype)))


@pytest.fixture
def model(overflowing):
    """A model whose first block overflows fp16, in Q8_0."""
    model = load_diffusion_model(str(overflowing), model_options={"custom_operations": GGMLOps, "dtype": torch.float16})
    model.set_model_compute_dtype(torch.float16)
    return model


def test_compute_dtype_guard_and_report_take_the_model(comfy, model, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    reference = families.sample(families.with_compute(comfy, model, "fp32"), "wan")
    assert torch.isfinite(reference).all() and not torch.isfinite(families.sample(model, "wan")).all()
    for compute in ("fp16_safe", "auto"):
        planned = families.with_compute(comfy, model, compute)
        assert relative_error(reference, families.sample(planned, "wan")) < 0.02
    fp16 = families.with_compute(comfy, model, "fp16")
    guarded = comfy.run("HalfsafeNaNGuard", model=fp16, on_nan="retry_higher", max_retries=8)[0]
    assert relative_error(reference, families.sample(guarded, "wan")) < 0.02
    report = families.report(comfy, guarded)
    assert report["guard"]["verdict"] == "recovered" and "gguf Q8_0" in report["model"]["bytes_by_storage"]
    assert {layer["storage"] for layer in report["layers"] if layer["name"] == LAYER} == {"gguf Q8_0"}
