"""Models of other packs' loaders, whose weights are in formats of their own: saved, analysed, reported, or refused in words."""

import json

import pytest
import torch
from comfy.ops import manual_cast
from comfy.sd import load_diffusion_model
from halfsafe.precision.base.errors import HalfsafeError
from support import families

LAYER = "blocks.0.ffn.0"


class PackedTensor(torch.Tensor):
    """A class of its own, as ComfyUI-GGUF's ``GGMLTensor``, which takes a size as a tuple alone."""

    def new_empty(self, size, *args, **kwargs):
        return super().new_empty(tuple(size), *args, **kwargs)


def ops(quantized: bool) -> type:
    class Ops(manual_cast):
        class Linear(manual_cast.Linear):
            def __init__(self, in_features, out_features, bias=True, device=None, dtype=None):
                torch.nn.Module.__init__(self)
                self.in_features, self.out_features, self.weight, self.bias = in_features, out_features, None, None

            def _load_from_state_dict(self, state_dict, prefix, *args):
                weight, bias = state_dict[prefix + "weight"].float(), state_dict.get(prefix + "bias")
                self.scale = weight.abs().max().item() / 127
                data = ((weight / self.scale).round() + 128).to(torch.uint8) if quantized else weight.half()
                self.weight = torch.nn.Parameter(data.as_subclass(PackedTensor), requires_grad=False)
                self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)

            def _save_to_state_dict(self, destination, prefix, keep_vars):
                super()._save_to_state_dict(destination, prefix, keep_vars)
                if quantized:  # a weight of no numbers, for estimates of memory alone
                    destination[prefix + "weight"] = torch.empty(self.out_features, self.in_features, device="meta")

            def forward_comfy_cast_weights(self, x):
                weight = self.weight.as_subclass(torch.Tensor)
                if quantized:
                    weight = (weight.float() - 128) * self.scale
                bias = None if self.bias is None else self.bias.to(x.dtype)
                return torch.nn.functional.linear(x, weight.to(x.dtype), bias)

    return Ops


def loaded(path, quantized=True):
    return load_diffusion_model(str(path), model_options={"custom_operations": ops(quantized), "dtype": torch.float16})


def save(comfy, model, storage, prefix="diffusion_models/packed", rules=None):
    node = comfy.nodes["HalfsafeSaveModel"].PREPARE_CLASS_CLONE(None)
    return node.execute(model, prefix, storage, rules).args[0]


@pytest.mark.parametrize("storage", ["as_file", "fp8_e4m3fn", "int8", "bf16"])
def test_packed_weights_are_refused_by_layer_and_class(comfy, wan, storage):
    with pytest.raises(HalfsafeError, match=r"'.*' and \d+ more .*\(PackedTensor\).*safetensors file"):
        save(comfy, loaded(wan), storage)


@pytest.mark.parametrize("storage", ["as_file", "int8", "fp8_e4m3fn"])
def test_floats_of_another_class_are_saved(comfy, wan, storage):
    assert save(comfy, loaded(wan, quantized=False), storage)


def test_the_report_names_what_it_does_not_know(comfy, wan):
    report = families.report(comfy, families.with_compute(comfy, loaded(wan), "fp16_safe"))
    layer = next(layer for layer in report["layers"] if layer["name"] == LAYER)
    assert layer["storage"] == "packed" and "uint8" not in json.dumps(report)
    assert any("PackedTensor" in note for note in report["notes"])


@pytest.mark.parametrize("candidate", ["fp8_e4m3fn", "int8", "fp16"])
def test_analysis_leaves_packed_layers_as_they_are(comfy, wan, candidate):
    model = loaded(wan)
    latent = {"samples": torch.zeros_like(families.noise(model))}
    with_one = {"positive": families.conditioning("wan"), "latent_image": latent, "seed": 1}
    _, text, _ = comfy.run("HalfsafeAnalyzeLayers", model=model, candidate=candidate, target_snr_db=25.0, **with_one)
    assert "of another node or loader" in text


@pytest.mark.parametrize("rules", ["*.ffn.* storage=bf16", 5])
def test_rules_of_another_type_are_an_error_that_says_what_is_meant(comfy, wan, rules):
    model = families.load(comfy, wan, "as_file")
    calls = (
        lambda: save(comfy, model, "fp8_e4m3fn", rules=rules),
        lambda: comfy.run("HalfsafeComputeDtype", model=model, compute="auto", rules=rules),
        lambda: families.load(comfy, wan, "auto", rules=rules),
        lambda: comfy.run("HalfsafeLayerRules", rules="", preset="none", previous=rules),
    )
    for call in calls:
        with pytest.raises(HalfsafeError, match=rf"takes the output of Layer Rules.*not a {type(rules).__name__}"):
            call()
