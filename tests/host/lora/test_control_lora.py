"""ComfyUI's ControlLora makes a ControlNet of the model's own weights: which it takes from models in 8 bits too."""

import pytest
import torch
from support import families, tiny_models
from support.families import load
from support.measures import relative_error


def control_lora(model):
    """A ControlLora of a small UNet: only the layers that are its own."""
    from comfy.cldm.cldm import ControlNet
    from comfy.controlnet import ControlLora
    from comfy.ops import disable_weight_init

    config = {key: value for key, value in model.model.model_config.unet_config.items() if key != "out_channels"}
    net = ControlNet(**config, hint_channels=3, operations=disable_weight_init, device="meta")
    own = {name: tuple(tensor.shape) for name, tensor in net.state_dict().items()}
    shared = model.model.diffusion_model.state_dict()
    made = dict(
        tiny_models.tensors_of_shapes(
            {name: shape for name, shape in own.items() if name not in shared}, torch.float32, seed=3
        )
    )
    return ControlLora(made)


def controlled(model) -> torch.Tensor:
    control = control_lora(model)
    control.set_cond_hint(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4)))
    text = torch.randn(1, 16, 768, generator=torch.Generator().manual_seed(1))
    cond = [[text, {"control": control, "control_apply_to_uncond": True}]]
    return families.sample(model, "sd15", cond=cond, steps=1)


@pytest.fixture(scope="module")
def unet(models_dir):
    return tiny_models.sd15_unet(models_dir / "diffusion_models" / "control_lora.safetensors")


def at_hand(comfy, unet, storage: str):
    """A model of ComfyUI's loader that the node Halfsafe quantizes."""
    model = families.stock(unet, torch.float32)
    return comfy.run("HalfsafeAutoPrecision", model=model, goal="quality", storage=storage, guard="off")[0]


@pytest.mark.parametrize(("storage", "bound"), [("int8", 0.05), ("fp8_e4m3fn", 0.1)])
@pytest.mark.parametrize("quantized", [load, at_hand])
def test_a_control_lora_gives_what_it_gives_in_fp32(comfy, unet, quantized, storage, bound):
    expected, result = (controlled(model) for model in (load(comfy, unet, "fp32"), quantized(comfy, unet, storage)))
    assert relative_error(expected, result) < bound
