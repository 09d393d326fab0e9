"""Finite and wrong: what the guard's check finds, what it names, and that it changes nothing."""

from types import SimpleNamespace

import pytest
import torch
from comfy.sd import load_diffusion_model, load_lora_for_models
from halfsafe.nodes.host.guard.precise import MergedWeights
from halfsafe.nodes.host.run import core_layers
from halfsafe.precision.arithmetic import flags
from halfsafe.precision.arithmetic.fp16_accumulation import FP16_ACCUMULATION
from halfsafe.precision.arithmetic.patching import patched
from halfsafe.precision.devices import probes
from support import families, model_files
from support.families import load
from support.guarding import core, guarded, inside, int8_attention, report_of
from support.summing import accumulation

LAYERS = {f"blocks.{block}.{layer}": shape for block in (0, 1) for layer, shape in {"ffn.0": (1024, 256), "ffn.2": (256, 1024)}.items()}


@pytest.fixture(scope="module")
def files(models_dir):
    return families.files_in(models_dir / "diffusion_models", "drift")


def scaled(files, name, factors):
    path = files("wan")
    return families.write_scaled(path, path.with_name(f"drift_{name}.safetensors"), factors)


def checked(comfy, plain, check="first step", steps=1, **options):
    """(the check's events, its checks) of a run."""
    model = guarded(comfy, plain, check=check)
    families.sample(model, "wan", steps=steps, **options)
    print("\nchecked", [(one.arithmetic, one.step, one.snr_db, one.lora_snr_db, one.repeats, one.left_out) for one in report_of(model).checks])
    return report_of(model).events, report_of(model).checks


def found(comfy, plain, **options):
    return checked(comfy, plain, **options)[0][-1]


def test_fp8_activations_clipped_at_448(comfy, files, monkeypatch):
    """As ComfyUI's own fp8 product without an ``input_scale``: the scale is 1.0."""
    path = scaled(files, "loud", {r"blocks\.0\.ffn\.0\.weight": 3000, r"blocks\.0\.ffn\.2\.weight": 1 / 1000})
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    plain = load(comfy, path, "fp8_e4m3fn", "fp8")
    assert checked(comfy, plain)[0] == []
    monkeypatch.setattr(core_layers, "activation_scale", lambda rows, dtype: torch.ones(()))
    event = found(comfy, plain)
    assert (event.layer, event.op, event.from_mode) == ("blocks.0.ffn.2", "fp8 product", "fp8")


def test_a_coarse_attention_kernel_of_another_pack(comfy, files):
    plain = load(comfy, files("wan"), "bf16", "bf16")
    plain.model_options["transformer_options"]["optimized_attention_override"] = int8_attention
    event = found(comfy, plain)
    assert (event.layer, event.op) == ("blocks.1", "attention by int8_attention")


def test_positions_rounded_to_bf16(comfy, files, monkeypatch):
    module = core("comfy.ldm.flux.layers")
    rope, plain = module.rope, far_off(load(comfy, files("wan"), "fp16", "fp16"), 2000.0)
    assert checked(comfy, plain)[0] == []
    monkeypatch.setattr(module, "rope", lambda pos, *args: rope(pos.bfloat16().float(), *args))
    assert found(comfy, plain).layer == "rope_embedder"


def test_positions_made_in_the_models_dtype(comfy, files):
    """ComfyUI's Wan makes its positions in the dtype of the values between layers, where bf16 holds no odd number past 256."""
    event = found(comfy, far_off(load(comfy, files("wan"), "bf16", "bf16"), 2001.0))
    assert (event.layer, event.op) == ("", "positions, timesteps and values between blocks")


def far_off(model, shift):
    """A clone whose positions begin at ``shift``."""
    far = {"rope_options": {"shift_x": shift, "shift_y": shift}}
    return inside(model, lambda run, args, kwargs: run(*args[:5], {**args[5], **far}, *args[6:], **kwargs))


def test_a_lora_drowned_by_requantizing(comfy, files):
    stock = load_diffusion_model(str(files("wan")), model_options={"dtype": torch.float8_e4m3fn})
    stock.set_model_compute_dtype(torch.bfloat16)
    assert checked(comfy, stock)[0] == []
    plain = load_lora_for_models(stock, None, model_files.lora(LAYERS, size=0.01), 1.0, 0.0)[0]
    event = found(comfy, plain)
    assert event.op == "weight quantized anew with its LoRA" and event.layer in LAYERS


def hooked(size):
    """A conditioning whose LoRA is on in all steps."""
    hooks = core("comfy.hooks")
    group = hooks.create_hook_lora(model_files.lora(LAYERS, size=size, seed=7), 1.0, 0.0)
    return hooks.set_conds_props([families.conditioning("wan")], 1.0, "default", hooks=group)[0]


@pytest.mark.parametrize("memory", ["whole", "little"])
def test_a_lora_of_a_hook_on_a_layer_with_another_lora_is_no_drift(comfy, files, memory, monkeypatch):
    plain = load_lora_for_models(load(comfy, files("wan"), "fp16", "fp16"), None, model_files.lora(LAYERS, size=0.1), 1.0, 0.0)[0]
    if memory == "little":
        partially_load = type(plain).partially_load
        monkeypatch.setattr(type(plain), "partially_load", lambda self, device, *_, **__: partially_load(self, device, 1))
    events, (check,) = checked(comfy, plain, cond=hooked(0.1))
    assert events == [] and check.snr_db > 58


def test_a_lora_of_a_hook_drowned_by_requantizing(comfy, files):
    """ComfyUI rounds a weight to fp8 anew, without a scale, for a hook's LoRA too."""
    stock = load_diffusion_model(str(files("wan")), model_options={"dtype": torch.float8_e4m3fn})
    event = found(comfy, stock, cond=hooked(0.01))
    assert event.op == "weight quantized anew with its LoRA" and event.layer in LAYERS


LAYERS_OF_EACH_KIND = {
    "Linear": ((8, 6), (2, 8)),
    "Conv2d": ((8, 6, 3), (2, 8, 5, 5)),
    "ConvTranspose2d": ((8, 6, 2, 2), (2, 8, 5, 5)),
}


@pytest.mark.parametrize("kind", LAYERS_OF_EACH_KIND)
def test_a_patched_layer_of_each_kind_multiplies_by_its_weight_in_fp32(kind):
    sizes, shape = LAYERS_OF_EACH_KIND[kind]
    layer = getattr(core("comfy.ops").manual_cast, kind)(*sizes, dtype=torch.bfloat16)
    weight, added = (torch.randn(layer.weight.shape).bfloat16() for _ in range(2))
    layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(torch.randn(6).bfloat16())
    model = torch.nn.Module()
    model.diffusion_model = torch.nn.ModuleDict({"layer": layer})
    patches = {"diffusion_model.layer.weight": [(0.01, ("diff", (added,)), 1.0, None, None)]}
    patcher = SimpleNamespace(model=model, patches=patches, current_hooks=None, get_combined_hook_patches=lambda hooks: {}, backup={}, hook_backup={})
    merged, x = MergedWeights(patcher), torch.randn(shape)
    exact = getattr(torch.nn, kind)(*sizes)
    exact.weight, exact.bias = torch.nn.Parameter(weight.float() + 0.01 * added.float()), torch.nn.Parameter(layer.bias.float())
    with torch.inference_mode(), patched(merged.exact(merged.modules)):
        torch.testing.assert_close(layer(x), exact(x))


class RoundsSums(torch.overrides.TorchFunctionMode):
    """fp16 products add up one by one in fp16 while torch's flag for fp16 sums is on, as a tensor core does in steps of 16."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and args[0].dtype == torch.float16 and flags.is_on(FP16_ACCUMULATION):
            x, weight, bias = (*args, None)[:3]
            total = torch.zeros(*x.shape[:-1], len(weight), dtype=torch.float16)
            for start in range(0, x.shape[-1], 16):
                total += x[..., start : start + 16].float().matmul(weight[:, start : start + 16].float().t()).half()
            return total if bias is None else total + bias
        return func(*args, **(kwargs or {}))


def test_fp16_sums_of_many_products(comfy, files, monkeypatch):
    """Large partial sums that cancel: each is rounded at its own size."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    model = load(comfy, files("wan"), "fp16", "fp16")
    plain = accumulation(comfy, model, fp16_accumulation="on")
    with RoundsSums():
        assert checked(comfy, plain)[0] == []
        ffn = model.model.diffusion_model.blocks[1].ffn
        with torch.no_grad():
            noise = ffn[2].weight[:, 512:].clone()
            ffn[2].weight[:, :512] = ffn[2].weight[:, :512].abs() * 400
            ffn[2].weight[:, 512:] = -ffn[2].weight[:, :512] + noise
            ffn[0].weight[512:], ffn[0].bias[512:] = ffn[0].weight[:512], ffn[0].bias[:512]
        event = found(comfy, plain)
    assert (event.layer, event.op) == ("blocks.1.ffn.2", "fp16_acc16 product")


class FewLevels(torch.overrides.TorchFunctionMode):
    """Products by one fp16 weight have few levels."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.linear and args[1].dtype == torch.float16 and torch.equal(args[1], self.weight):
            step = result.abs().amax() / 4
            return (result / step).round() * step
        return result


@pytest.mark.parametrize(("kind", "widened"), [("residual", "residual stream"), ("attention", "blocks.1")])
def test_the_cause_in_a_model_that_the_guard_has_widened(comfy, files, kind, widened):
    """What keeps its arithmetic while the cause is searched keeps what the guard has widened: else it overflows, or is exact."""
    plain = load(comfy, scaled(files, f"widened_{kind}", families.OVERFLOWS["wan"][kind]), "fp16", "fp16")
    model = guarded(comfy, plain)
    families.sample(model, "wan", steps=1)
    assert widened in report_of(model).escalations and "blocks.1.ffn.0" not in report_of(model).escalations
    assert checked(comfy, plain)[0] == []
    with FewLevels(plain.model.diffusion_model.blocks[1].ffn[0].weight):
        event = found(comfy, plain)
    assert (event.layer, event.op) == ("blocks.1.ffn.0", "fp16 product") and "nan" not in event.evidence


def test_embedded_guidance_of_a_model_that_the_guard_runs_in_fp32(comfy, files, monkeypatch):
    """Flux' guidance of 3.5 is 3504 in bf16 and 3500 in fp32, which the guard gives the model here."""
    monkeypatch.setattr(probes, "canary", lambda device, dtype: (dtype == "fp32", "simulated"))
    model = guarded(comfy, load(comfy, files("flux"), "bf16", "bf16"), check="first step")
    families.sample(model, "flux", steps=1)
    (check,) = report_of(model).checks
    assert [event.kind for event in report_of(model).events] == ["canary"]
    assert check.arithmetic == "fp32" and check.snr_db > 100


def test_an_int8_product_that_is_wrong(comfy, files, monkeypatch):
    plain = load(comfy, files("wan"), "int8", "int8")
    assert checked(comfy, plain)[0] == []
    product = torch._int_mm
    monkeypatch.setattr(torch, "_int_mm", lambda a, b, **options: product(a, b, **options) * 3 // 2)
    event = found(comfy, plain)
    assert event.op == "int8 product" and event.from_mode == "int8"


def test_a_step_cache_gone_stale(comfy, files):
    easy = core("comfy_extras.nodes_easycache").EasyCacheNode
    plain = load(comfy, files("wan"), "bf16", "bf16")
    assert checked(comfy, easy.execute(plain, 0.2, 0.1, 0.95, False).args[0], "every 5th step", 12)[0] == []
    event = found(comfy, easy.execute(plain, 1000.0, 0.1, 0.95, False).args[0], check="every 5th step", steps=12)
    assert event.op == "step cache"
