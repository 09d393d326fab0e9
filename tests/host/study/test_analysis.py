"""The analysis in the real ComfyUI: its choice holds, its rules give the loader that choice, the model is left alone."""

import comfy.ops
import pytest
import torch
from halfsafe.nodes.host.comfyui.layer_forward import LayerForward
from halfsafe.nodes.host.load.devices import current_device
from halfsafe.nodes.host.study import analysis as host
from halfsafe.nodes.host.study.sampling import Inputs, sample
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.base.patching import patched
from halfsafe.precision.plan.rules import rules_from
from halfsafe.precision.study.candidates import Candidate
from halfsafe.precision.study.sensitivity import BARRED, CHOSEN, KEPT, MAX_TRIALS
from support import families, tiny_models
from support.measures import sqnr_db
from support.model_files import changed, lora

NODE = "HalfsafeAnalyzeLayers"
OUTLIERS = {"blocks.1.ffn.2", "blocks.2.ffn.2", "blocks.2.ffn.0"}
OUTLIER = 2.0**16
pytestmark = pytest.mark.usefixtures("one_thread")
unruled = pytest.mark.not_as_on_cuda(
    "other tests here run each candidate under CUDA's rules, at two to three times the time"
)


def plant_outliers(tensors: dict) -> None:
    """Columns so large that fp8 has nothing left for the others, met by inputs so small that the function stays."""
    for layer in ("blocks.1.ffn", "blocks.2.ffn"):
        tensors[f"{layer}.2.weight"][:, :4] *= OUTLIER
        tensors[f"{layer}.0.weight"][:4] /= OUTLIER
        tensors[f"{layer}.0.bias"][:4] /= OUTLIER
    tensors["blocks.2.ffn.0.weight"][100] *= OUTLIER
    tensors["blocks.2.ffn.2.weight"][:, 100] /= OUTLIER


@pytest.fixture(scope="module")
def wan(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "analysis.safetensors", dim=128, blocks=4, ffn=512)


@pytest.fixture(scope="module")
def planted(wan):
    return changed(wan, wan.with_name("planted.safetensors"), plant_outliers, {"format": "pt"})


@pytest.fixture(scope="module")
def overflowing(wan):
    return families.write_scaled(wan, wan.with_name("overflowing.safetensors"), families.OVERFLOWS["wan"]["ffn"])


def latent(model) -> dict:
    return {"samples": torch.zeros_like(families.noise(model))}


def analyzed(comfy, model, family="wan", target=25.0, candidate="fp8_e4m3fn", pin=True, **inputs):
    """The analysis behind the node, and the node's outputs: rules, text and chart."""
    found, analyze_model = [], host.analyze_model

    def spy(*args):
        found.append(analyze_model(*args))
        return found[0]

    inputs = {"latent_image": latent(model), "positive": families.conditioning(family), "seed": 1, **inputs}
    options = {"candidate": candidate, "target_snr_db": target, "sensitive_layers": "keep high" if pin else "measure"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "analyze_model", spy)
        outputs = comfy.run(NODE, model=model, **options, **inputs)
    return found[0], *outputs


def final_snr(reference, model, family="wan") -> float:
    """The SNR of the latent that the analysis's run of the sampler ends with, each model left to itself."""
    ends = [
        sample(one, Inputs(families.conditioning(family), None, latent(one), 1), host.STEPS)[0]
        for one in (reference, model)
    ]
    return sqnr_db(*ends)


def stored_in_fp8(comfy, model) -> set[str]:
    return {layer["name"] for layer in families.report(comfy, model)["layers"] if layer["storage"].startswith("fp8")}


def names_of(layers) -> set[str]:
    return {layer.name for layer in layers}


@pytest.mark.parametrize(
    ("family", "target"),
    [("wan", 25.0), pytest.param("wan", 39.0, marks=pytest.mark.release), ("flux", 40.0), ("sdxl", 30.0)],
)
def test_the_loader_with_the_rules_gives_what_was_measured(comfy, models_dir, family, target):
    path = families.write_narrow(family, models_dir / "diffusion_models")
    model = families.load(comfy, path, "as_file", "fp32")
    found, rules, text, chart = analyzed(comfy, model, family, target)
    assert found.chosen and found.snr_db >= target and found.steps <= host.STEPS * (1 + MAX_TRIALS)
    assert rules_from(text) == rules and chart.shape[-1] == 3
    loaded = families.load(comfy, path, "fp8_e4m3fn", "fp32", rules)
    assert stored_in_fp8(comfy, loaded) == names_of(found.chosen)
    assert final_snr(model, loaded, family) == pytest.approx(found.snr_db, abs=0.05)
    assert all(
        layer.status == BARRED and "classes other than" in layer.reason
        for layer in found.layers
        if layer.cls.startswith("Conv")
    )


@pytest.mark.parametrize(("compute", "products"), [("fp32", False), ("auto", True)])
def test_int8_is_measured_as_the_loader_with_the_rules_multiplies(comfy, planted, compute, products):
    model = families.load(comfy, planted, "as_file", compute)
    found, rules, text, _ = analyzed(comfy, model, target=38.0, candidate="int8")
    assert found.candidate.products == products and ("products in int8" in text) == products
    assert found.chosen and found.snr_db >= 38 and rules_from(text) == rules
    loaded = families.load(comfy, planted, "int8", compute, rules)
    layers = {layer["name"]: layer for layer in families.report(comfy, loaded)["layers"]}
    assert {name for name, layer in layers.items() if layer["storage"] == "int8"} == names_of(found.chosen)
    assert {layers[name]["mode"] for name in names_of(found.chosen)} == {"int8" if products else "fp32"}
    assert final_snr(model, loaded) == pytest.approx(found.snr_db, abs=0.3 if products else 0.05)


@unruled
def test_more_layers_with_less_error_than_the_preset_where_outliers_are_planted(comfy, planted):
    model = families.load(comfy, planted, "as_file", "fp32")
    preset = families.load(comfy, planted, "fp8_e4m3fn", "fp32", rules_from())
    preset_layers, preset_db = stored_in_fp8(comfy, preset), final_snr(model, preset)
    pinned, *_ = analyzed(comfy, model, target=preset_db + 8)
    assert pinned.all_db == pytest.approx(preset_db, abs=0.05) and pinned.all_count == len(preset_layers) == 40
    assert names_of(pinned.named(KEPT)) <= OUTLIERS and pinned.snr_db >= preset_db + 8
    free, rules, *_ = analyzed(comfy, model, target=preset_db + 1, pin=False)
    loaded = families.load(comfy, planted, "fp8_e4m3fn", "fp32", rules)
    assert final_snr(model, loaded) == pytest.approx(free.snr_db, abs=0.05)
    assert len(stored_in_fp8(comfy, loaded)) == len(free.chosen) > len(preset_layers) and free.snr_db > preset_db


@pytest.mark.parametrize(("candidate", "target"), [("fp16", 77.0), ("bf16", 60.0)])
def test_compute_dtype_with_the_rules_gives_what_was_measured(comfy, wan, candidate, target):
    model = families.load(comfy, wan, "as_file", "fp32")
    found, rules, *_ = analyzed(comfy, model, target=target, candidate=candidate)
    assert found.chosen and found.named(KEPT) and found.snr_db >= target
    assert final_snr(model, families.with_compute(comfy, model, "fp32", rules)) == pytest.approx(found.snr_db, abs=0.1)


@pytest.mark.parametrize("candidate", ["fp16", "fp16_acc16"])
def test_layers_that_overflow_fp16_are_not_chosen_whatever_guards_the_model(comfy, overflowing, candidate):
    loaded = families.load(comfy, overflowing, "as_file", "fp32")
    model = comfy.run("HalfsafeNaNGuard", model=loaded, on_nan="retry_higher", max_retries=8)[0]
    found, _, text, _ = analyzed(comfy, model, target=30.0, candidate=candidate)
    status = {layer.name: layer.status for layer in found.layers}
    assert status["blocks.0.ffn.2"] == KEPT and status["blocks.1.ffn.2"] == CHOSEN and found.snr_db >= 30
    guard = families.report(comfy, model)["guard"]
    assert "overflow" in text and guard["calls"] == 0 and not guard["events"]


@unruled
def test_a_model_that_gives_nan_is_refused_in_words(comfy, overflowing):
    with pytest.raises(HalfsafeError, match="before anything is changed"):
        analyzed(comfy, families.load(comfy, overflowing, "as_file", "fp16"))


@unruled
def test_convolutions_are_chosen_for_arithmetic(comfy, wan):
    found, *_ = analyzed(comfy, families.load(comfy, wan, "as_file", "fp32"), target=30.0, candidate="bf16", pin=False)
    assert found.layers[0].cls == "Conv3d" and found.layers[0].status == CHOSEN and 45 < found.layers[0].output_db < 65


def states(model) -> dict:
    return {name: dict(module.__dict__) for name, module in model.model.named_modules()}


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(
        a[name].keys() == b[name].keys()
        and all(a[name][key] is b[name][key] or a[name][key] == b[name][key] for key in a[name])
        for name in a
    )


@pytest.mark.parametrize(
    ("candidate", "stop_at"), [("fp8_e4m3fn", 0), ("fp16", 40), ("int8", 460), ("fp16_acc16", 700)]
)
def test_an_interrupt_leaves_nothing_on_the_model(comfy, planted, monkeypatch, candidate, stop_at):
    from comfy import model_management as management
    from comfy import ops

    model = families.load(comfy, planted, "as_file", "fp16_safe")
    call = families.capture(model, "wan")
    result = families.replay(model, call)
    before, wrappers = states(model), {kind: dict(values) for kind, values in model.wrappers.items()}
    real, count = ops.run_every_op, iter(range(10**6))

    def interrupt():
        if next(count) == stop_at:
            raise management.InterruptProcessingException
        real()

    monkeypatch.setattr(ops, "run_every_op", interrupt)
    with pytest.raises(management.InterruptProcessingException):
        analyzed(comfy, model, target=60.0, candidate=candidate)
    monkeypatch.undo()
    assert same(states(model), before)
    assert {kind: dict(values) for kind, values in model.wrappers.items()} == wrappers
    assert torch.equal(families.replay(model, call), result)


@unruled
def test_it_measures_the_model_with_its_lora(comfy, wan):
    from comfy.sd import load_lora_for_models

    def merged(tensors: dict) -> None:
        tensors["blocks.1.ffn.2.weight"] = tensors["blocks.1.ffn.2.weight"].float() + up @ down

    made = lora({"blocks.1.ffn.2": (128, 512)}, size=1e3)
    up, down = (made[f"diffusion_model.blocks.1.ffn.2.lora_{part}.weight"] for part in "BA")
    model = families.load(comfy, wan, "fp32", "fp32")
    patched, _ = load_lora_for_models(model, None, made, 1.0, 0)
    of_file = families.load(
        comfy, changed(wan, wan.with_name("merged.safetensors"), merged, {"format": "pt"}), "fp32", "fp32"
    )
    plain, with_lora, expected = (analyzed(comfy, one)[0].all_db for one in (model, patched, of_file))
    assert with_lora == pytest.approx(expected, abs=0.1) and abs(with_lora - plain) > 0.2


@unruled
def test_the_seed_the_prompts_and_the_latent_are_measured(comfy, wan):
    model = families.load(comfy, wan, "as_file", "fp32")
    first, again, other = (analyzed(comfy, model, seed=seed) for seed in (1, 1, 2))
    assert first[0].layers == again[0].layers and first[2] == again[2] and torch.equal(first[3], again[3])
    negative, *_ = analyzed(comfy, model, negative=families.conditioning("wan", seed=9))
    image, *_ = analyzed(comfy, model, latent_image={"samples": families.noise(model, seed=7)})
    assert len({first[0].all_db, other[0].all_db, negative.all_db, image.all_db}) == 4
    assert negative.steps == host.STEPS * (1 + negative.trials)


@unruled
def test_memory_stays_bounded(comfy, models_dir):
    """Beyond the weights, what torch allocates at one time is a few copies of the largest layer."""
    path = tiny_models.wan(models_dir / "diffusion_models" / "large.safetensors", dim=512, blocks=3, ffn=2048)
    model = families.load(comfy, path, "as_file", "fp32")
    families.capture(model, "wan")
    weights = sum(module.numel() * 4 for module in model.model.diffusion_model.parameters())
    largest = max(module.numel() * 4 for module in model.model.diffusion_model.parameters())
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        found, *_ = analyzed(comfy, model)
    held = peak = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    assert found.chosen and peak < 6 * largest < weights


def test_a_device_that_holds_no_fp8_says_so_before_a_call(comfy, wan, monkeypatch):
    """torch before 2.15 on Apple: "Trying to convert Float8_e4m3fn to the MPS backend but it does not have support"."""
    without = current_device().without("fp8_storage", "MPS has no fp8 tensors.")
    monkeypatch.setattr(host, "current_device", lambda: without)
    monkeypatch.setattr(host, "sample", lambda *_, **__: pytest.fail("called"))
    model = families.load(comfy, wan)
    with pytest.raises(
        HalfsafeError, match=r"Layers in fp8_e5m2 cannot be measured: not on .*MPS has no fp8 tensors\. .*int8"
    ):
        analyzed(comfy, model, candidate="fp8_e5m2")
    with pytest.raises(pytest.fail.Exception, match="called"):
        analyzed(comfy, model, candidate="int8")


def test_what_is_measured_and_tried_is_told_in_words(comfy, wan, monkeypatch):
    said = []
    monkeypatch.setattr(host, "show_progress", said.append)
    found, *_ = analyzed(comfy, families.load(comfy, wan, "as_file", "bf16"))
    layers = len(found.layers)
    assert said[: host.STEPS] == [
        f"step {step + 1} of 8 to 52: measuring {layers} layers" for step in range(host.STEPS)
    ]
    assert (
        len(said) == found.steps
        and said[-1] == f"step {found.steps} of 8 to 52: trying {found.all_count} of {layers} layers in fp8_e4m3fn"
    )


def test_a_lora_beside_a_layer_that_is_tried_in_int8_is_given_the_input_as_it_is():
    layer, given = comfy.ops.manual_cast.Linear(64, 64, bias=False, device="cpu", dtype=torch.float32), []
    layer.weight = torch.nn.Parameter(torch.eye(64), requires_grad=False)

    class Adds(torch.nn.Module):
        def forward(self, x, result):
            given.append(x)
            return result

    x = torch.randn(4, 64)
    with patched(host._change(layer, Candidate("int8"))), patched(LayerForward.on(layer).with_fields(adds=Adds())):
        assert not torch.equal(layer(x), x), "rounded in int8"
    assert torch.equal(*given, x)
