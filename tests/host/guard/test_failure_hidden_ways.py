"""NaN that code hides in any way: what holds it is found in what cannot hide it, and NaN by design is nobody's fault."""

import contextlib
import math

import pytest
import torch
from halfsafe.nodes.host.compute.per_model import runs_in
from halfsafe.precision.guard.verdicts import NAN_CHANGES_NOTHING, READ_BY_NONE, NonFinite
from support import families, plants
from support.dynamic_vram import dynamic_vram
from support.families import load, with_compute
from support.guarding import Counted, guarded, is_finite, report_of
from support.measures import relative_error
from support.rows import all_of, rotated, the_rest_before_a_release
from torch import nan_to_num as nan_to_num_by_name

ON_NAN = ("stop", "report", "retry_higher")
DTYPES = ("fp16", "bf16", "fp32")
LAYER = plants.FAMILIES["wan"].layer


def by_comparison(x):
    x = x.clone()
    x[x != x] = 0
    return x


def by_numpy(x):
    import numpy

    return torch.from_numpy(numpy.nan_to_num(x.float().numpy())).to(x.dtype)


WAYS = {
    "nan_to_num": torch.nan_to_num,
    "where isnan": lambda x: torch.where(torch.isnan(x), 0, x),
    "where isfinite": lambda x: torch.where(torch.isfinite(x), x, 0),
    "fmax": lambda x: torch.fmax(x, torch.full_like(x, -6e4)),
    "x != x": by_comparison,
    "x == x": lambda x: torch.where(x == x, x, 0),
    "after a cast": lambda x: torch.nan_to_num(x.float()).to(x.dtype),
    "numpy": by_numpy,
    "imported by name": nan_to_num_by_name,
    "an operation of aten": lambda x: torch.ops.aten.nan_to_num.default(x),
    "nansum": lambda x: x[..., None].nansum(-1),
}
PLACES = {"model": "", "block": "blocks.0", "layer": LAYER}
"""Where the code stands that hides it: at the end of the model, of a block, or in the layer's own forward."""


@pytest.fixture(scope="module")
def models(comfy, models_dir):
    """(family, dtype) -> its clean model; guards have learned nothing of it."""
    made = {}

    def get(family: str = "wan", dtype: str = "fp16"):
        if (family, dtype) not in made:
            path = plants.write(family, models_dir / "diffusion_models")
            made[family, dtype] = load(comfy, path, dtype, dtype)
        runs_in(made[family, dtype].model).wider.clear()
        runs_in(made[family, dtype].model).fallback = False
        return made[family, dtype]

    return get


@contextlib.contextmanager
def hiding(model, way, place: str):
    """The code of a pack that hides NaN: in the forward of a layer, or behind a module."""
    module = model.model.diffusion_model.get_submodule(PLACES[place])
    if place == "layer":
        forward = module.forward
        module.forward = lambda *args, **kwargs: way(forward(*args, **kwargs))
        try:
            yield
        finally:
            del module.forward
        return
    handle = module.register_forward_hook(lambda module, args, result: way(result))
    try:
        yield
    finally:
        handle.remove()


def ended(model, family: str = "wan", **options) -> str:
    """The verdict of the error that ended a run; empty where none did."""
    try:
        plants.sample(model, family, **options)
    except NonFinite as error:
        return error.verdict
    return ""


@pytest.mark.parametrize(
    ("way", "dtype", "place", "what", "on_nan"),
    rotated(
        all_of(WAYS, DTYPES),
        [(place, what, ON_NAN[turn % 3]) for turn, (what, place) in enumerate(all_of(("weight", "LoRA"), PLACES))],
        whole=[("x != x", "bf16")],
    ),
)
def test_a_weight_or_a_lora_with_nan_is_blamed_however_it_is_hidden(comfy, models, way, dtype, place, what, on_nan):
    plain = models(dtype=dtype)
    model = plants.nan_lora(plain, "wan") if what == "LoRA" else plain
    context = contextlib.nullcontext() if what == "LoRA" else plants.nan_weight(plain, "wan")
    with context, hiding(plain, WAYS[way], place):
        assert is_finite(plants.sample(model, "wan")), "it is hidden"
        model = guarded(comfy, model, on_nan)
        verdict = ended(model)
    report = report_of(model)
    assert report.verdict == "bad_weights" and verdict == ("" if on_nan == "report" else "bad_weights")
    assert [(event.kind, event.layer) for event in report.events] == [("weights", LAYER)] and report.extra_calls == 1
    assert ("A LoRA or other patch" in report.advice) == (what == "LoRA")


@pytest.mark.parametrize(("way", "dtype", "on_nan"), rotated(all_of(WAYS, DTYPES), ON_NAN, whole=[("x != x", "bf16")]))
def test_a_conditioning_with_nan_is_blamed_however_it_is_hidden(comfy, models, way, dtype, on_nan):
    plain = models(dtype=dtype)
    with hiding(plain, WAYS[way], "model"):
        model = guarded(comfy, plain, on_nan)
        verdict = ended(model, positive=plants.nan_text("wan"))
    report = report_of(model)
    assert report.verdict == "bad_input" and verdict == ("" if on_nan == "report" else "bad_input")
    assert [(event.kind, event.layer) for event in report.events] == [("input", "positive conditioning")]
    assert report.extra_calls == 2, "without the NaN, and with it: the two are compared"


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_lora_with_nan_that_is_added_to_results_is_blamed(comfy, models_dir, storage):
    path = plants.write("wan", models_dir / "diffusion_models")
    plain = load(comfy, path, storage, "bf16")
    model = plants.nan_lora(plain, "wan")
    with hiding(plain, by_comparison, "model"):
        model = guarded(comfy, model, "stop")
        assert ended(model) == "bad_weights"
    assert "A LoRA or other patch" in report_of(model).advice


@pytest.mark.parametrize("storage", ["int8", "fp8_e4m3fn"])
def test_a_scale_with_nan_is_blamed(comfy, models_dir, storage):
    path = plants.write("wan", models_dir / "diffusion_models")
    plain = load(comfy, path, storage, "bf16")
    scale = plain.model.diffusion_model.get_submodule(LAYER).weight._params.scale
    kept = scale.clone()
    scale.fill_(math.nan)
    try:
        with hiding(plain, by_comparison, "model"):
            model = guarded(comfy, plain, "stop")
            assert ended(model) == "bad_weights"
    finally:
        scale.copy_(kept)
    assert report_of(model).events[0].layer == LAYER


@pytest.mark.parametrize("way", ["transferred", "prefetched", "resident"])
def test_a_weight_with_nan_that_is_streamed_is_blamed(comfy, models, way, monkeypatch):
    """Its own tensor is in the host's memory, and is not read a second time."""
    plain = models(dtype="bf16")
    model = guarded(comfy, plain, "stop")
    monkeypatch.setattr("halfsafe.nodes.host.guard.asked.parts_of", lambda weight: ())
    with plants.nan_weight(plain, "wan"), hiding(plain, by_comparison, "model"):
        plants.sample(plain, "wan", steps=1)
        with dynamic_vram(plain, way):
            assert ended(model) == "bad_weights"
    assert report_of(model).events[0].layer == LAYER


def test_nan_that_no_call_reads_is_nobodys_fault_and_is_looked_for_once(comfy, models):
    plain = models(dtype="bf16")
    network = plain.model.diffusion_model
    network.register_parameter("unused", torch.nn.Parameter(torch.full((4,), math.nan), requires_grad=False))
    try:
        expected = plants.sample(plain, "wan")
        model = guarded(comfy, plain, "stop")
        assert torch.equal(plants.sample(model, "wan"), expected)
        report = families.report(comfy, model)
        assert report["guard"]["verdict"] == "clean" and report["guard"]["extra_calls"] == 1
        assert READ_BY_NONE in report["notes"]
        plants.sample(model, "wan")
        assert report_of(model).extra_calls == 0
    finally:
        del network.unused


def test_nan_of_a_conditioning_that_changes_nothing_is_nobodys_fault(comfy, models):
    plain = models(dtype="bf16")
    module = plain.model.diffusion_model.text_embedding
    handle = module.register_forward_pre_hook(lambda module, args: (torch.nan_to_num(args[0]), *args[1:]))
    try:
        model = guarded(comfy, plain, "stop")
        assert ended(model, positive=plants.nan_text("wan")) == ""
    finally:
        handle.remove()
    report = families.report(comfy, model)
    assert report["guard"]["verdict"] == "clean" and NAN_CHANGES_NOTHING in report["notes"]
    assert report["guard"]["extra_calls"] == 1, "found out once"


def masked_rows(module, args, result):
    """The softmax of rows that are wholly masked, and what code of packs puts in place of it."""
    first = result[0] if isinstance(result, tuple) else result
    weights = torch.softmax(torch.full((4, 4), -math.inf, dtype=first.dtype), -1)
    first = first + torch.nan_to_num(weights).sum()
    return (first, *result[1:]) if isinstance(result, tuple) else first


BLOCKS = {"wan": "blocks.0", "chroma": "double_blocks.0"}


BY_DESIGN, GUARDS = all_of(BLOCKS, ["fp16", "auto"]), ["off", *ON_NAN]


@pytest.mark.parametrize(
    ("family", "compute", "guard"),
    the_rest_before_a_release(
        rotated(BY_DESIGN, GUARDS, whole=[("chroma", "fp16")]), all_of(BLOCKS, ["fp16", "auto"], GUARDS)
    ),
)
def test_nan_by_design_is_no_saturation_and_is_found_out_once(comfy, models, monkeypatch, family, compute, guard):
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_75")
    plain = models(family)
    handle = plain.model.diffusion_model.get_submodule(BLOCKS[family]).register_forward_hook(masked_rows)
    try:
        model = with_compute(comfy, plain, compute)
        expected = plants.sample(plain, family)
        model = model if guard == "off" else guarded(comfy, model, guard)
        found = plants.sample(model, family)
        report = families.report(comfy, model)["guard"]
        with Counted(model) as calls:
            again = plants.sample(model, family)
    finally:
        handle.remove()
    assert report["verdict"] in ("clean", "off") and not report["events"] and not report["escalations"]
    assert torch.equal(found, again) and calls.count == 2, "two steps and no repeat"
    assert not runs_in(plain.model).fallback and report["extra_calls"] <= 3
    assert torch.equal(found, expected) or compute == "auto"


@pytest.mark.parametrize("on_nan", ON_NAN)
def test_a_saturation_beside_nan_by_design_is_one(comfy, models, on_nan):
    plain = models("chroma")
    expected = plants.sample(plain, "chroma")
    handle = plain.model.diffusion_model.get_submodule("double_blocks.0").register_forward_hook(masked_rows)
    try:
        with plants.loud_weights(plain, "chroma"):
            model = guarded(comfy, plain, on_nan)
            found = plants.sample(model, "chroma")
    finally:
        handle.remove()
    report = report_of(model)
    assert report.verdict == ("recovered" if on_nan == "retry_higher" else "stopped")
    assert [event.kind for event in report.events] == ["saturation"] and is_finite(found)
    assert relative_error(expected, found) > 0


@pytest.mark.parametrize("on_nan", ["report", "stop"])
def test_of_a_saturation_and_a_conditioning_with_nan_the_worse_is_the_verdict(comfy, models, on_nan):
    plain = models("chroma")
    ((good, extra),), ((bad, _),) = plants.conditioning("chroma"), plants.nan_text("chroma")
    halves = [[good, {**extra, "start_percent": 0.0, "end_percent": 0.5}]]
    halves += [[bad, {**extra, "start_percent": 0.5, "end_percent": 1.0}]]
    with plants.loud_weights(plain, "chroma"):
        model = guarded(comfy, plain, on_nan)
        assert ended(model, "chroma", positive=halves, steps=4) == ("bad_input" if on_nan == "stop" else "")
    report = report_of(model)
    assert [event.kind for event in report.events][:2] == ["saturation", "input"] and report.verdict == "bad_input"
