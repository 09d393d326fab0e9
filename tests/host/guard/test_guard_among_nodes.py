"""The guard among other nodes: in any order, with hooks, regions, masks, merges, threads and errors."""

import gc
import math
import threading
import weakref

import pytest
import torch
from comfy.model_management import InterruptProcessingException
from comfy_execution.utils import CurrentNodeContext
from halfsafe.nodes.host.guard.model import Guard
from halfsafe.precision.guard.verdicts import NonFinite
from support import families
from support.families import load
from support.guarding import (
    core,
    guarded,
    inside,
    is_finite,
    left_on,
    nan_at,
    plain_fp16,
    raising_at,
    report_of,
    sample,
    step_of,
)
from support.measures import relative_error
from support.summing import accumulation


def test_two_samplers_in_one_prompt_share_what_was_learned(comfy, overflowing, fp32):
    reference = families.sample(fp32, "wan")
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    other = core("comfy_extras.nodes_model_advanced").ModelSamplingSD3().patch(model, 3.0)[0]
    with CurrentNodeContext("prompt", "1"):
        families.sample(model, "wan")
        assert is_finite(families.sample(other, "wan"))
        assert relative_error(reference, families.sample(model, "wan")) < 0.02
    report = report_of(model)
    assert (report.verdict, report.calls, report.extra_calls, len(report.events)) == ("recovered", 12, 2, 1)


def test_two_guards_of_one_model_file_in_one_prompt(comfy, overflowing, fp32):
    """Two guard nodes on the same loaded model: what one learned spares the other its repeats."""
    reference = families.sample(fp32, "wan")
    plain = plain_fp16(comfy, overflowing)
    first, second = guarded(comfy, plain), guarded(comfy, plain)
    with CurrentNodeContext("prompt", "1"):
        families.sample(first, "wan")
        assert relative_error(reference, families.sample(second, "wan")) < 0.02
    assert report_of(first).extra_calls == 2 and report_of(second).extra_calls == 0


def with_lora(model, size=1e3):
    clone = model.clone()
    delta = torch.randn(256, 1024, generator=torch.Generator().manual_seed(5)) * size
    clone.add_patches({"diffusion_model.blocks.1.ffn.2.weight": ("diff", (delta,))}, 1.0)
    return clone


NODES = {
    "guard": lambda comfy, model: guarded(comfy, model),
    "accumulation": lambda comfy, model: accumulation(comfy, model, fp16_accumulation="on"),
    "compute": lambda comfy, model: families.with_compute(comfy, model, "fp16"),
    "lora": lambda comfy, model: with_lora(model),
}


@pytest.mark.parametrize("order", [list(NODES), list(reversed(NODES))], ids="-".join)
def test_each_two_nodes_in_either_order(comfy, overflowing, order, fp32):
    call = families.capture(fp32, "wan")
    reference = families.replay(with_lora(fp32), call)
    model = load(comfy, overflowing, "fp16", "fp16")
    for name in order:
        model = NODES[name](comfy, model)
    assert relative_error(reference, families.replay(model, call)) < 0.02
    assert report_of(model).verdict == "recovered" and report_of(model).extra_calls == 2
    families.replay(model, call)
    assert report_of(model).extra_calls == 2


def hooked(model, size):
    """A conditioning whose LoRA is on in the last half of the steps only."""
    hooks = core("comfy.hooks")
    delta = torch.randn(256, 1024, generator=torch.Generator().manual_seed(5)) * size
    group = hooks.create_hook_lora({"diffusion_model.blocks.1.ffn.2.diff": delta}, 1.0, 0.0)
    keyframes = hooks.HookKeyframeGroup()
    keyframes.add(hooks.HookKeyframe(strength=0.0, start_percent=0.0))
    keyframes.add(hooks.HookKeyframe(strength=1.0, start_percent=0.5))
    group.set_keyframes_on_hooks(keyframes)
    return hooks.set_conds_props([families.conditioning("wan")], 1.0, "default", hooks=group)[0]


def test_a_scheduled_lora_that_overflows_is_wide_only_while_it_is_on(comfy, wan):
    reference = load(comfy, wan, "fp32", "fp32")
    expected = sample(reference, hooked(reference, 6e3), cfg=1.0, steps=6)
    plain = plain_fp16(comfy, wan)
    assert not is_finite(sample(plain, hooked(plain, 6e3), cfg=1.0, steps=6))
    model = guarded(comfy, plain)
    assert relative_error(expected, sample(model, hooked(model, 6e3), cfg=1.0, steps=6)) < 0.02
    report = report_of(model)
    assert report.verdict == "recovered" and report.extra_calls == 2
    assert report.events[0].step > 0
    assert "blocks.1.ffn.2" in report.escalations


def test_regional_conditionings(comfy, overflowing, fp32):
    """Two areas and the whole: three calls or more each step."""
    regions = []
    for seed, area in ((1, (4, 8, 0, 0)), (2, (4, 8, 4, 0))):
        ((text, extra),) = families.conditioning("wan", seed=seed)
        regions.append([text, {**extra, "area": (1, *area[:2], 0, *area[2:]), "strength": 1.0}])
    conds = [*regions, *families.conditioning("wan", seed=3)]
    reference = sample(fp32, conds)
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    assert relative_error(reference, sample(model, conds)) < 0.02
    assert report_of(model).extra_calls <= 4 and report_of(model).verdict == "recovered"


def test_a_merge_of_guarded_models(comfy, overflowing, wan, fp32):
    merge = core("comfy_extras.nodes_model_merging").ModelMergeSimple().merge
    reference = families.sample(merge(fp32, load(comfy, wan, "fp32", "fp32"), 0.7)[0], "wan")
    ours, other = guarded(comfy, plain_fp16(comfy, overflowing)), guarded(comfy, plain_fp16(comfy, wan))
    model = merge(ours, other, 0.7)[0]
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    assert report_of(model).verdict == "recovered"


def test_a_guard_on_a_guarded_model_is_one_guard(comfy, overflowing, fp32):
    reference = families.sample(fp32, "wan")
    model = guarded(comfy, guarded(comfy, plain_fp16(comfy, overflowing), "stop"))
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    assert report_of(model).extra_calls == 2 and report_of(model).calls == 4


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize(
    "error",
    [ValueError("of another pack"), torch.OutOfMemoryError("Allocation on device"), InterruptProcessingException()],
)
def test_an_error_in_a_call_or_a_repeat_leaves_nothing_behind(comfy, overflowing, error, number):
    plain = plain_fp16(comfy, overflowing)
    families.sample(plain, "wan", steps=1)
    before = left_on(plain.model)
    cast = plain.model.manual_cast_dtype
    model = inside(guarded(comfy, plain), raising_at(error, number))
    if number > 1 and isinstance(error, Exception):
        assert not is_finite(families.sample(model, "wan")), "a repeat's own error ends nothing"
        assert report_of(model).verdict == "stopped"
    else:
        with pytest.raises(type(error)) as raised:
            families.sample(model, "wan")
        assert raised.value is error
    assert left_on(plain.model) == before
    assert plain.model.manual_cast_dtype == cast
    assert is_finite(families.sample(model, "wan"))


@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize(
    "error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), InterruptProcessingException()]
)
def test_a_run_without_a_result_is_not_clean(comfy, wan, error, number):
    """Another pack's code raises in a call of a model that is never NaN."""
    model = inside(guarded(comfy, load(comfy, wan, "as_file", "fp32")), raising_at(error, number))
    with pytest.raises(type(error)):
        families.sample(model, "wan", steps=4)
    told = report_of(model)
    assert (told.verdict, told.calls, told.events) == ("stopped", number - 1, [])
    assert told.advice.startswith(("The run ended in an error before its result", "The run was interrupted"))
    families.sample(model, "wan", steps=1)
    assert report_of(model).verdict == "clean", "the next run has one"


@pytest.mark.not_as_on_cuda(
    "two threads put the rules on torch at once, and what the first takes off the second puts back"
)
def test_two_models_in_two_threads(comfy, overflowing, fp32, models_dir):
    reference = families.sample(fp32, "wan")
    models = [guarded(comfy, plain_fp16(comfy, overflowing)) for _ in range(2)]
    call = families.capture(fp32, "wan")
    results = {}

    def run(index):
        results[index] = families.replay(models[index], call)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = families.replay(fp32, call)
    assert [relative_error(expected, results[index]) < 0.02 for index in range(2)] == [True, True]
    for model in models:
        assert report_of(model).extra_calls == 2
        assert relative_error(reference, families.sample(model, "wan")) < 0.02


def test_a_nodes_code_of_its_own_norms_runs_beside_a_widened_stream(comfy, models_dir):
    folder, nag = models_dir / "diffusion_models", core("comfy_extras.nodes_nag").NAGuidance.execute
    path = families.write_scaled(
        families.write_narrow("flux", folder), folder / "nag.safetensors", {r"attn\.qkv\.weight": 2000}
    )
    text, other = families.conditioning("flux"), families.conditioning("flux", seed=9)
    expected = sample(nag(load(comfy, path), 5.0, 0.5, 1.5).args[0], text, other)
    model = guarded(comfy, nag(plain_fp16(comfy, path), 5.0, 0.5, 1.5).args[0])
    assert relative_error(expected, sample(model, text, other)) < 0.02
    assert report_of(model).extra_calls == 3, "located, with the patch of attention alone in fp32, with a wide stream"
    assert "residual stream" in report_of(model).escalations


def test_layers_of_torchs_own_classes(comfy, overflowing, fp32):
    """As in custom model code: a plain nn.Linear cannot cast its weight."""
    reference = families.sample(fp32, "wan")
    plain = plain_fp16(comfy, overflowing)
    for block in plain.model.diffusion_model.blocks:
        for index in ("0", "2"):
            old = block.ffn[int(index)]
            new = torch.nn.Linear(old.in_features, old.out_features, dtype=old.weight.dtype)
            new.requires_grad_(False)
            new.weight.copy_(old.weight)
            new.bias.copy_(old.bias)
            block.ffn[int(index)] = new
    model = guarded(comfy, plain)
    assert relative_error(reference, families.sample(model, "wan")) < 0.02
    assert report_of(model).events[0].layer == "blocks.0.ffn.2"


@pytest.fixture(scope="module")
def clamping(models_dir):
    folder = models_dir / "diffusion_models"
    source = families.write("flux", folder)
    return families.write_scaled(source, folder / "hunt_flux.safetensors", families.OVERFLOWS["flux"]["ffn"])


@pytest.mark.parametrize("on_nan", ["stop", "report"])
def test_clamped_values_are_told_and_change_nothing(comfy, clamping, on_nan):
    """They are no NaN: ``stop`` does not end a run for them."""
    plain = plain_fp16(comfy, clamping)
    expected = families.sample(plain, "flux")
    model = guarded(comfy, plain, on_nan)
    assert torch.equal(families.sample(model, "flux"), expected)
    report = report_of(model)
    assert report.verdict == "stopped" and len(report.events) == 1 and report.extra_calls == 2
    assert (report.events[0].kind, report.events[0].recovered) == ("saturation", False)


@pytest.mark.parametrize("on_nan", ["stop", "report"])
def test_clamped_values_are_told_after_a_step_that_was_off(comfy, clamping, on_nan):
    """Step 0 clamps nothing and its attention is coarse; from step 1 on the model clamps."""

    def quiet_at_first(run, args, kwargs):
        block, factor = run.class_obj.diffusion_model.double_blocks[0], 1.0 if step_of(args) else 2.0**18
        weights = [mlp[2].weight.data for mlp in (block.img_mlp, block.txt_mlp)]
        for weight in weights:
            weight /= factor
        try:
            return run(*args, **kwargs)
        finally:
            for weight in weights:
                weight *= factor

    def coarse(function, *args, **kwargs):
        result = function(*args, **kwargs)
        return (result * 4).round() / 4

    model = inside(plain_fp16(comfy, clamping), quiet_at_first)
    model.model_options["transformer_options"]["optimized_attention_override"] = coarse
    model = guarded(comfy, model, on_nan, check="first step")
    families.sample(model, "flux", steps=3)
    report = report_of(model)
    assert [(event.kind, event.step) for event in report.events] == [("drift", 0), ("saturation", 1)]
    assert report.verdict == "stopped"


@pytest.mark.parametrize("compute", ["fp16", "fp16_safe"])
def test_the_model_is_freed_although_the_guard_ran(comfy, models_dir, compute):
    """Also where a plan is part of what is learned, and where the escalation is of the model as a whole."""
    path = families.write("wan", models_dir / "diffusion_models")
    target = models_dir / "diffusion_models" / "hunt_residual.safetensors"
    families.write_scaled(path, target, families.OVERFLOWS["wan"]["residual"])
    model = guarded(comfy, accumulation(comfy, load(comfy, target, "fp16", compute), fp16_accumulation="on"))
    assert is_finite(families.sample(model, "wan", steps=1))
    state = Guard.on(model).states.kept()[0]
    state.grow(state.plan.wider({}, stream=True))
    assert is_finite(families.sample(model, "wan", steps=1))
    core_model = weakref.ref(model.model)
    del model, state
    families.unload_models()
    gc.collect()
    assert core_model() is None


def test_many_runs_need_no_more_memory_than_few(comfy, overflowing):
    model = guarded(comfy, plain_fp16(comfy, overflowing))
    call = families.capture(model, "wan")

    def tensors():
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    loud = call.args[3] * 3e4
    for _ in range(3):
        families.replay(model, call, c_crossattn=loud)
    before = tensors()
    for _ in range(50):
        families.replay(model, call, c_crossattn=loud)
    assert tensors() <= before


def test_a_batch_a_sampler_spoils_in_part_goes_on(comfy, wan):
    samplers = core("comfy.samplers")

    def broken(model, x, sigmas, extra_args=None, callback=None, disable=None):
        result = model(x, sigmas[0] * x.new_ones([x.shape[0]]), **extra_args).clone()
        result[1] = math.nan
        return result

    model = guarded(comfy, plain_fp16(comfy, wan))
    noise, cond = families.noise(model, batch=2), families.conditioning("wan", batch=2)
    run = core("comfy.sample").sample_custom
    sigmas = torch.tensor([1.0, 0.0])
    result = run(model, noise, 1.0, samplers.KSAMPLER(broken), sigmas, cond, cond, torch.zeros_like(noise), seed=1)
    assert is_finite(result[0])
    report = report_of(model)
    assert report.verdict == "not_precision" and report.events[0].batch_rows == [1]


@pytest.mark.parametrize("on_nan", ["stop", "report"])
def test_what_one_guard_learned_is_not_forced_on_a_guard_that_may_change_nothing(comfy, overflowing, on_nan):
    plain = plain_fp16(comfy, overflowing)
    families.sample(guarded(comfy, plain), "wan", steps=1)
    model = guarded(comfy, plain, on_nan)
    if on_nan == "stop":
        with pytest.raises(NonFinite):
            families.sample(model, "wan", steps=1)
    else:
        assert not is_finite(families.sample(model, "wan", steps=1))
    assert report_of(model).verdict == "stopped" and not report_of(model).escalations


def test_a_scheduled_lora_is_remembered_and_let_go(comfy, wan):
    plain = plain_fp16(comfy, wan)
    model = guarded(comfy, plain)
    cond = hooked(model, 6e3)
    group = weakref.ref(cond[0][1]["hooks"])
    for repeats in (2, 0):
        sample(model, cond, cfg=1.0, steps=6)
        assert report_of(model).extra_calls == repeats
    del cond, model
    families.sample(guarded(comfy, plain), "wan", steps=1)
    gc.collect()
    assert group() is None, "what was learned keeps no LoRA"


def test_the_advice_is_that_of_the_verdict_it_comes_with(comfy, wan):
    """A device fault at the second call, then a sampler that makes NaN."""
    samplers = core("comfy.samplers")

    def broken(model, x, sigmas, extra_args=None, callback=None, disable=None):
        for sigma in sigmas[:-1]:
            x = x - model(x, sigma * x.new_ones([x.shape[0]]), **extra_args)
        return x * math.nan

    model = inside(guarded(comfy, plain_fp16(comfy, wan)), nan_at(2))
    noise, cond = families.noise(model), families.conditioning("wan")
    run = core("comfy.sample").sample_custom
    sigmas = torch.tensor([1.0, 0.7, 0.4, 0.0])
    with pytest.raises(NonFinite, match="another sampler") as error:
        run(model, noise, 1.0, samplers.KSAMPLER(broken), sigmas, cond, cond, torch.zeros_like(noise), seed=1)
    assert error.value.verdict == "not_precision" and "driver" not in str(error.value)
    assert report_of(model).verdict == "device_fault" and len(report_of(model).events) == 2
