"""INT8 files, ours in stock ComfyUI and ComfyUI's in ours: the same weights, and the error that the format has."""

import json

import comfy.quant_ops
import pytest
import torch
from halfsafe.precision.files.safetensors_file import open_checkpoint
from halfsafe.precision.formats.checkpoint import read_checkpoint
from safetensors.torch import load_file, save_file
from support import model_files
from support.families import denoise, stock
from support.measures import relative_error
from support.storing import in_storages

QUANTIZED = comfy.quant_ops.QuantizedTensor


@pytest.fixture(scope="module")
def folder(models_dir):
    return models_dir / "diffusion_models"


@pytest.fixture(scope="module")
def ours(wan, folder):
    file = open_checkpoint(wan)
    checkpoint = read_checkpoint(file, file.metadata, wan)
    tensors, notes = in_storages(checkpoint, dict.fromkeys(model_files.WAN_LINEARS, "int8"))
    assert not notes
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "int8.safetensors")
    return folder / "int8.safetensors"


@pytest.fixture(scope="module")
def of_comfyui(wan, folder):
    """The same layers, quantized by comfy-kitchen and written as ComfyUI's state_dict writes them."""
    layout, tensors = comfy.quant_ops.TensorWiseINT8Layout, load_file(wan)
    for layer in model_files.WAN_LINEARS:
        weight = tensors.pop(f"{layer}.weight").float()
        data, params = layout.quantize(weight, per_channel=True, convrot=True, convrot_groupsize=64)
        settings = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}
        tensors |= {
            f"{layer}.weight{suffix}": tensor for suffix, tensor in layout.state_dict_tensors(data, params).items()
        }
        tensors[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(settings).encode()), dtype=torch.uint8)
    save_file(tensors, folder / "kitchen.safetensors")
    return folder / "kitchen.safetensors"


def load(comfy, path, storage="as_file"):
    return comfy.run("HalfsafeLoadDiffusionModel", model_name=path.name, storage=storage, compute="fp32")[0]


def weights_of(patcher) -> dict[str, torch.Tensor]:
    modules = dict(patcher.model.diffusion_model.named_modules())
    return {layer: modules[layer].weight for layer in model_files.WAN_LINEARS}


def test_stock_comfyui_reads_the_weights_that_we_wrote(ours, wan):
    assert relative_error(denoise(stock(wan, torch.float32)), denoise(stock(ours, torch.float32))) < 0.02
    file, exact = open_checkpoint(ours), load_file(wan)
    stored = read_checkpoint(file, file.metadata, ours).weights
    for layer, weight in weights_of(stock(ours, torch.float32)).items():
        assert isinstance(weight, QUANTIZED) and weight._params.convrot
        found = stored[f"{layer}.weight"].dequantize(torch.float32)
        assert torch.equal(weight._qdata.cpu(), stored[f"{layer}.weight"].data)
        assert relative_error(found, weight.dequantize().float().cpu()) < 3e-3  # ComfyUI gives it in the compute dtype
        assert 0.002 < relative_error(exact[f"{layer}.weight"], found) < 0.012


def test_a_file_that_comfyui_made_is_read_as_it_reads_it(comfy, of_comfyui, wan):
    model = load(comfy, of_comfyui)
    theirs = weights_of(stock(of_comfyui, torch.float32))
    for layer, weight in weights_of(model).items():
        assert torch.equal(weight._qdata.cpu(), theirs[layer]._qdata.cpu())
        assert torch.equal(weight._params.scale.cpu(), theirs[layer]._params.scale.cpu())
    layers = json.loads(comfy.run("HalfsafeReport", model=model)[1])["layers"]
    held = {layer["storage"] for layer in layers if layer["name"] in model_files.WAN_LINEARS}
    assert held == {"int8"}
