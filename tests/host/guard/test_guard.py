"""The NaN guard in a real ComfyUI: models that overflow in fp16 come out right, and stay fast afterwards."""

from unittest.mock import Mock

import pytest
import torch
from halfsafe.nodes.host.guard import failure, notices
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.precision.base.modes import label_of
from halfsafe.precision.plan.rules import rules_from
from support import families
from support.families import denoise, load
from support.guarding import Counted, guarded, inside, is_finite, left_on, modes_of, plain_fp16, report_of, step_of
from support.measures import relative_error
from support.rows import the_rest_before_a_release

# family, kind, the layer or part named first, what named there
CASES = [
    ("wan", "ffn", "blocks.0.ffn.2", "overflow"),
    ("wan", "residual", "blocks.0.self_attn.o", "overflow"),
    ("wan", "attention", "blocks.0.self_attn", "overflow"),
    ("wan", "embedding", "text_embedding.2", "overflow"),
    ("flux", "ffn", "double_blocks.0.txt_mlp.2", "saturation"),
    ("flux", "attention", "double_blocks.0", "saturation"),
    ("sd3", "residual", "joint_blocks.0.", "overflow"),
    ("hunyuan_video", "ffn", "double_blocks.0.", "saturation"),
    ("ltxv", "residual", "transformer_blocks.0.", "overflow"),
    ("sdxl", "convolution", "input_blocks.", "overflow"),
]
SAMPLERS = ["euler_ancestral", "dpmpp_2m_sde", "uni_pc", "res_multistep", "heun"]
"""heun calls the model twice a step."""


@pytest.fixture(scope="module")
def files(models_dir):
    """(family, kind) -> the file of that model; kind None: the clean one."""
    return families.files_in(models_dir / "diffusion_models", "guard")


EACH = [case for case in CASES if case[0] not in ("sd3", "hunyuan_video", "ltxv")]


@pytest.mark.parametrize(("family", "kind", "layer", "named"), the_rest_before_a_release(EACH, CASES))
def test_an_overflowing_model_comes_out_right(comfy, files, family, kind, layer, named):
    path = files(family, kind)
    reference = families.sample(load(comfy, path, "fp32", "fp32"), family)
    bf16 = relative_error(reference, families.sample(load(comfy, path, "as_file", "bf16"), family))
    fp16 = relative_error(reference, families.sample(plain_fp16(comfy, path), family))
    assert not fp16 < 0.1, "the model overflows"

    model = guarded(comfy, plain_fp16(comfy, path))
    with Counted(model) as calls:
        result = families.sample(model, family)
    seen = report_of(model)
    assert relative_error(reference, result) < min(0.02, 0.6 * bf16)
    assert seen.verdict == "recovered" and seen.extra_calls == 2
    assert seen.events[0].layer.startswith(layer) and seen.events[0].kind == named and seen.events[0].recovered
    assert "the same seed may give a slightly different picture" in seen.events[0].evidence
    first_run = calls.count

    with Counted(model) as calls:
        again = families.sample(model, family)
    seen = report_of(model)
    assert seen.verdict == "clean" and seen.extra_calls == 0 and "an earlier run needed" in seen.advice
    assert calls.count < first_run
    assert relative_error(reference, again) < min(0.02, 0.6 * bf16)
    modes = list(modes_of(model).values())
    assert modes.count("fp16") > len(modes) / 2


def test_a_rung_computes_in_its_own_dtypes_under_a_callers_autocast(comfy, overflowing):
    model = guarded(comfy, load(comfy, overflowing, "fp16", "fp16"))
    with torch.autocast("cpu", torch.float16):
        assert denoise(model).isfinite().all()
    assert report_of(model).verdict == "recovered"


def test_each_repeat_is_told_where_the_model_runs(comfy, files, monkeypatch):
    said = []
    for module in (failure, notices):
        monkeypatch.setattr(module, "show_progress", said.append)
    model = guarded(comfy, plain_fp16(comfy, files("wan", "ffn")))
    families.sample(model, "wan")
    (event,) = report_of(model).events
    last = f"{event.layer}: repeated in {label_of(event.to_mode)}, no NaN"
    assert said == ["Repeating step 0 to locate the NaN", "Repeating step 0 in fp16_safe", last]


@pytest.mark.parametrize("kind", ["ffn", "residual", "attention", "embedding"])
def test_escalations_are_rules_that_need_no_guard(comfy, files, kind):
    path = files("wan", kind)
    model = guarded(comfy, plain_fp16(comfy, path))
    result = families.sample(model, "wan")
    rules = rules_from(report_of(model).rules, "none")
    ruled = comfy.run("HalfsafeComputeDtype", model=plain_fp16(comfy, path), compute="fp16", rules=rules)[0]
    assert relative_error(result, families.sample(ruled, "wan")) < 0.005


def test_a_clean_model_is_left_alone(comfy, files):
    plain = plain_fp16(comfy, files("wan"))
    expected = families.sample(plain, "wan")
    model = guarded(comfy, plain)
    with Counted(model) as calls:
        assert torch.equal(families.sample(model, "wan"), expected)
    assert calls.count == 4
    assert (report_of(model).verdict, report_of(model).calls, report_of(model).events) == ("clean", 4, [])


def test_an_overflow_of_one_row_of_a_later_call(comfy, files, call_of_two):
    text = families.louder(call_of_two, 3e4, rows=1)
    reference = families.replay(load(comfy, files("wan"), "fp32", "fp32"), call_of_two, c_crossattn=text)
    model = guarded(comfy, plain_fp16(comfy, files("wan")))
    assert is_finite(families.replay(model, call_of_two))
    assert report_of(model).extra_calls == 0
    for repeats in (2, 2):
        assert relative_error(reference, families.replay(model, call_of_two, c_crossattn=text)) < 0.02
        assert report_of(model).extra_calls == repeats, "the second such call is not repeated"
    assert report_of(model).events[0].batch_rows == [1]


def test_a_failure_under_an_escalation_is_located_too(comfy, files, call_of_two):
    text = families.louder(call_of_two, 3e4, rows=1)
    reference = families.replay(load(comfy, files("wan"), "fp32", "fp32"), call_of_two, c_crossattn=text)
    model = guarded(comfy, plain_fp16(comfy, files("wan")))
    assert is_finite(families.replay(model, call_of_two))
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.wider({"blocks.1.ffn.0": "fp16_wide"}))
    assert relative_error(reference, families.replay(model, call_of_two, c_crossattn=text)) < 0.02
    (event,) = report_of(model).events
    assert (event.op, event.kind, event.recovered) == ("cast", "overflow", True)


@pytest.mark.parametrize("wider", [{}, {"blocks.1.ffn.0": "fp16_wide"}])
def test_the_model_is_given_nothing_of_the_guards(comfy, files, wider):
    """Beside what it would be given without one: a wrapper may hand the same options to another model, or use them twice."""
    seen, given = [], []
    model = inside(
        guarded(comfy, plain_fp16(comfy, files("wan"))),
        lambda executor, args, kwargs: _twice(executor, args, kwargs, seen),
    )
    families.sample(model, "wan", steps=1)
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.wider(wider))
    module = model.model.diffusion_model
    forward = module.forward
    module.forward = lambda *args, **kwargs: (
        given.append(set(kwargs["transformer_options"])),
        forward(*args, **kwargs),
    )[1]
    try:
        families.sample(model, "wan", steps=1)
    finally:
        del module.forward
    assert given and not any("halfsafe" in str(key) for options in given for key in options)
    assert seen and all(torch.equal(*results) for results in seen), "the second of two calls runs as the first"


def _twice(executor, args, kwargs, seen):
    results = [executor(*args, **kwargs) for _ in range(2)]
    seen.append(results)
    return results[1]


def test_an_overflow_at_one_sigma_only(comfy, files):
    """The text is far louder at the third of four steps."""

    sigmas = []

    def change(executor, args, kwargs):
        x, t, c_concat, text, *rest = args
        if step_of(args) == 2:
            sigmas.append(float(args[5]["sigmas"][0]))
            text = text * 3e4
        return executor(x, t, c_concat, text, *rest, **kwargs)

    reference = families.sample(inside(load(comfy, files("wan"), "fp32", "fp32"), change), "wan")
    model = inside(guarded(comfy, plain_fp16(comfy, files("wan"))), change)
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    (event,) = report_of(model).events
    assert event.step == 2 and {event.sigma} == set(sigmas)
    assert report_of(model).extra_calls == 2
    families.sample(model, "wan")
    assert report_of(model).extra_calls == 0


def test_fp8_weights_that_overflow_fp16(comfy, files):
    path = files("wan", "ffn")
    reference = families.sample(load(comfy, path, "fp8_e4m3fn", "fp32"), "wan")
    model = guarded(comfy, load(comfy, path, "fp8_e4m3fn", "fp16"))
    assert relative_error(reference, families.sample(model, "wan")) < 0.01
    assert report_of(model).events[0].layer == "blocks.0.ffn.2"


class BrokenKernel:
    """An attention override that gives NaN in the self-attention of block 0, and notes the blocks it ran in."""

    def __init__(self):
        self.ran = []

    def __call__(self, function, q, k, v, heads, *args, **kwargs):
        block = kwargs["transformer_options"]["block_index"]
        self.ran.append(block)
        result = function(q, k, v, heads, *args, **kwargs)
        return result * torch.nan if block == 0 and q.shape[-2] == k.shape[-2] else result


def test_a_broken_attention_is_left_out_of_later_calls(comfy, files, call):
    plain, kernel = plain_fp16(comfy, files("wan")), BrokenKernel()
    expected = families.replay(plain, call)
    model = guarded(comfy, plain)
    model.model_options["transformer_options"]["optimized_attention_override"] = kernel
    assert relative_error(expected, families.replay(model, call)) < 0.01
    report = report_of(model)
    assert "BrokenKernel" in report.events[0].op and report.events[0].layer == "blocks.0.self_attn"
    assert set(report.escalations) == {"residual stream"}
    kernel.ran.clear()
    assert relative_error(expected, families.replay(model, call)) < 0.01
    assert kernel.ran == [], "ComfyUI's attention runs instead"


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_samplers_give_the_picture_they_would_have_given(comfy, files, sampler):
    path = files("wan", "ffn")
    states, results = [], []
    for model in (load(comfy, path, "fp32", "fp32"), guarded(comfy, plain_fp16(comfy, path))):
        torch.manual_seed(7)
        results.append(families.sample(model, "wan", steps=6, sampler=sampler))
        states.append(torch.get_rng_state())
    assert relative_error(*results) < 0.02
    assert torch.equal(*states)
    assert report_of(model).extra_calls == 2


def test_a_controlnet_is_whole_in_every_repeat(comfy, files):
    """A UNet takes a ControlNet's outputs out of their lists as it uses them."""
    taken = Mock()

    def like_a_unet(executor, args, kwargs):
        taken(args[4]["middle"].pop())
        return executor(*args[:4], None, *args[5:], **kwargs)

    call = families.capture(load(comfy, files("wan"), "fp32"), "wan")
    model = inside(guarded(comfy, plain_fp16(comfy, files("wan", "ffn"))), like_a_unet)
    control = {"middle": [torch.ones(1)], "output": []}
    assert is_finite(families.replay(model, call, control=control))
    assert taken.call_count == 3 and len(control["middle"]) == 1


def test_nothing_is_left_on_the_model(comfy, files):
    path = files("wan", "attention")
    plain = plain_fp16(comfy, path)
    families.sample(plain, "wan", steps=1)
    before = left_on(plain.model)
    model = guarded(comfy, plain)
    families.sample(model, "wan", steps=2)
    assert left_on(plain.model) == before
    assert plain.model.manual_cast_dtype == guarded(comfy, plain).model.manual_cast_dtype
    assert not is_finite(families.sample(plain, "wan", steps=1)), "the model without the guard is as it was"


def test_the_report_shows_what_the_guard_did(comfy, files):
    path = files("wan", "ffn")
    model = guarded(comfy, plain_fp16(comfy, path))
    families.sample(model, "wan")
    report = families.report(comfy, model)
    assert report["guard"]["verdict"] == "recovered"
    assert report["guard"]["escalations"]["blocks.0.ffn.2"] == "fp16_wide"
    layer = next(layer for layer in report["layers"] if layer["name"] == "blocks.0.ffn.2")
    assert (layer["mode"], layer["stream"]) == ("fp16_wide", "fp32")
    text = comfy.run("HalfsafeReport", model=model)[0]
    assert "Guard: recovered" in text and "blocks.0.ffn.2" in text


class IPAdapter:
    """As other packs' nodes do: a layer of its own in fp16, applied to what runs in the model's block."""

    def __init__(self):
        self.weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(3)).half() / 256

    def __call__(self, block: dict) -> dict:
        return {**block, "img": block["img"] + torch.nn.functional.linear(block["img"], self.weight)}


def with_adapter(comfy, path):
    patched = plain_fp16(comfy, path).clone()
    patched.set_model_patch(IPAdapter(), "double_block")
    return patched


def test_what_a_patch_brings_in_fp16_runs_in_a_repeat_in_fp32(comfy, overflowing):
    model = guarded(comfy, with_adapter(comfy, overflowing))
    assert is_finite(families.sample(model, "wan")), "steps after the cured one run wider too"
    assert report_of(model).verdict == "recovered"


def test_what_a_patch_brings_in_fp16_is_compared_by_the_check(comfy, wan):
    model = guarded(comfy, with_adapter(comfy, wan), check="first step")
    assert torch.equal(
        families.sample(model, "wan", steps=1), families.sample(with_adapter(comfy, wan), "wan", steps=1)
    )
    (check,) = report_of(model).checks
    assert not check.left_out and check.snr_db > 40


def test_the_logs_of_eight_branches_are_kept(comfy, files):
    """A workflow that makes a new branch in each prompt, with a LoRA or an attention, keeps no log of them all."""
    guard = Guard("report", 0, None)
    branches = [plain_fp16(comfy, files("wan")).clone() for _ in range(10)]
    for branch in branches:
        branch.model_options["transformer_options"] = {"optimized_attention_override": lambda *args: None}
    logs = [guard._begin(branch) for branch in branches]
    assert [guard._log(branch) is log for branch, log in zip(branches[2:], logs[2:], strict=True)] == [True] * 8
    assert guard._log(branches[0]) is not logs[0], f"{len(guard._logs)} logs"


def test_prompts_of_changing_length_are_cured_each_at_its_first_failure(comfy, files):
    path = files("wan", "ffn")
    exact, model = load(comfy, path, "fp32", "fp32"), guarded(comfy, plain_fp16(comfy, path))
    for tokens in (12, 40, 12, 96):
        text = families.conditioning("wan", length=tokens)
        expected, found = (families.sample(each, "wan", steps=2, cond=text) for each in (exact, model))
        error = relative_error(expected, found)
        assert error < 0.02, f"{tokens} tokens: {error:.3g}, {report_of(model).events}"
