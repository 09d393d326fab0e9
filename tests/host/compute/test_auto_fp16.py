"""``auto`` in plain fp16: as ComfyUI's own until a result is not finite, then ``fp16_safe`` for as long as the model is loaded."""

import pytest
import torch
from comfy import model_management
from comfy.ldm.modules import attention
from comfy.ldm.wan import model as wan
from comfy.model_base import BaseModel
from halfsafe.nodes.host.compute import executor
from halfsafe.nodes.host.guard import clamps, notices
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.nodes.host.reporting.badge import model_words
from halfsafe.precision.guard.verdicts import NonFinite
from support import families, tiny_models
from support.compiling import compiled
from support.custom_nodes.step_caches import PACKS
from support.families import load, with_compute
from support.guarding import Counted, guarded, inside, is_finite, left_on, raising_at, report_of
from support.leaf_operations import LeafOperations
from support.measures import functions_run, relative_error

STEPS = 4
GOES_ON = "uses fp16_safe until it is unloaded"


class Reductions(LeafOperations):
    """Count the reductions of a call."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def leaf(self, func, args, kwargs):
        self.count += func.name().startswith(("aten::linalg_vector_norm", "aten::amax"))
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def nvidia(monkeypatch):
    """Decisions and the attention kernel are those on an NVIDIA card."""
    monkeypatch.setenv("HALFSAFE_DEVICE_PROFILE", "sm_86")
    for module, name in (
        (attention, "optimized_attention"),
        (attention, "optimized_attention_masked"),
        (wan, "optimized_attention"),
    ):
        monkeypatch.setattr(module, name, attention.attention_pytorch)


@pytest.fixture(scope="module")
def clean(models_dir):
    return tiny_models.wan(models_dir / "diffusion_models" / "plain_clean.safetensors", torch.float16, blocks=2)


@pytest.fixture(scope="module")
def loud(models_dir):
    return tiny_models.wan_overflowing(
        models_dir / "diffusion_models" / "plain_loud.safetensors", dtype=torch.float16, blocks=2
    )


@pytest.fixture(scope="module")
def reference(comfy, loud):
    return families.sample(load(comfy, loud, "as_file", "fp32"), "wan")


def of_node(comfy, path):
    return with_compute(comfy, load(comfy, path, "as_file", "fp16"), "auto")


def of_loader(comfy, path):
    return load(comfy, path, "auto", "auto")


def of_the_one_node(comfy, path, guard="off"):
    return comfy.run("HalfsafeAutoPrecision", model=load(comfy, path, "as_file", "fp16"), goal="balanced", guard=guard)[
        0
    ]


WAYS = (of_node, of_loader, of_the_one_node)


def modes(comfy, model) -> set[str]:
    return {layer["mode"] for layer in families.report(comfy, model)["layers"]}


@pytest.mark.parametrize("way", WAYS)
def test_a_model_in_range_runs_as_comfyui_runs_it(comfy, monkeypatch, clean, way):
    with monkeypatch.context() as patches:
        patches.setattr(model_management, "should_use_fp16", lambda *args, **kwargs: True)
        (core,) = comfy.core["UNETLoader"]().load_unet(clean.name, "default")
    expected = families.sample(core, "wan")
    exchanged = []

    def look(executor, args, kwargs):
        exchanged.extend(
            name for name, module in model.model.diffusion_model.named_modules() if "forward" in vars(module)
        )
        return executor(*args, **kwargs)

    model = inside(way(comfy, clean), look)
    assert torch.equal(families.sample(model, "wan"), expected) and exchanged == []
    report = families.report(comfy, model)
    assert {layer["mode"] for layer in report["layers"]} <= {"fp16", "fp32"}
    assert report["guard"]["verdict"] == "off" and report["decisions"]["compute"].startswith("fp16 (asked: auto)")
    assert model_words(model)[1] == "fp16"


@pytest.mark.parametrize("way", WAYS)
def test_a_model_that_overflows_goes_on_in_fp16_safe(comfy, loud, reference, way):
    model = way(comfy, loud)
    with Counted(model) as calls:
        found = families.sample(model, "wan")
    assert calls.count == STEPS + 2 and relative_error(reference, found) < 2e-3
    report = families.report(comfy, model)
    assert GOES_ON in report["decisions"]["compute"] and report["decisions"]["compute"].startswith(
        "fp16_safe (asked: auto)"
    )
    assert report["guard"]["verdict"] == "recovered" and report["guard"]["extra_calls"] == 2
    (event,) = report["guard"]["events"]
    assert (event["from"], event["to"], event["recovered"]) == ("fp16", "fp16_wide", True) and GOES_ON in event[
        "evidence"
    ]
    assert modes(comfy, model) >= {"fp16_wide"} and {layer["stream"] for layer in report["layers"]} == {"fp32"}
    assert model_words(model)[1] == "fp16_safe"
    for later in (model, model.clone(), with_compute(comfy, model, "auto"), guarded(comfy, model)):
        with Counted(later) as calls:
            again = families.sample(later, "wan")
        assert calls.count == STEPS and relative_error(reference, again) < 2e-3
    safe = families.sample(with_compute(comfy, model, "fp16_safe"), "wan")
    assert relative_error(safe, again) < 1e-3


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop", "report"])
@pytest.mark.parametrize("order", ["guard last", "guard first"])
def test_a_guard_takes_what_auto_promises_as_its_first_step(comfy, loud, reference, on_nan, order):
    plain = load(comfy, loud, "as_file", "fp16")
    if order == "guard last":
        model = guarded(comfy, with_compute(comfy, plain, "auto"), on_nan, max_retries=0)
    else:
        model = with_compute(comfy, guarded(comfy, plain, on_nan, max_retries=0), "auto")
    with Counted(model) as calls:
        found = families.sample(model, "wan")
    assert calls.count == STEPS + 2 and relative_error(reference, found) < 2e-3
    report = report_of(model)
    assert (report.verdict, report.extra_calls, report.calls) == ("recovered", 2, STEPS)
    assert Guard.on(model).on_nan == on_nan
    families.sample(model, "wan")
    assert report_of(model).verdict == "clean"


def test_the_node_that_planned_is_told_of_the_fallback_whoever_guards(comfy, loud, monkeypatch):
    sent = []
    monkeypatch.setattr(notices, "send", lambda event, data: sent.append(data))
    monkeypatch.setattr(executor, "running_node_id", lambda: "7")
    model = of_node(comfy, loud)
    families.sample(guarded(comfy, model), "wan")
    told = [message for message in sent if message["kind"] != "calls"]
    assert [(message["kind"], message["fell_back"]) for message in told] == [("event", "7"), ("verdict", None)]
    assert all(message["node_id"] != "7" for message in sent), "the guard's own node tells of it"


@pytest.mark.not_as_on_cuda("packs read noise levels back by themselves")
@pytest.mark.parametrize("name", PACKS)
def test_beside_a_step_cache_the_sampling_starts_again_and_is_that_of_fp16_safe(comfy, loud, name):
    expected = families.sample(
        PACKS[name](with_compute(comfy, load(comfy, loud, "as_file", "fp16"), "fp16_safe")), "wan"
    )
    model = PACKS[name](of_node(comfy, loud))
    assert torch.equal(families.sample(model, "wan"), expected)
    report = report_of(model)
    (event,) = report.events
    assert (report.verdict, report.extra_calls, model_words(model)[1]) == ("recovered", 3, "fp16_safe")
    assert event.evidence == (
        "The sampling was restarted in fp16_safe, because step_caches may keep state between steps. "
        "The model uses fp16_safe until it is unloaded."
    )


def nan_always(executor, args, kwargs):
    return executor(*args, **kwargs) * torch.nan


def test_what_fp16_safe_does_not_cure_is_handed_on_once_a_run(comfy, clean):
    model = of_node(comfy, clean)
    broken = inside(model, nan_always)
    with Counted(broken) as calls:
        assert not is_finite(families.sample(broken, "wan"))
    assert calls.count == STEPS + 2, "a repeat as it was and one in fp16_safe, and no other in this run"
    assert families.report(comfy, broken)["guard"]["verdict"] == "off"
    assert is_finite(families.sample(model, "wan")) and modes(comfy, model) <= {"fp16", "fp32"}, (
        "the model is not held to it"
    )


@pytest.mark.parametrize("on_nan", ["retry_higher", "stop"])
def test_what_fp16_safe_does_not_cure_is_the_guards_own(comfy, clean, on_nan):
    model = inside(guarded(comfy, of_node(comfy, clean), on_nan), nan_always)
    with pytest.raises(NonFinite) as error:
        families.sample(model, "wan")
    assert error.value.verdict == ("stopped" if on_nan == "stop" else "not_precision")


@pytest.mark.parametrize(
    "error",
    [model_management.InterruptProcessingException(), RuntimeError("planted"), torch.OutOfMemoryError("no memory")],
)
def test_a_repeat_that_is_broken_off_leaves_nothing(comfy, loud, reference, error):
    model = inside(of_node(comfy, loud), raising_at(error, 2))
    model_management.load_models_gpu([model])
    before = left_on(model.model)
    if isinstance(error, Exception):
        assert not is_finite(families.sample(model, "wan")), "the first result is given back"
    else:
        with pytest.raises(type(error)):
            families.sample(model, "wan")
    assert left_on(model.model) == before
    assert model_words(model)[1] == "fp16"
    assert relative_error(reference, families.sample(model, "wan")) < 2e-3


def test_one_row_of_a_batch_is_enough(comfy, clean):
    def loud_row(executor, args, kwargs):
        x = args[0].clone()
        x[0] *= 1e6
        return executor(x, *args[1:], **kwargs)

    model = inside(of_node(comfy, clean), loud_row)
    found = families.sample(model, "wan", steps=1, batch=2)
    assert is_finite(found) and model_words(model)[1] == "fp16_safe"


def test_another_dtype_takes_the_look_away_and_a_guard_stays(comfy, loud):
    model = of_node(comfy, loud)
    assert Guard.on(model).on_nan == "off"
    assert Guard.on(with_compute(comfy, model, "bf16")) is None and Guard.on(with_compute(comfy, model, "fp16")) is None
    assert Guard.on(with_compute(comfy, guarded(comfy, model), "bf16")).on_nan == "retry_higher"
    assert not is_finite(families.sample(with_compute(comfy, model, "fp16"), "wan")), "an fp16 that is asked for stays"


def test_memory_is_asked_for_fp32_activations_once_a_model_fell_back(comfy, loud, monkeypatch):
    """ComfyUI estimates them by the dtype that it casts to, which stays fp16 on the model: half of what is taken."""
    monkeypatch.setattr(model_management, "pytorch_attention_flash_attention", lambda: True)
    estimates, own = [], BaseModel.memory_required
    monkeypatch.setattr(
        BaseModel,
        "memory_required",
        lambda self, *given, **options: estimates.append(own(self, *given, **options)) or estimates[-1],
    )
    model = of_node(comfy, loud)
    asked = []
    for _ in range(2):
        families.sample(model, "wan", steps=1)
        asked.append(estimates[0])
        estimates.clear()
    assert model_words(model)[1] == "fp16_safe" and asked[1] == 2 * asked[0]
    assert model.model.manual_cast_dtype != torch.float32 and "memory_required" not in vars(model.model)


@pytest.mark.parametrize("order", [pytest.param("compiled last", marks=pytest.mark.release), "compiled first"])
def test_a_compiled_model_falls_back_too(comfy, loud, reference, order):
    plain = load(comfy, loud, "as_file", "fp16")
    how = {"keys": ["diffusion_model"], "backend": "eager"}
    model = (
        compiled(with_compute(comfy, plain, "auto"), **how)
        if order == "compiled last"
        else with_compute(comfy, compiled(plain, **how), "auto")
    )
    for _ in range(2):
        assert relative_error(reference, families.sample(model, "wan")) < 5e-3
    assert model_words(model)[1] == "fp16_safe"


@pytest.mark.parametrize(("family", "most"), [("wan", 1), ("sdxl", 3)])
def test_a_call_is_looked_at_no_more_often_than_this(comfy, models_dir, family, most):
    folder = models_dir / "diffusion_models"
    path = (
        tiny_models.wan(folder / "looked.safetensors", torch.float16)
        if family == "wan"
        else families.write_narrow(family, folder)
    )
    model = with_compute(comfy, load(comfy, path, "as_file", "fp16"), "auto")
    call = families.capture(model, family)
    with Reductions() as looks:
        families.replay(model, call)
    assert model_words(model)[1] == "fp16" and 1 <= looks.count <= most


@pytest.mark.not_as_on_cuda
@pytest.mark.parametrize(
    ("storage", "compute", "most"),
    [
        ("as_file", "auto", 1.06),
        pytest.param("as_file", "fp16_safe", 1.15, marks=pytest.mark.release),
        pytest.param("fp8_e4m3fn", "fp16", 1.3, marks=pytest.mark.release),
        ("fp8_e4m3fn", "fp16_safe", 1.3),
    ],
)
def test_a_call_runs_at_most_so_many_functions_for_one_of_comfyuis_own(comfy, models_dir, storage, compute, most):
    """In fp16, with weights in fp16. CUDA's rules are left out: they see each operation in Python."""
    path = tiny_models.wan(models_dir / "diffusion_models" / "host_time.safetensors", torch.float16, blocks=12)
    plain, stored = load(comfy, path, "as_file", "fp16"), load(comfy, path, storage, "fp16")
    call = families.capture(plain, "wan")
    with clamps.hiding_is_seen:  # as in a sampler's run, which exchanges torch's functions once
        counts = [
            functions_run(lambda model=model: families.replay(model, call))
            for model in (plain, with_compute(comfy, stored, compute))
        ]
    of_plain, of_ours = (count["call"] + (count["c_call"] if compute == "auto" else 0) for count in counts)
    assert of_ours <= most * of_plain, of_ours / of_plain
