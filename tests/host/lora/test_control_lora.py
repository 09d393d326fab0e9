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
    made = dict(tiny_models._tensors({name: shape for name, shape in own.items() if name not in shared}, torch.float32, seed=3))
    return ControlLora(made)


def controlled(model) -> torch.Tensor:
    control = control_lora(model)
    control.set_cond_hint(torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(4)))
    text = torch.randn(1, 16, 768, generator=torch.Generator().manual_seed(1))
    cond = [[text, {"control": control, "control_apply_to_uncond": True}]]
    return families.sample(model, "sd15", cond=cond, steps=1)


def with_lora(model):
    """The model with a LoRA on a layer that the ControlLora copies."""
    import comfy.sd

    name = "input_blocks.1.1.transformer_blocks.0.attn1.to_q"
    up, down = (torch.randn(*shape, generator=torch.Generator().manual_seed(5)) for shape in ((320, 4), (4, 320)))
    lora = {f"diffusion_model.{name}.lora_up.weight": up, f"diffusion_model.{name}.lora_down.weight": down}
    return comfy.sd.load_lora_for_models(model, None, lora, 1.0, 0.0)[0]


@pytest.fixture(scope="module")
def unet(models_dir):
    return tiny_models.sd15_unet(models_dir / "diffusion_models" / "control_lora.safetensors")


@pytest.mark.parametrize(("storage", "bound"), [("int8", 0.05), ("fp8_e4m3fn", 0.1)])
@pytest.mark.parametrize("lora", [False, True])
def test_a_control_lora_gives_what_it_gives_in_fp32(comfy, unet, storage, bound, lora):
    def made(stored):
        model = load(comfy, unet, stored, "fp32")
        return controlled(with_lora(model) if lora else model)

    assert relative_error(made("fp32"), made(storage)) < bound
