"""Code of other packs whose layers do not cast their weights, in a model whose values between layers are fp32.

Each is held against ComfyUI alone in fp32 with the same code, whose weights are the same in every dtype.
"""

from __future__ import annotations

import functools

import comfy.sd
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from halfsafe.nodes.host.compute.core_layers import PlannedLayers
from halfsafe.nodes.host.compute.per_model import runs_in
from halfsafe.nodes.host.guard import failure
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.nodes.host.load.controlnet import LoadedControl
from halfsafe.precision.base.errors import HalfsafeError
from halfsafe.precision.base.patching import patched
from halfsafe.precision.formats.layer_plan import LayerPlan
from halfsafe.precision.guard.rungs import Rung
from halfsafe.precision.plan.compute import ComputePlan
from halfsafe.precision.plan.rules import rules_from
from support import control_files, families, plants
from support.custom_nodes.foreign_layers import (
    ASKED,
    KINDS,
    UNET,
    Layers,
    beside,
    kernel_for_16_bit,
    kernel_of_one_dtype,
    kernel_that_asserts,
    with_other_norms,
    without_image,
)
from support.guarding import guarded, left_on, report_of
from support.measures import relative_error
from support.page_words import untranslated
from support.summing import accumulation

BOUND = 0.003
"""fp16_safe differs from fp32 by at most 0.0011 in these models without the code, and by 0.0013 with it."""
LOUD = {
    "sd15": {
        r"transformer_blocks\.0\.ff\.net\.0\.proj\.weight": 300,
        r"transformer_blocks\.0\.ff\.net\.2\.weight": 1e-4,
    },
    "flux": {r"double_blocks\.0\.img_mlp\.0\.weight": 1e5, r"double_blocks\.0\.img_mlp\.2\.weight": 1e-5},
}
"""What makes a product inside of the model overflow in fp16, and its result as large as before."""


@pytest.fixture(scope="module")
def files(models_dir):
    folder = models_dir / "diffusion_models"
    clean = {family: plants.write(family, folder) for family in LOUD}

    def get(family: str, loud: bool = False):
        target = folder / f"borders_{family}.safetensors"
        if loud and not target.exists():
            families.write_scaled(clean[family], target, LOUD[family], torch.float16)
        return target if loud else clean[family]

    return get


def sample(model, kind) -> torch.Tensor:
    return plants.sample(model, kind.family, steps=1)


@pytest.fixture(scope="module")
def expected(files):
    """(name, loud) -> ComfyUI's result in fp32 with that code in fp32."""
    models, made = {}, {}

    def get(name: str, loud: bool = False) -> torch.Tensor:
        kind = KINDS[name]
        if (name, loud) not in made:
            if (kind.family, loud) not in models:
                models[kind.family, loud] = families.stock(files(kind.family, loud), torch.float32)
            model = models[kind.family, loud]
            with_code = kind.on(model, torch.float32)
            made[name, loud] = sample(with_code, kind)
            kind.off(model)
            assert relative_error(made[name, loud], sample(model, kind)) > 0.03, "the code is seen in the picture"
        return made[name, loud]

    return get


@pytest.fixture
def turing(monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")


@pytest.fixture(scope="module")
def of_core(files):
    """ComfyUI's own model in fp16, as on an NVIDIA card."""
    loaded = {}

    def get(family: str, loud: bool = False):
        if (family, loud) not in loaded:
            model = comfy.sd.load_diffusion_model(str(files(family, loud)), model_options={"dtype": torch.float16})
            model.model.manual_cast_dtype = None
            loaded[family, loud] = model
        return loaded[family, loud]

    return get


@pytest.fixture(scope="module")
def ours(comfy, files):
    """(family, storage, compute, rules, loud) -> a model of our loader."""
    loaded = {}

    def get(family: str, storage: str = "fp16", compute: str = "fp16_safe", rules=None, loud: bool = False):
        key = family, storage, compute, rules, loud
        if key not in loaded:
            loaded[key] = families.load(comfy, files(family, loud), storage, compute, rules)
        return loaded[key]

    return get


@pytest.mark.parametrize("name", KINDS)
def test_code_in_any_dtype_runs_in_a_model_in_fp16_safe(name, expected, ours, turing):
    kind, found = KINDS[name], {}
    for dtype in (torch.float16, torch.bfloat16, ASKED):
        model = kind.on(ours(kind.family), dtype)
        found[dtype] = relative_error(expected(name), sample(model, kind))
        kind.off(model)
    assert max(found.values()) < BOUND, found
    without = sample(ours(kind.family), kind)
    assert relative_error(expected(name), without) > 0.03, "and is gone without the node of that pack"


def before(comfy, model, put):
    return families.with_compute(comfy, put(model), "fp16_safe")


def behind(comfy, model, put):
    return put(families.with_compute(comfy, model, "fp16_safe"))


def in_fp32(comfy, model, put):
    return put(families.with_compute(comfy, model, "fp32"))


def of_goal(comfy, model, put):
    return comfy.run("HalfsafeAutoPrecision", model=put(model), goal="quality", guard="off")[0]


def behind_goal(comfy, model, put):
    return put(comfy.run("HalfsafeAutoPrecision", model=model, goal="quality", guard="off")[0])


SOME = ("attn2 replaced", "motion modules", "forwards of blocks")


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    ("node", "dtype"),
    [(before, UNET), (behind, UNET), (behind, ASKED), (in_fp32, UNET), (of_goal, UNET), (behind_goal, ASKED)],
)
def test_code_runs_beside_a_node_that_chooses_fp32_values(comfy, name, node, dtype, expected, of_core, turing):
    kind = KINDS[name]
    model = node(comfy, of_core(kind.family), lambda model: kind.on(model, dtype))
    assert relative_error(expected(name), sample(model, kind)) < BOUND


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(
    ("dtype", "chosen"), [(torch.float32, "fp16"), (torch.bfloat16, "fp16"), (torch.float16, "bf16")]
)
def test_code_made_for_the_dtype_before_a_node_changes_it_runs_in_a_16_bit_model(
    comfy, name, dtype, chosen, expected, of_core, turing
):
    kind = KINDS[name]
    with_code = kind.on(families.with_compute(comfy, of_core(kind.family), "fp32"), dtype)
    model = families.with_compute(comfy, with_code, chosen)
    seen = []
    model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "seen", functools.partial(note_dtypes, seen))
    found = relative_error(expected(name), sample(model, kind))
    own = {"fp16": torch.float16, "bf16": torch.bfloat16}[chosen]
    kind.off(model)
    behind = kind.on(families.with_compute(comfy, of_core(kind.family), chosen), own)
    right = relative_error(expected(name), sample(behind, kind))
    kind.off(model)
    assert found < 1.2 * right, (found, right)
    assert {*seen} == {own}, "the values stay in 16 bit"


def test_code_beside_a_node_that_replaces_attention_crosses_the_border(comfy, expected, of_core, monkeypatch):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_89")
    kind = KINDS["forwards of blocks"]
    model = families.with_compute(comfy, kind.on(of_core(kind.family), UNET), "fp16_safe")
    summing = accumulation(comfy, model, attention="auto")
    assert relative_error(expected("forwards of blocks"), sample(summing, kind)) < BOUND


def note_dtypes(seen: list, executor, x, *args, **kwargs):
    result = executor(x, *args, **kwargs)
    seen.extend((x.dtype, result.dtype))
    return result


def test_a_model_in_the_dtype_it_was_loaded_in_has_no_border(comfy, of_core, turing):
    kind, given = KINDS["attn2 replaced"], []

    def note(executor, x, timesteps, context, y, control, options, **kwargs):
        given.extend(options["patches"]["attn2_output_patch"])
        return executor(x, timesteps, context, y, control, options, **kwargs)

    for compute in ("fp16", "bf16"):
        model = families.with_compute(comfy, on_attention(of_core(kind.family), kernel_for_16_bit), compute)
        model.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "note", note)
        sample(model, kind)
    assert [each is kernel_for_16_bit for each in given] == [True, False]


@pytest.mark.parametrize(
    ("node", "given"),
    [
        ("HalfsafeMeasurePrecisions", {"candidates": "as_file/fp16_safe"}),
        ("HalfsafeAnalyzeLayers", {"candidate": "fp16", "target_snr_db": 25.0}),
        ("HalfsafeCalibrate", {}),
    ],
)
def test_a_study_runs_a_model_with_such_code(comfy, node, given, of_core, turing):
    kind = KINDS["functions in place of blocks"]
    model = families.with_compute(comfy, kind.on(of_core(kind.family), UNET), "fp16_safe")
    latent = {"samples": families.noise(model)}
    comfy.run(node, model=model, positive=plants.conditioning(kind.family), latent_image=latent, seed=1, **given)


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize(("storage", "bound"), [("fp8_e4m3fn", 0.12), ("int8", 0.05)])
def test_code_runs_beside_quantized_layers(name, storage, bound, expected, ours, turing):
    kind = KINDS[name]
    plain = relative_error(sample(ours(kind.family), kind), sample(ours(kind.family, storage), kind))
    found = relative_error(expected(name), sample(kind.on(ours(kind.family, storage), UNET), kind))
    assert found < max(bound, 2 * plain), (found, plain)


def by_fallback(comfy, ours, family):
    return ours(family, compute="auto", loud=True)


def by_guard(comfy, ours, family):
    return guarded(comfy, ours(family, compute="fp16", loud=True))


def by_guard_of_auto(comfy, ours, family):
    return guarded(comfy, ours(family, compute="auto", loud=True))


def by_guard_in_fp32(comfy, ours, family):
    return guarded(comfy, ours(family, compute="fp16", loud=True))


@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("way", [by_fallback, by_guard, by_guard_of_auto, by_guard_in_fp32])
def test_code_runs_where_fp32_values_are_reached_by_a_failed_call(
    comfy, name, way, expected, ours, turing, monkeypatch
):
    kind = KINDS[name]
    if way is by_guard_in_fp32:
        monkeypatch.setattr(failure, "model_rungs", lambda plan, _: [Rung.in_fp32(plan)])
    plain = way(comfy, ours, kind.family)
    runs_in(plain.model).fallback = False
    runs_in(plain.model).wider.clear()
    model = kind.on(plain, UNET)
    for _ in range(2):
        assert relative_error(expected(name, True), sample(model, kind)) < BOUND
    in_use = Guard.on(model).states.kept()[0].plan
    assert runs_in(model.model).fallback or in_use.everywhere
    assert in_use.whole == (way is by_guard_in_fp32)


def test_a_check_compares_a_call_with_the_same_layers_in_fp32(comfy, ours, turing):
    kind = KINDS["torch's layers injected"]
    model = kind.on(guarded(comfy, ours(kind.family, compute="fp16"), check="first step"), UNET)
    sample(model, kind)
    assert report_of(model).checks[0].snr_db > 50 and not report_of(model).events


@pytest.mark.parametrize("name", KINDS)
def test_code_runs_beside_rules_that_make_a_part_of_the_values_fp32(name, expected, ours, turing):
    kind = KINDS[name]
    rules = rules_from("*.to_q stream=fp32\n*.ff.* stream=fp32\n*.img_attn.* stream=fp32\n*.img_mlp.* stream=fp32")
    model = kind.on(ours(kind.family, compute="fp16", rules=rules), UNET)
    found = relative_error(expected(name), sample(model, kind))
    kind.off(model)
    assert found < BOUND


def on_attention(model, patch):
    clone = model.clone()
    clone.set_model_attn2_output_patch(patch)
    return clone


@pytest.mark.parametrize(
    "kernel", [kernel_for_16_bit, kernel_that_asserts, kernel_of_one_dtype], ids=lambda kernel: kernel.__name__
)
def test_a_kernel_that_refuses_fp32_is_named_with_its_pack_and_what_to_choose(kernel, ours, of_core, turing):
    kind = KINDS["attn2 replaced"]
    assert torch.isfinite(sample(on_attention(of_core(kind.family), kernel), kind)).all(), "it runs in plain fp16"
    with pytest.raises(HalfsafeError) as refused:
        sample(on_attention(ours(kind.family), kernel), kind)
    problem, advice = refused.value.problem, refused.value.advice
    assert problem.startswith(f"patch {kernel.__name__} of foreign_layers stopped with ") and "fp16_safe" in problem
    assert "bf16" in advice and "auto" in advice and untranslated([advice]) == []


def test_a_kernel_that_refuses_a_changed_16_bit_dtype_is_named(comfy, of_core, turing):
    kind = KINDS["attn2 replaced"]
    model = families.with_compute(comfy, on_attention(of_core(kind.family), kernel_of_one_dtype), "bf16")
    with pytest.raises(HalfsafeError, match="patch kernel_of_one_dtype of foreign_layers stopped with "):
        sample(model, kind)


def test_another_error_of_a_pack_stays_as_it_is(ours, turing):
    kind = KINDS["attn2 replaced"]
    with pytest.raises(ValueError, match="^no image is connected$"):
        sample(on_attention(ours(kind.family), without_image), kind)


def test_nothing_of_a_border_stays_on_a_model(ours, turing):
    kind = KINDS["hooks"]
    model = ours(kind.family)
    sample(model, kind)
    families.unload_models()
    before, options = left_on(model.model), str(model.model_options)
    sample(kind.on(model, torch.float16), kind)
    families.unload_models()
    assert left_on(model.model) == before and str(model.model_options) == options
    block = model.model.diffusion_model.double_blocks[0].img_mlp
    assert not block._forward_hooks and model.model.manual_cast_dtype == torch.float32


def test_norms_that_a_pack_replaces_within_a_call_run_as_it_has_them(comfy, of_core, turing, monkeypatch):
    """As AnimateDiff's GroupNorm, which it puts on torch's class and on ComfyUI's around each call."""
    kind = KINDS["wrapper of the diffusion model"]
    model = families.with_compute(comfy, of_core(kind.family), "fp16_safe")
    without = sample(model, kind)
    clone = model.clone()
    clone.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "norms", with_other_norms)
    reference = families.with_compute(comfy, of_core(kind.family), "fp32")
    reference.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "norms", with_other_norms)
    assert relative_error(sample(reference, kind), sample(clone, kind)) < BOUND
    assert relative_error(without, sample(clone, kind)) > 0.03


def test_a_node_that_chooses_fp16_safe_states_fp32_to_packs_that_ask_in_a_call(comfy, of_core, turing):
    kind, stated = KINDS["attn2 replaced"], []
    model = of_core(kind.family)
    planned = families.with_compute(comfy, model, "fp16_safe")

    def ask(n, extra_options):
        stated.append((model.model.manual_cast_dtype, model.model.get_dtype_inference()))
        return n

    sample(on_attention(planned, ask), kind)
    assert {*stated} == {(torch.float32, torch.float32)}
    assert planned.get_model_object("manual_cast_dtype") == torch.float32
    sample(model, kind)
    assert model.model.manual_cast_dtype is None, "and the model that other clones share is as before"


@pytest.mark.parametrize("way", ["plan", "guard"])
def test_code_put_on_a_model_between_two_runs_is_seen(comfy, way, ours, expected, turing):
    name = "method set on the shared model"
    kind, loud = KINDS[name], way == "guard"
    plain = ours(kind.family, compute="fp16" if loud else "fp16_safe", loud=loud)
    model = guarded(comfy, plain) if loud else plain
    before = sample(model, kind)
    kind.put(model, Layers(torch.float16, 1.0))
    try:
        assert relative_error(expected(name, loud), sample(model, kind)) < BOUND
    finally:
        kind.off(model)
    assert relative_error(before, sample(model, kind)) < BOUND


def test_code_runs_in_a_control_net_in_fp16_safe(comfy, models_dir, turing, monkeypatch):
    control_files.narrow(monkeypatch)
    path = control_files.flux(models_dir / "controlnet" / "borders.safetensors")
    given = []
    for compute, dtype in (("fp32", torch.float32), ("fp16_safe", torch.float16)):
        control = comfy.run("HalfsafeLoadControlNet", control_net_name=path.name, storage="fp16", compute=compute)[0]
        without = control_files.give(control, "flux")
        linear = control.control_model.double_blocks[0].img_mlp
        linear.forward = beside(linear.forward, Layers(dtype, 1.0).adapter(linear[-1].weight.shape[0]))
        LoadedControl.of(control).planned.compute.begin_run()
        given.append(control_files.give(control, "flux"))
        assert relative_error(given[-1], without) > 0.03
    assert relative_error(*given) < BOUND


def test_a_layer_of_torchs_own_that_is_planned_in_fp32_rounds_no_input():
    layer, x = torch.nn.Linear(8, 8, bias=False).half(), torch.full((1, 8), 1e6)
    plan = ComputePlan.of_layers({"layer": LayerPlan(mode="fp32", stream="fp32", reason="asked for")})
    with patched(PlannedLayers(plan, {"layer": layer}).patches):
        assert relative_error(x @ layer.weight.float().t(), layer(x)) < 1e-5
