"""How a model's products are summed, in a real ComfyUI: set inside its calls, exactly as before outside of them."""

import contextlib
import json
import os
import threading
from pathlib import Path

import pytest
import torch
from support import families, model_files, tiny_models
from support.denoise import transformer_options
from support.families import load, report, with_compute

from halfsafe.nodes.host import fast_sums
from halfsafe.nodes.host.accumulation import KEY, accumulation_of
from halfsafe.precision import flags
from halfsafe.precision.accumulation import PARTS
from halfsafe.precision.partial_sums import FLAG
from halfsafe.precision.quantize import relative_error

RESULTS = Path(__file__).absolute().parents[2] / "benchmarks" / "results" / "flags.json"
WRITE = "HALFSAFE_WRITE_RESULTS"
SETTINGS = ("fp16_accumulation", "reduced_precision_reduction", "tf32", "fp8_fast_accumulation", "attention")
OVERRIDE = "optimized_attention_override"


def accumulation(comfy, model, **wanted):
    return comfy.run("HalfsafeAccumulation", model=model, **{**dict.fromkeys(SETTINGS, "unchanged"), **wanted})[0]


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "summed.safetensors")


@pytest.fixture(scope="module")
def call(comfy, wan):
    return families.capture(load(comfy, wan), "wan")


@pytest.fixture(scope="module")
def base(comfy, wan):
    return load(comfy, wan, "fp16", "fp16")


@pytest.fixture(scope="module")
def another(comfy, wan):
    return load(comfy, wan, "fp16", "fp16")


@pytest.fixture(autouse=True)
def as_before():
    before = states()
    yield
    assert states() == before


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")


def states():
    return {name: flags.state_of(name) for name in flags.SETTINGS}


def spied(model, action):
    """A clone that runs ``action`` inside of the model's call, in the place of the diffusion model."""
    from comfy.patcher_extension import WrappersMP

    clone = model.clone()

    def run(executor, x, *args, **kwargs):
        action()
        return executor(x, *args, **kwargs)

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "spy", run)
    return clone


def raising(error):
    def action():
        raise error

    return action


# --- each flag in each situation --------------------------------------------------------------------------------------


@contextlib.contextmanager
def started_with(names, value):
    """ComfyUI as started with these flags, as its own --fast does: written, not scoped."""
    before = states()
    try:
        for name in names:
            flags.SETTINGS[name].write(value)
        yield states()
    finally:
        for name in names:
            flags.SETTINGS[name].write(before[name])


def succeed(comfy, model, another, call, look):
    families.replay(spied(model, look), call)


def fail_with(error):
    def situation(comfy, model, another, call, look):
        with pytest.raises(type(error)):
            families.replay(spied(spied(model, look), raising(error)), call)

    return situation


def interrupt(comfy, model, another, call, look):
    from comfy.model_management import InterruptProcessingException

    fail_with(InterruptProcessingException())(comfy, model, another, call, look)


def run_from_a_cached_node(comfy, model, another, call, look):
    for _ in range(2):
        families.replay(spied(model, look), call)


def opposite(comfy, model, another):
    request = accumulation_of(model).request
    return accumulation(comfy, another, **{n: {"on": "off", "off": "on"}.get(getattr(request, n), "unchanged") for n in SETTINGS[:3]})


def nest(comfy, model, another, call, look):
    """The model runs inside of another model's call, with the settings the other way round."""
    outer, seen = opposite(comfy, model, another), []

    def inner():
        seen.append(states())
        families.replay(spied(model, look), call)
        seen.append(states())

    families.replay(spied(outer, inner), call)
    held = accumulation_of(outer).plan_for(outer).flags
    assert seen[0] == seen[1] and all(flags.SETTINGS[name].is_on(seen[1][name]) is value for name, value in held.items())


def run_on_threads(comfy, model, another, call, look):
    """The same wrapper on two models side by side, as on two GPUs."""
    import comfy.model_management
    from comfy.patcher_extension import WrappersMP

    gate, results = threading.Barrier(2, timeout=30), []

    def inside():
        gate.wait()
        look()
        gate.wait()

    twin = another.clone()
    twin.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, accumulation_of(model))
    both = [spied(patcher, inside) for patcher in (model, twin)]
    comfy.model_management.load_models_gpu(both)
    for patcher in both:
        patcher.pre_run()
    threads = [threading.Thread(target=lambda p=patcher: results.append(apply(p, call))) for patcher in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for patcher in both:
        patcher.cleanup()
    assert len(results) == 2


def apply(patcher, call):
    names = ("t", "c_concat", "c_crossattn", "control")
    arguments = {**dict(zip(names, call.args[1:], strict=False)), **call.kwargs}
    arguments["transformer_options"] = {**families.call_options(call), **transformer_options(patcher)}
    with torch.inference_mode():
        return patcher.model.apply_model(call.args[0], **arguments)


def alternate_with_another_model(comfy, model, another, call, look):
    other, before, inside = opposite(comfy, model, another), states(), []
    for _ in range(2):
        families.replay(spied(model, look), call)
        families.replay(spied(other, lambda: inside.append(states())), call)
        assert states() == before
    held = accumulation_of(other).plan_for(other).flags
    assert all(flags.SETTINGS[name].is_on(state[name]) is value for state in inside for name, value in held.items())


SITUATIONS = {
    "success": succeed,
    "error": fail_with(ValueError("broken")),
    "interrupt": interrupt,
    "out of memory": fail_with(torch.OutOfMemoryError("no memory")),
    "cached node": run_from_a_cached_node,
    "two models": alternate_with_another_model,
    "nested": nest,
    "threads": run_on_threads,
}
ROWS = {}


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    if os.environ.get(WRITE):
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "device": "cpu", "rows": ROWS}, indent=1) + "\n")


@pytest.mark.parametrize("start", [False, True], ids=["off outside", "on outside"])
@pytest.mark.parametrize("value", ["on", "off"])
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize("setting", SETTINGS[:3])
def test_set_inside_and_exactly_as_before_outside(comfy, base, another, call, ampere, setting, situation, value, start):
    with started_with(PARTS[setting], start) as before:
        inside = []
        model = accumulation(comfy, base, **{setting: value})
        assert states() == before, "the node itself changed a flag"
        SITUATIONS[situation](comfy, model, another, call, lambda: inside.append(states()))
        restored = states() == before
    on = [flags.SETTINGS[part].is_on(state[part]) for state in inside for part in PARTS[setting]]
    row = {"set": set(on) == {value == "on"}, "restored": restored}
    ROWS.setdefault(setting, {}).setdefault(situation, {})[f"{value}, {'on' if start else 'off'} outside"] = row
    assert row == {"set": True, "restored": True}
    pairs = [state[part] for state in inside for part in PARTS[setting] if isinstance(state[part], tuple)]
    assert all(pair == (value == "on",) * 2 for pair in pairs), "the split-k half was left out"


def test_the_sampler_the_text_encoder_and_the_vae_see_the_outside(comfy, wan, models_dir, monkeypatch):
    import comfy.sd
    import comfy.utils
    from comfy.patcher_extension import WrappersMP

    tiny_models.sd_vae(models_dir / "vae" / "vae.safetensors")
    tiny_models.clip_l(models_dir / "text_encoders" / "clip.safetensors")
    vae = comfy.sd.VAE(sd=comfy.utils.load_torch_file(str(models_dir / "vae" / "vae.safetensors")))
    clip = comfy.sd.load_clip([str(models_dir / "text_encoders" / "clip.safetensors")], clip_type=comfy.sd.CLIPType.SD3)
    seen = {}

    def noted(name, function):
        def run(*args, **kwargs):
            seen[name] = states()
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(vae.first_stage_model, "decode", noted("vae", vae.first_stage_model.decode))
    encoder = clip.cond_stage_model
    monkeypatch.setattr(encoder, "encode_token_weights", noted("text", encoder.encode_token_weights))
    with started_with([FLAG], True) as before:
        model = accumulation(comfy, load(comfy, wan), fp16_accumulation="off", tf32="on")
        model = spied(model, lambda: seen.update(model=states()))
        model.add_wrapper_with_key(WrappersMP.PREDICT_NOISE, "spy", lambda run, *a, **k: noted("sampler", run)(*a, **k))
        families.sample(model, "wan", steps=1)
        clip.encode_from_tokens(clip.tokenize("a lighthouse"))
        vae.decode(torch.zeros(1, 4, 8, 8))
    assert seen["sampler"] == seen["text"] == seen["vae"] == before
    assert seen["model"][FLAG] is False and flags.SETTINGS["tf32_matmul"].is_on(seen["model"]["tf32_matmul"])


# --- layer by layer ---------------------------------------------------------------------------------------------------


class Products(torch.overrides.TorchFunctionMode):
    """Each Linear product in fp16: its weight's shape and whether the flag was on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and args[0].dtype == torch.float16:
            self.seen.append((tuple(args[1].shape), flags.is_on(FLAG)))
        return func(*args, **(kwargs or {}))


def products(model, call, **changes):
    with Products() as mode:
        result = families.replay(model, call, **changes)
    return mode.seen, result


def loud(comfy, wan, factors):
    path = families.write_scaled(wan, wan.with_name("loud.safetensors"), factors)
    return load(comfy, path, "fp16", "fp16")


def test_proven_layers_sum_in_fp16_and_the_others_in_fp32(comfy, wan, call, ampere):
    model = loud(comfy, wan, {r"blocks\.0\.ffn\.0\.weight": 3e4, r"blocks\.1\.ffn\.0\.weight": 4e3})
    ours = accumulation(comfy, model, fp16_accumulation="auto")
    first, _ = products(ours, call)
    later, _ = products(ours, call)
    assert first and not any(on for _, on in first), "the first call is the measurement"
    layers = {layer["name"]: layer for layer in report(comfy, ours)["layers"]}
    assert layers["blocks.0.ffn.0"]["accumulation"] == "fp32"
    assert layers["blocks.0.ffn.0"]["reason"].startswith("fp32 sums: bound")
    assert "scaled by 2^-" in layers["blocks.1.ffn.0"]["reason"]
    assert layers["blocks.1.ffn.0"]["accumulation"] == "fp16" and layers["blocks.1.ffn.0"]["mode"] == "fp16_acc16"
    proven = [layer for layer in layers.values() if layer["accumulation"] == "fp16"]
    assert sum(on for _, on in later) == len(proven) and len(later) > len(proven)
    flag = report(comfy, ours)["flags"][FLAG]
    assert (flag["requested"], flag["in_scope"], flag["outside"]) == ("auto", True, False)
    assert f"{len(proven)} of {len(later)} fp16 layers are proven" in flag["reason"]


def test_the_result_is_that_of_the_plain_model(comfy, wan, call, ampere):
    model = load(comfy, wan, "fp16", "fp16")
    plain = families.replay(model, call)
    ours = accumulation(comfy, model, fp16_accumulation="auto", attention="auto", reduced_precision_reduction="off")
    for _ in range(2):
        assert torch.equal(families.replay(ours, call), plain)
    scaled = loud(comfy, wan, {r"blocks\.1\.self_attn\.v\.weight": 4e3})
    plain, ours = families.replay(scaled, call), accumulation(comfy, scaled, fp16_accumulation="auto")
    for _ in range(2):
        assert relative_error(plain, families.replay(ours, call)) < 2e-3
    assert torch.equal(families.replay(scaled, call), plain), "the model that came in was changed"


def test_a_lora_is_part_of_the_weight_that_is_proven(comfy, wan, call, ampere):
    import comfy.sd

    model = accumulation(comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto")
    families.replay(model, call)
    tensors = model_files.lora({"blocks.0.ffn.0": (1024, 256)}, size=100.0)
    patched = comfy.sd.load_lora_for_models(model, None, dict(tensors), 1.0, 0.0)[0]
    for name, accumulates in ((model, "fp16"), (patched, "fp32"), (model, "fp16")):
        families.replay(name, call)
        layers = {layer["name"]: layer for layer in report(comfy, name)["layers"]}
        assert layers["blocks.0.ffn.0"]["accumulation"] == accumulates
        assert layers["blocks.1.ffn.0"]["accumulation"] == "fp16"


def test_a_louder_step_is_repeated_without_the_layers_it_disproves(comfy, wan, call, ampere):
    ours = accumulation(comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto")
    context = {name: value * 4000 for name, value in call.kwargs.items() if name == "c_crossattn"}
    for _ in range(2):
        families.replay(ours, call)
    run = accumulation_of(ours).run_on(ours.model)
    assert run.ranges.repeats == 0
    x = call.args[0] * 3000
    seen, _ = products(ours, call, x=x, **context)
    half = len(seen) // 2
    assert run.ranges.repeats == 1 and not any(on for _, on in seen[half:])


def test_on_is_obeyed_and_names_what_is_not_proven(comfy, wan, call, ampere):
    model = loud(comfy, wan, {r"blocks\.0\.ffn\.0\.weight": 3e4})
    ours = accumulation(comfy, model, fp16_accumulation="on")
    for _ in range(2):
        seen, _ = products(ours, call)
        assert seen and all(on for _, on in seen)
    found = report(comfy, ours)
    assert any("not proven safe in" in note and "blocks.0.ffn.0" in note for note in found["notes"])
    layers = {layer["name"]: layer for layer in found["layers"]}
    assert layers["blocks.0.ffn.0"]["accumulation"] == "fp16"
    assert layers["blocks.0.ffn.0"]["reason"].startswith("fp16 sums as asked, not proven: bound")


@pytest.mark.parametrize("order", ["compute first", "compute last"])
def test_a_rule_that_makes_a_layer_fp16_is_bounded_in_fp16(comfy, wan, call, ampere, order):
    from halfsafe.precision.rules import rules_from

    rules, model = rules_from("blocks.0.ffn.* compute=fp16"), load(comfy, wan, "as_file", "bf16")
    if order == "compute first":
        ours = accumulation(comfy, with_compute(comfy, model, "bf16", rules), fp16_accumulation="auto")
    else:
        ours = with_compute(comfy, accumulation(comfy, model, fp16_accumulation="auto"), "bf16", rules)
    plain = families.replay(with_compute(comfy, model, "bf16", rules), call)
    for expected in (False, True, True):
        seen, result = products(ours, call)
        assert [on for _, on in seen] == [expected] * 2
        assert torch.equal(result, plain)


def test_fp16_safe_has_fp32_results_and_says_so(comfy, wan, call, ampere):
    model = load(comfy, wan, "as_file", "fp16_safe")
    ours = accumulation(comfy, model, fp16_accumulation="auto", attention="auto")
    assert torch.equal(families.replay(ours, call), families.replay(model, call))
    found = report(comfy, ours)
    assert any(e["setting"] == "fp16_accumulation=auto" and "fp32 results" in e["reason"] for e in found["without_effect"])
    assert found["flags"][FLAG]["in_scope"] is False


def test_two_gpus_at_once_never_switch_layer_by_layer(comfy, wan, call, ampere):
    model = accumulation(comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="auto", attention="auto")
    families.replay(model, call)
    held, release = threading.Event(), threading.Event()

    def other():
        with flags.flags_set({FLAG: False}):
            held.set()
            release.wait()

    thread = threading.Thread(target=other)
    thread.start()
    held.wait()
    try:
        seen, _ = products(model, call)
    finally:
        release.set()
        thread.join()
    assert seen and not any(on for _, on in seen)
    assert any(on for _, on in products(model, call)[0])


@pytest.mark.parametrize("quiet", [True, False])
def test_under_torch_compile_all_or_none(comfy, wan, call, ampere, quiet):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    factors = {} if quiet else {r"blocks\.0\.ffn\.0\.weight": 3e4}
    model = accumulation(comfy, loud(comfy, wan, factors), fp16_accumulation="auto", attention="auto")
    set_torch_compile_wrapper(model, backend="eager")
    inside = []
    model = spied(model, lambda: inside.append(flags.is_on(FLAG)))
    for _ in range(3):
        families.replay(model, call)
    assert inside == [False, quiet, quiet]
    reason = report(comfy, model)["flags"][FLAG]["reason"]
    assert "cannot be switched layer by layer" in reason and reason.endswith("on for all." if quiet else "off.")


# --- what cannot act --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("profile", "compute", "setting", "value", "why"),
    [
        ("sm_86", "bf16", FLAG, "on", "acts on fp16 products only"),
        ("sm_86", "fp32", FLAG, "auto", "acts on fp16 products only"),
        ("sm_90", "fp16", FLAG, "auto", "risk without gain"),
        ("gfx1100", "fp16", FLAG, "on", "NVIDIA"),
        ("mps_m1", "fp16", FLAG, "auto", "NVIDIA"),
        ("xpu", "fp16", FLAG, "on", "NVIDIA"),
        ("cpu", "fp16", FLAG, "auto", "NVIDIA"),
        ("sm_75", "fp32", "tf32", "on", "does not have it"),
        ("sm_86", "bf16", "tf32", "on", "no layer multiplies in fp32"),
        ("sm_89", "bf16", "fp8_fast_accumulation", "on", "no layer multiplies in fp8"),
        ("sm_86", "bf16", "fp8_fast_accumulation", "auto", ""),
        ("sm_86", "bf16", "attention", "fp32", "attention runs in fp16 nowhere"),
    ],
)
def test_a_setting_that_cannot_act_says_why(comfy, wan, call, monkeypatch, profile, compute, setting, value, why):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", profile)
    ours = accumulation(comfy, load(comfy, wan, "as_file", compute), **{setting: value})
    for _ in range(2):
        found = report(comfy, ours)
        reasons = [e["reason"] for e in found["without_effect"] if e["setting"] == f"{setting}={value}"]
        assert len(reasons) == 1 and why in reasons[0]
        assert reasons[0][:80] in " ".join(comfy.run("HalfsafeReport", model=ours)[0].split())
        families.replay(ours, call)


def test_a_flag_this_torch_lacks_is_reported(comfy, wan, call, monkeypatch, ampere):
    def absent():
        raise AttributeError("allow_fp16_accumulation")

    setting = flags.FlagSetting(FLAG, absent, lambda value: pytest.fail("written"), bool)
    monkeypatch.setitem(flags.SETTINGS, FLAG, setting)
    ours = accumulation(comfy, load(comfy, wan, "fp16", "fp16"), fp16_accumulation="on")
    families.replay(ours, call)
    assert any("has no fp16 accumulation flag" in e["reason"] for e in report(comfy, ours)["without_effect"])
    monkeypatch.undo()


def test_unchanged_adds_nothing(comfy, wan):
    model = load(comfy, wan)
    ours = accumulation(comfy, model)
    assert ours is not model and ours.wrappers == model.wrappers and ours.attachments.keys() == model.attachments.keys()
    assert report(comfy, ours)["flags"] == report(comfy, model)["flags"]
    accumulation(comfy, model, tf32="on")
    assert KEY not in model.attachments and not any(KEY in wrappers for wrappers in model.wrappers.values())
