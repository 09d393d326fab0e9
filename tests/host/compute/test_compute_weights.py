"""`fp16_safe` with LoRAs, with control residuals, and on models of other loaders."""

import pytest
import torch
from comfy.ops import manual_cast
from halfsafe.nodes.host.comfyui.attributes import is_patched
from halfsafe.nodes.host.comfyui.weights import core_weights
from halfsafe.nodes.host.compute.executor import compute_of
from halfsafe.nodes.host.compute.layer_modes import states_of
from halfsafe.precision.arithmetic.linear import lent
from safetensors.torch import save_file
from support import families
from support.families import load, with_compute
from support.measures import relative_error


@pytest.fixture(scope="module")
def lora(models_dir):
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, outputs, inputs in (("blocks.0.ffn.2", 256, 1024), ("blocks.1.self_attn.o", 256, 256)):
        tensors[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(8, inputs, generator=generator) * 0.3
        tensors[f"diffusion_model.{name}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator) * 30
    path = models_dir / "loras" / "small.safetensors"
    path.parent.mkdir(exist_ok=True)
    save_file(tensors, str(path))
    return path


def with_lora(comfy, model, lora, strength):
    return comfy.core["LoraLoaderModelOnly"]().load_lora_model_only(model, lora.name, strength)[0]


@pytest.mark.parametrize(("storage", "bound"), [("as_file", 4e-3), ("fp32", 2e-3), ("fp8_e4m3fn", 0.04)])
def test_a_lora_acts_and_its_strength_can_change(comfy, overflowing, lora, call, storage, bound):
    model, fp32 = load(comfy, overflowing, storage, "fp16_safe"), load(comfy, overflowing, storage, "fp32")
    plain = families.replay(fp32, call)
    for strength in (1.0, 1e5, 0.0):
        reference = families.replay(with_lora(comfy, fp32, lora, strength), call)
        assert (relative_error(plain, reference) > 0.01) == (strength > 0)
        result = families.replay(with_lora(comfy, model, lora, strength), call)
        assert relative_error(reference, result) < bound, strength
        assert compute_of(model).runs.of(model.model).calibration.repeats == 0, (
            "other weights are measured, not found out"
        )


def test_a_lora_in_bypass_mode_is_not_lost(comfy, overflowing, lora, call):
    from comfy.sd import load_bypass_lora_for_models
    from comfy.utils import load_torch_file

    def bypassed(model):
        return load_bypass_lora_for_models(model, None, load_torch_file(str(lora)), 1.0, 0.0)[0]

    model = load(comfy, overflowing, "as_file", "fp16_safe")
    plain = families.replay(model, call)
    reference = families.replay(bypassed(load(comfy, overflowing, "fp32")), call)
    assert relative_error(plain, reference) > 0.01
    planned = bypassed(model)
    assert relative_error(reference, families.replay(planned, call)) < 4e-3
    assert states_of(planned)["blocks.0.ffn.2"].mode == "fp32"


class Int8Ops(manual_cast):
    """A loader's own classes, as GGUF's: stored in a foreign format, widened in their own cast."""

    class Linear(manual_cast.Linear):
        def forward_comfy_cast_weights(self, x):
            weight = self.weight.to(x.dtype) * self.weight_scale.to(x.dtype)
            return torch.nn.functional.linear(x, weight, None if self.bias is None else self.bias.to(x.dtype))

        def _load_from_state_dict(self, state_dict, prefix, *args):
            weight = state_dict.pop(prefix + "weight").float()
            scale = weight.abs().max() / 127
            self.weight = torch.nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
            self.register_buffer("weight_scale", scale)
            super()._load_from_state_dict(state_dict, prefix, *args)


def test_a_loader_with_its_own_classes_runs_them_in_fp32_and_says_so(comfy, overflowing, call):
    from comfy.sd import load_diffusion_model

    model = load_diffusion_model(str(overflowing), model_options={"custom_operations": Int8Ops, "dtype": torch.float16})
    reference = families.replay(with_compute(comfy, model, "fp32"), call)
    assert torch.isfinite(reference).all()
    assert not torch.isfinite(families.replay(with_compute(comfy, model, "fp16"), call)).all()
    planned = with_compute(comfy, model, "fp16_safe")
    for _ in range(2):
        assert relative_error(reference, families.replay(planned, call)) < 2e-3
    report = families.report(comfy, planned)
    layer = next(layer for layer in report["layers"] if layer["name"] == "blocks.0.ffn.0")
    assert layer["mode"] == "fp32" and "its own matmul" in layer["reason"]
    assert any(
        entry["setting"] == "compute=fp16_safe" and "another loader" in entry["reason"]
        for entry in report["without_effect"]
    )
    assert float(report["decisions"]["work"].split("%")[0]) < 20


def test_layers_of_torch_s_own_classes_multiply_in_fp16_too(comfy, overflowing, call):
    model = load(comfy, overflowing, "as_file", "fp32")
    reference = families.replay(model, call)
    block = model.model.diffusion_model.blocks[0].ffn
    plain = torch.nn.Linear(256, 1024)
    plain.load_state_dict(block[0].state_dict())
    block[0] = plain.to(torch.bfloat16)
    planned = with_compute(comfy, model, "fp16_safe")
    for _ in range(2):
        assert relative_error(reference, families.replay(planned, call)) < 2e-3
    assert states_of(planned)["blocks.0.ffn.0"].mode.startswith("fp16")


def test_control_residuals_of_a_unet(comfy, models_dir):
    path = families.write_narrow("sdxl", models_dir / "diffusion_models")
    fp32, model = load(comfy, path, "fp32"), load(comfy, path, "as_file", "fp16_safe")
    call = families.capture(fp32, "sdxl")
    control = {"middle": [torch.full((1, 64, 4, 4), 1e6)], "output": [torch.full((1, 64, 8, 8), 5.0)]}
    reference = families.replay(fp32, call, control=_copied(control))
    assert relative_error(families.replay(fp32, call), reference) > 0.01
    assert relative_error(reference, families.replay(model, call, control=_copied(control))) < 4e-3


def _copied(control):
    return {key: list(values) for key, values in control.items()}


@pytest.mark.parametrize(
    ("held", "patched", "given"),
    [
        (torch.float16, False, torch.float16),
        (torch.bfloat16, False, torch.bfloat16),
        (torch.float32, False, torch.float32),
        (torch.float8_e4m3fn, False, torch.float32),
        (torch.float16, True, torch.float32),
    ],
)
def test_a_wide_layer_is_given_its_bias_as_torch_can_add_it(held, patched, given):
    """An fp8 model of ComfyUI's own loader holds its biases in fp8, which no operation of torch adds."""
    layer = manual_cast.Linear(32, 16, dtype=held)
    for parameter in layer.parameters():
        parameter.requires_grad_(False).copy_(torch.ones(parameter.shape))
    if patched:
        layer.bias_function = [lambda bias: bias * 3]
    x = torch.ones(2, 32)
    with torch.inference_mode(), lent(core_weights(layer, x, torch.float16, None)) as (weight, bias):
        assert weight.dtype == torch.float16 and bias.dtype == given
        assert torch.equal(bias.float(), torch.full((16,), 3.0 if patched else 1.0))


def test_a_patched_bias_with_dynamic_vram_is_seen_by_comfyuis_name():
    import inspect

    import comfy.model_patcher

    layer = manual_cast.Linear(32, 16)
    assert not is_patched(layer, "bias")
    layer.bias_lowvram_function = lambda bias: bias
    assert is_patched(layer, "bias")
    assert 'param_key + "_lowvram_function"' in inspect.getsource(comfy.model_patcher)


def test_norms_are_lent_memory_in_the_dtype_they_are_held_in(comfy, overflowing):
    model = load(comfy, overflowing, "fp16", "fp16_safe")
    norms = [
        module
        for module in model.model.diffusion_model.modules()
        if isinstance(module, torch.nn.LayerNorm) and module.weight is not None
    ]
    assert norms and {
        (norm.weight.dtype, norm.weight_comfy_model_dtype, norm.bias_comfy_model_dtype) for norm in norms
    } == {(torch.float32,) * 3}
