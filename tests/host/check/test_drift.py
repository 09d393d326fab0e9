"""Finite and wrong: what the guard's check finds, which blocks it names, and what it is silent on."""

from types import SimpleNamespace

import pytest
import torch
from comfy.sd import load_lora_for_models
from comfy_extras.nodes_easycache import EasyCacheNode
from comfy_kitchen.backends import eager
from comfy_kitchen.registry import registry
from halfsafe.nodes.host.comfyui import kernels
from halfsafe.precision.devices import probes
from halfsafe.precision.formats import fp8
from support import families, model_files, plants, rare_families
from support.cuda_rules import HostReads
from support.families import load
from support.guarding import core, guarded, inside, int8_attention, nan_at, report_of
from support.rows import all_of, the_rest_before_a_release

LAYERS = {
    f"blocks.{block}.{layer}": shape
    for block in (0, 1)
    for layer, shape in {"ffn.0": (1024, 256), "ffn.2": (256, 1024)}.items()
}
RARE = ("svd", "cosmos1", "cogvideox", "kandinsky5", "stable_cascade")


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
    return report_of(model).events, report_of(model).checks


def found(comfy, plain, **options):
    return checked(comfy, plain, **options)[0][-1]


def with_attention(model, attend):
    clone = model.clone()
    clone.model_options["transformer_options"]["optimized_attention_override"] = attend
    return clone


@pytest.mark.parametrize(("check", "most"), [("first step", 2), ("every 5th step", 5)])
def test_a_run_waits_for_the_device_no_oftener_than_a_step_may_be_checked(comfy, wan, check, most):
    """The step of a call is on the device: one read tells it, and none once nothing is left to check. One more is for the report."""
    model = guarded(comfy, load(comfy, wan, "fp16", "fp16"), check=check)
    with HostReads() as reads:
        families.sample(model, "wan", steps=4)
    assert 1 <= sum(place.startswith("replay/call.") for place in reads.places) <= most
    assert len(report_of(model).checks) == 1


def test_fp8_activations_clipped_at_448(comfy, files, monkeypatch):
    """As ComfyUI's own fp8 product without an ``input_scale``: the scale is 1.0."""
    path = scaled(files, "loud", {r"blocks\.0\.ffn\.0\.weight": 3000, r"blocks\.0\.ffn\.2\.weight": 1 / 1000})
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    plain = load(comfy, path, "fp8_e4m3fn", "fp8")
    assert checked(comfy, plain)[0] == []
    monkeypatch.setattr(fp8, "activation_scale", lambda rows, *how: torch.ones(()))
    event = found(comfy, plain)
    assert event.from_mode == "fp8" and "do not fit the file's scale" in event.advice and "blocks.0" in event.evidence


def test_a_coarse_attention_kernel_of_another_pack(comfy, files):
    plain = load(comfy, files("wan"), "bf16", "bf16")
    assert checked(comfy, plain)[0] == []
    event = found(comfy, with_attention(plain, int8_attention))
    assert event.layer in ("blocks.1", "head") and "blocks.1" in event.evidence and "attention kernels" in event.advice


def test_a_kernel_of_comfy_kitchen_that_is_finite_and_wrong(comfy, files, monkeypatch):
    """As its RoPE for Blackwell, which model code in fp32 calls as well."""
    registry = core("comfy_kitchen.registry").registry
    plain = load(comfy, files("wan"), "bf16", "bf16")
    wrong = SimpleNamespace(apply_rope1=lambda x, freqs_cis: x.clone())
    monkeypatch.setitem(registry._backends, "wrong", wrong)
    monkeypatch.setitem(registry._capabilities, "wrong", {"apply_rope1"})
    monkeypatch.setitem(registry._constraints, ("wrong", "apply_rope1"), registry._constraints["eager", "apply_rope1"])
    monkeypatch.setattr(registry, "_priority", ["wrong", *registry._priority])
    event = found(comfy, plain)
    assert "blocks.0" in event.evidence and "kernel" in event.advice


def test_positions_made_in_the_models_dtype(comfy, files):
    """ComfyUI's Wan makes its positions in the dtype of the values between layers, where bf16 holds no odd number past 256."""
    far = {"rope_options": {"shift_x": 2001.0, "shift_y": 2001.0}}
    plain = load(comfy, files("wan"), "bf16", "bf16")
    shifted = inside(plain, lambda run, args, kwargs: run(*args[:5], {**args[5], **far}, *args[6:], **kwargs))
    assert found(comfy, shifted).layer == "rope_embedder"


def hooked(size):
    """A conditioning whose LoRA is on in all steps."""
    hooks = core("comfy.hooks")
    group = hooks.create_hook_lora(model_files.lora(LAYERS, size=size, seed=7), 1.0, 0.0)
    return hooks.set_conds_props([families.conditioning("wan")], 1.0, "default", hooks=group)[0]


def test_a_lora_of_a_hook_on_a_layer_with_another_lora_is_no_drift(comfy, files):
    plain = load_lora_for_models(
        load(comfy, files("wan"), "fp16", "fp16"), None, model_files.lora(LAYERS, size=0.1), 1.0, 0.0
    )[0]
    events, (check,) = checked(comfy, plain, cond=hooked(0.1))
    assert events == [] and check.snr_db > 48


@pytest.mark.parametrize("kind", ["residual", "attention"])
def test_a_model_that_the_guard_has_widened_is_compared_as_it_runs(comfy, files, kind):
    plain = load(comfy, scaled(files, f"widened_{kind}", families.OVERFLOWS["wan"][kind]), "fp16", "fp16")
    families.sample(guarded(comfy, plain), "wan", steps=1)
    events, (check,) = checked(comfy, plain)
    assert events == [] and check.left_out == ""


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
    assert event.from_mode == "int8" and "dequantizes this block" in event.advice


def test_a_step_cache_gone_stale(comfy, files):
    easy = core("comfy_extras.nodes_easycache").EasyCacheNode
    plain = load(comfy, files("wan"), "bf16", "bf16")
    assert checked(comfy, easy.execute(plain, 0.2, 0.1, 0.95, False).args[0], "every 5th step", 12)[0] == []
    event = found(comfy, easy.execute(plain, 1000.0, 0.1, 0.95, False).args[0], check="every 5th step", steps=12)
    assert event.op == "step cache" and event.layer == ""


def noisy_attention(function, q, k, v, heads, *args, **kwargs):
    """An attention kernel of 16 bit with noise in its result."""
    result = function(q, k, v, heads, *args, **kwargs)
    noise = torch.randn(result.shape, generator=torch.Generator().manual_seed(3)).to(result)
    return result if v.dtype == torch.float32 else result + 0.5 * result.std() * noise


@pytest.mark.parametrize(("family", "noisy"), the_rest_before_a_release(all_of(RARE, [True]), all_of(RARE, [False])))
def test_models_that_predict_something_else_than_the_noise(comfy, models_dir, family, noisy):
    """EDM, v, flow and x0. CogVideoX' input is as large as its result at the first step. `test_drift_clean.py` has clean runs of them each time."""
    path = rare_families.write(family, models_dir / "diffusion_models" / f"checked_{family}.safetensors")
    plain = load(comfy, path, "bf16", "bf16")
    steps = ([5] if family == "cogvideox" else [0, 5]) if noisy else []
    one = with_attention(plain, noisy_attention) if noisy else plain
    model = guarded(comfy, one, check="every 5th step")
    rare_families.sample(model, family, steps=6)
    report = report_of(model)
    assert [check.step for check in report.checks] == [0, 5] and not any(check.left_out for check in report.checks)
    assert [event.step for event in report.events] == steps and all(
        event.layer and event.kind == "drift" for event in report.events
    )


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_finite_call_that_is_nan_in_fp32_names_the_weight(comfy, models_dir, dtype):
    """torch's attention with a key that is Inf is finite in 16 bit, and NaN in fp32."""
    plain = load(comfy, plants.write("sd15", models_dir / "diffusion_models"), dtype, dtype)
    fused = core("comfy.ldm.modules.attention").attention_pytorch
    plain = with_attention(plain, lambda function, *args, **kwargs: fused(*args, **kwargs))
    name = "middle_block.1.transformer_blocks.0.attn1.to_k"
    plain.model.diffusion_model.get_submodule(name).weight.data.view(-1)[0] = torch.inf
    model = guarded(comfy, plain, check="first step")
    assert torch.isfinite(plants.sample(model, "sd15")).all()
    report = report_of(model)
    (event,), (check,) = report.events, report.checks
    assert (report.verdict, event.kind, event.layer, event.ended) == ("bad_weights", "weights", name, False)
    assert "finite, but NaN or Inf in fp32" in event.evidence and "see the events" in check.left_out


def test_code_that_is_nan_in_fp32_alone_is_an_event_that_names_its_block(comfy, files):
    plain = load(comfy, files("wan"), "fp16", "fp16")
    block = plain.model.diffusion_model.blocks[1]
    handle = block.register_forward_hook(
        lambda module, args, result: result * torch.nan if result.dtype == torch.float32 else result
    )
    try:
        event = found(comfy, plain)
    finally:
        handle.remove()
    assert (event.kind, event.layer) == ("drift", "blocks.1") and "finite, but NaN or Inf in fp32" in event.evidence


@pytest.mark.parametrize("cached", [False, True])
def test_one_fault_in_the_fp32_call_of_a_check_is_the_devices(comfy, files, cached):
    plain = load(comfy, files("wan"), "fp16", "fp16")
    plain = EasyCacheNode.execute(plain, 3.0, 0.0, 1.0, False).args[0] if cached else plain
    expected = families.sample(plain, "wan", steps=6)
    model = guarded(comfy, inside(plain, nan_at(2)), check="first step")
    assert torch.equal(families.sample(model, "wan", steps=6), expected)
    report = report_of(model)
    (event,) = report.events
    assert report.verdict == "device_fault" and (event.from_mode, event.to_mode, event.recovered) == (
        "fp32",
        "fp32",
        True,
    )
    assert report.extra_calls == report.checks[0].repeats == 2


def test_the_fp32_call_of_a_check_unpacks_by_general_operations_and_no_other_call(comfy, wan, monkeypatch):
    """As a device has a kernel of its own: which one unpacks is looked up once, in the check anew."""
    name, ran = "dequantize_int8_convrot_weight_dtype", []

    def kernel(*args):
        ran.append(registry.get_capable_backend(name))
        return getattr(eager, name)(*args)

    monkeypatch.setattr(kernels, "_unpacking", {})
    monkeypatch.setattr(registry, "_priority", ["device", *registry._priority])
    monkeypatch.setitem(registry._backends, "device", SimpleNamespace(**{name: kernel}))
    monkeypatch.setitem(registry._capabilities, "device", {name})
    plain, in_fp32 = (load(comfy, wan, "int8", compute) for compute in ("auto", "fp32"))
    for _ in range(2):
        assert checked(comfy, plain)[1][0].snr_db > 30 and "eager" not in ran
        ran.clear()
        families.sample(in_fp32, "wan", steps=1)
        assert len(ran) > 10, "what the check looked up is not kept"
