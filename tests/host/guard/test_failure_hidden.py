"""NaN that model code replaces by numbers in fp16 ends a run, loses a row or blames the device as NaN that it hides nowhere does."""

import contextlib
import math

import pytest
import torch
from comfy.patcher_extension import WrappersMP
from halfsafe.nodes.host.compute.per_model import runs_in
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, plants
from support.custom_nodes import step_caches
from support.families import load, with_compute
from support.guarding import Counted, guarded, is_finite, report_of
from support.measures import relative_error
from support.rows import all_of, rotated

ON_NAN = ("stop", "report", "retry_higher")
ONE_OF_EACH = ("flux", "wan")
"""A family whose code hides NaN and one whose does not, beside all settings; the others beside one each."""


@pytest.fixture(scope="module")
def models(comfy, models_dir):
    """family -> (its clean model in plain fp16, the latent of it); guards have learned nothing of it."""
    made = {}

    def get(family: str):
        if family not in made:
            families.unload_models()
            path = plants.write(family, models_dir / "diffusion_models")
            model = load(comfy, path, "fp16", "fp16")
            made[family] = model, plants.sample(model, family)
        runs_in(made[family][0].model).wider.clear()
        return made[family]

    return get


def outcome(model, family: str, clean: torch.Tensor, **options) -> tuple:
    """(verdict of the error that ended a run, or the rows that are finite; the report)"""
    try:
        seen = tuple(is_finite(row) for row in plants.sample(model, family, **options))
    except NonFinite as error:
        seen = error.verdict
    return seen, report_of(model)


def planted(plain, family: str, what: str):
    """(the model, the context that a run of it is in) with a NaN in a weight or in a LoRA."""
    if what == "weight":
        return plain, plants.nan_weight(plain, family)
    return plants.nan_lora(plain, family), contextlib.nullcontext()


@pytest.mark.parametrize(
    ("family", "what", "on_nan"), rotated(plants.FAMILIES, all_of(("weight", "LoRA"), ON_NAN), whole=ONE_OF_EACH)
)
def test_a_weight_or_a_lora_with_nan_ends_a_run_hidden_or_not(comfy, models, family, what, on_nan):
    plain, clean = models(family)
    model, context = planted(plain, family, what)
    with context:
        hidden = is_finite(plants.sample(model, family))
        seen, report = outcome(guarded(comfy, model, on_nan), family, clean)
    assert hidden == (family in plants.HIDING)
    assert seen == ((hidden,) if on_nan == "report" else "bad_weights") and report.verdict == "bad_weights"
    (event,) = report.events
    assert (event.kind, event.layer, event.recovered) == ("weights", plants.FAMILIES[family].layer, False)
    assert event.ended == (on_nan != "report") and ("A LoRA or other patch" in report.advice) == (what == "LoRA")
    assert report.extra_calls == 1 and not report.escalations


@pytest.mark.parametrize(
    ("family", "batch", "on_nan"), rotated(plants.FAMILIES, all_of((1, 2), ON_NAN), whole=ONE_OF_EACH)
)
def test_a_conditioning_with_nan_ends_a_run_or_loses_its_row(comfy, models, family, batch, on_nan):
    plain, clean = models(family)
    hidden, text = family in plants.HIDING, plants.nan_text(family, batch, row=batch - 1)
    if batch == 1:
        assert relative_error(clean, plants.sample(plain, family, text)) > 0.1 or not hidden, "the picture is another"
    seen, report = outcome(guarded(comfy, plain, on_nan), family, clean, positive=text, batch=batch)
    rows = (True,) * (batch - 1)
    expected = {"stop": "bad_input", "report": (*rows, hidden), "retry_higher": (*rows, False) if rows else "bad_input"}
    assert seen == expected[on_nan] and report.verdict == "bad_input"
    (event,) = report.events
    assert (event.kind, event.layer, event.batch_rows) == ("input", "positive conditioning", [batch - 1])
    assert report.extra_calls <= 4 and not report.escalations


@pytest.mark.parametrize(("family", "on_nan"), rotated(plants.HIDING, ON_NAN, whole=ONE_OF_EACH))
def test_a_real_saturation_ends_nothing(comfy, models, family, on_nan):
    plain, _ = models(family)
    with plants.loud_weights(plain, family):
        clamped = plants.sample(plain, family)
        model = guarded(comfy, plain, on_nan)
        found = plants.sample(model, family)
    report = report_of(model)
    assert is_finite(clamped) and report.verdict == ("recovered" if on_nan == "retry_higher" else "stopped")
    assert [(event.kind, event.ended) for event in report.events] == [("saturation", False)] and report.extra_calls == 2
    assert torch.equal(found, clamped) == (on_nan != "retry_higher")


@pytest.mark.parametrize(("family", "on_nan"), rotated(plants.FAMILIES, ON_NAN, whole=ONE_OF_EACH))
def test_one_fault_of_the_device_is_no_overflow_whether_it_is_hidden_or_not(comfy, models, family, on_nan):
    plain, clean = models(family)
    model = guarded(comfy, plain, on_nan)
    with plants.fault(plain, plants.FAMILIES[family].layer):
        try:
            found = plants.sample(model, family)
        except NonFinite:
            assert on_nan == "stop"
    report = report_of(model)
    assert report.verdict == "device_fault" and report.extra_calls == 2
    assert not report.escalations and not runs_in(plain.model).wider, "nothing is learned"
    assert on_nan != "retry_higher" or torch.equal(found, clean)


@pytest.mark.parametrize("family", ["wan", "flux"])
@pytest.mark.parametrize("guard", ["off", *ON_NAN])
def test_auto_falls_back_for_no_fault_that_does_not_come_again(comfy, models, monkeypatch, family, guard):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    plain, _ = models(family)
    model = with_compute(comfy, plain, "auto")
    clean = plants.sample(model, family)
    model = model if guard == "off" else guarded(comfy, model, guard)
    with plants.fault(plain, plants.FAMILIES[family].layer), Counted(model) as calls:
        assert torch.equal(plants.sample(model, family), clean)
    report = families.report(comfy, model)
    assert report["guard"]["verdict"] == "device_fault" and calls.count == 3, "two steps and one repeat"
    assert report["decisions"]["compute"].startswith("fp16 (asked: auto)") and not report["guard"]["escalations"]


@pytest.mark.parametrize("on_nan", ["stop", "retry_higher"])
def test_code_that_gives_nan_in_every_dtype_is_no_saturation_where_it_is_hidden(comfy, models, on_nan):
    plain, clean = models("flux")
    block = plain.model.diffusion_model.double_blocks[0]
    handle = block.txt_mlp.register_forward_hook(lambda module, args, result: result * math.nan)
    try:
        assert is_finite(plants.sample(plain, "flux")), "it is hidden"
        seen, report = outcome(guarded(comfy, plain, on_nan), "flux", clean)
    finally:
        handle.remove()
    assert seen == report.verdict == "not_precision" and report.events[0].layer == "double_blocks.0"


@pytest.mark.parametrize("on_nan", ON_NAN)
def test_a_conditioning_with_inf_is_no_saturation_where_it_is_hidden(comfy, models, on_nan):
    plain, clean = models("chroma")
    text = plants.conditioning("chroma")
    text[0][0][0, 3, 5] = math.inf
    seen, report = outcome(guarded(comfy, plain, on_nan), "chroma", clean, positive=text)
    assert seen == ((True,) if on_nan == "report" else "bad_input") and report.events[0].kind == "input"


def test_a_weight_that_is_infinite_is_no_saturation_where_it_is_hidden(comfy, models):
    plain, clean = models("z_image")
    with plants.nan_weight(plain, "z_image", math.inf):
        seen, report = outcome(guarded(comfy, plain, "stop"), "z_image", clean)
    assert seen == report.verdict == "bad_weights" and "set to 0" in report.events[0].evidence


@pytest.mark.parametrize("planted_in", [plants.loud_weights, plants.nan_weight])
def test_what_is_planted_in_a_weight_runs_after_a_lora_was_merged_into_it(models, planted_in):
    plain, clean = models("wan")
    plants.sample(plants.nan_lora(plain, "wan"), "wan", steps=1)
    with planted_in(plain, "wan"):
        assert not torch.equal(plants.sample(plain, "wan"), clean)
    assert torch.equal(plants.sample(plain, "wan"), clean), "and is taken out again"


def of_pack(executor, *args, **kwargs):
    return executor(*args, **kwargs)


of_pack.__code__ = of_pack.__code__.replace(co_filename="/custom_nodes/SomePack/count.py")


def test_beside_a_pack_the_sampling_starts_again_as_it_was_after_one_fault(comfy, models):
    plain, clean = models("flux")
    model = guarded(comfy, plain)
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "SomePack", of_pack)
    with plants.fault(plain, plants.FAMILIES["flux"].layer):
        assert torch.equal(plants.sample(model, "flux"), clean)
    report = report_of(model)
    assert report.verdict == "device_fault" and "restarted in fp16, because SomePack" in report.events[0].evidence
    assert not runs_in(plain.model).wider


def around_the_model(plain):
    """A cache that returns in a repeat what the model returned in the failed call."""
    return step_caches.cache_dit(plain)


def around_a_block(plain):
    """A cache of the block that saturates: the rest of the model runs in a repeat."""
    kept = {}

    def run(executor, *args, **kwargs):
        kept.clear()
        return executor(*args, **kwargs)

    def block(args, extra):
        if not kept:
            kept.update(extra["original_block"](args))
        return {name: value.to(args["img"].dtype) for name, value in kept.items()}

    clone = plain.clone()
    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "SomePack", of_pack)
    clone.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "SomePack", run)
    clone.set_model_patch_replace(block, "dit", "double_block", 0)
    return clone


@pytest.mark.parametrize("on_nan", ON_NAN)
@pytest.mark.parametrize("cached", [around_the_model, around_a_block])
def test_a_saturation_beside_a_cache_that_a_repeat_is_answered_from_is_one(comfy, models, cached, on_nan):
    plain, _ = models("flux")
    with plants.loud_weights(plain, "flux"):
        model = guarded(comfy, cached(plain), on_nan)
        plants.sample(model, "flux")
    report = report_of(model)
    assert report.verdict == ("recovered" if on_nan == "retry_higher" else "stopped")
    assert {(event.kind, event.ended) for event in report.events} == {("saturation", False)}
