"""What ComfyUI itself keeps of one call for the next, in repeats and checks: EasyCache, LazyCache, prefix caches, attention
that is recorded, random numbers."""

import contextlib
import functools
import random

import pytest
import torch
from comfy_extras import nodes_easycache
from support import families
from support.guarding import core, guarded, inside, is_finite, loaded_once, plain_fp16, report_of
from support.measures import relative_error

STEPS = 8
SIZES = {"wan": {"frames": 5}}


@pytest.fixture(scope="module")
def models(comfy, models_dir):
    return loaded_once(comfy, families.files_in(models_dir / "diffusion_models", "core_state"))


def node(module: str, name: str, model, *args):
    """The model that a node of ComfyUI's gives."""
    return getattr(core(f"comfy_extras.{module}"), name).execute(model, *args)[0]


NODES = {
    "EasyCache": ("wan", lambda model: node("nodes_easycache", "EasyCacheNode", model, 3.0, 0.0, 1.0, False)),
    "LazyCache": ("wan", lambda model: node("nodes_easycache", "LazyCacheNode", model, 3.0, 0.0, 1.0, False)),
    "Context Windows": ("wan", lambda model: node("nodes_context_windows", "WanContextWindowsManualNode", model, 9, 4, "standard_static", 1, False, "pyramid", True)),
    "Normalized Attention Guidance": ("flux", lambda model: node("nodes_nag", "NAGuidance", model, 5.0, 0.5, 1.5)),
    "Self-Attention Guidance": ("sdxl", lambda model: node("nodes_sag", "SelfAttentionGuidance", model, 0.8, 2.0)),
    "Perturbed-Attention Guidance": ("sdxl", lambda model: node("nodes_pag", "PerturbedAttentionGuidance", model, 2.0)),
}  # fmt: skip
CHECKED = [name for name in NODES if not name.endswith("Cache")]


def sampled(name, model, steps=2):
    """A latent with guidance, so that there are two conditionings, of which Self-Attention Guidance records one."""
    family, patch = NODES[name]
    conds = [families.conditioning(family, seed=seed) for seed in (1, 2)]
    start = families.noise(model, **SIZES.get(family, {}))
    run = core("comfy.sample").sample
    return run(patch(model), start, steps, 3.0, "euler", "simple", *conds, torch.zeros_like(start), seed=1)


@pytest.mark.parametrize("name", NODES)
def test_no_check_shows_in_the_picture(comfy, models, name):
    plain, steps = models(NODES[name][0], None, "bf16"), 2 if name in CHECKED else STEPS
    latents = [sampled(name, plain, steps), sampled(name, guarded(comfy, plain), steps)]
    model = guarded(comfy, plain, check="every 5th step")
    latents.append(sampled(name, model, steps))
    checks = report_of(model).checks
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])
    assert checks[0].left_out == "" and checks[0].snr_db > 25


@pytest.mark.parametrize("name", [name for name in NODES if name != "EasyCache"])
def test_an_overflow_is_cured_by_a_repeat_of_the_call_alone(comfy, models, name):
    steps = 2 if name in CHECKED else STEPS
    reference, plain = (models(NODES[name][0], "ffn", dtype) for dtype in ("fp32", "fp16"))
    expected = sampled(name, reference, steps)
    assert not relative_error(expected, sampled(name, plain, steps)) < 0.1
    model = guarded(comfy, plain)
    found = sampled(name, model, steps)
    report = report_of(model)
    assert is_finite(found) and relative_error(expected, found) < 0.05
    assert report.verdict == "recovered" and not any("restarted" in event.evidence for event in report.events)


def test_easycache_skips_the_same_steps_of_a_cured_run_and_of_the_next(comfy, models, caplog):
    """Not those of the model in fp32, to whose own latent it adds in place."""
    caplog.set_level("INFO")
    model = guarded(comfy, models("wan", "ffn", "fp16"))
    cured, extra = sampled("EasyCache", model, STEPS), report_of(model).extra_calls
    assert relative_error(sampled("EasyCache", model, STEPS), cured) < 0.01 and (
        extra,
        report_of(model).extra_calls,
    ) == (2, 0)
    first, second = (record.getMessage() for record in caplog.records if "skipped" in record.getMessage())
    assert first == second and "skipped 0/" not in first


class PrefixCache:
    """The switch and the methods of Qwen-Image 2.1; what it keeps is the whole result, whatever its dtype."""

    def __init__(self, module):
        self.result = None
        module.prefix_cache_enabled, module.reset_prefix_cache = True, self.reset

    def reset(self, enabled):
        assert enabled is True
        self.result = None

    def __call__(self, executor, args, kwargs):
        if args[5].get("qwen_image21_cache", {}).get("device") == "off":
            return executor(*args, **kwargs)
        self.result = executor(*args, **kwargs) if self.result is None else self.result
        return self.result


def test_no_call_reads_a_prefix_cache_that_the_failed_call_filled(comfy, overflowing):
    plain = plain_fp16(comfy, overflowing)
    model = guarded(comfy, inside(plain, PrefixCache(plain.model.diffusion_model)))
    assert is_finite(families.sample(model, "wan", steps=3))
    assert report_of(model).verdict == "recovered" and len(report_of(model).events) == 1


def test_a_check_runs_what_a_prefix_cache_would_give_it(comfy, wan):
    plain = families.load(comfy, wan, "fp16", "fp16")
    cache = PrefixCache(plain.model.diffusion_model)
    model = guarded(comfy, inside(plain, cache), check="first step")
    families.sample(model, "wan", steps=1)
    (check,) = report_of(model).checks
    assert check.left_out == "" and 48 < check.snr_db < 80


class PoseCache:
    """What Wan-Animate-2's cache does, for cores before 0.33: slots of the tensors that blocks were given."""

    def __init__(self):
        self.slots, self.slot = [], None

    def select(self, key):
        self.slot = self.slots[0] if self.slots else {"blocks": {}}
        self.slots = [self.slot]

    def filled(self, count):
        return len(self.slot["blocks"]) == count

    def put(self, index, x):
        self.slot["blocks"][index] = x

    def take(self, index, device, dtype, batch_size):
        return self.slot["blocks"][index].to(dtype)

    def free(self):
        self.slots, self.slot = [], None


PoseCache.__module__ = "comfy.ldm.wan.model_animate2"  # as what CoreState looks at
CACHES = {"stand-in": PoseCache}
with contextlib.suppress(ImportError):
    CACHES |= {
        dtype: functools.partial(core("comfy.ldm.wan.model_animate2").PoseBranchCache, dtype=dtype)
        for dtype in ("default", "int8", "int4")
    }


def posed(model, cache):
    """A clone that keeps the whole result of a call in the cache of Wan-Animate-2, as its model code keeps its pose branch."""

    def run(executor, args, kwargs):
        options = args[5]
        assert options.get("animate2_cache") in (cache, None)
        if options.get("animate2_cache") is None:
            return executor(*args, **kwargs)
        cache.select(torch.ones(1, 2))
        if not cache.filled(1):
            cache.put(0, executor(*args, **kwargs).reshape(1, -1, 64))  # tokens, of a width that 4 bits ask for
        return cache.take(0, args[0].device, args[0].dtype, 1).reshape(args[0].shape)

    clone = inside(model, run)
    clone.model_options["transformer_options"]["animate2_cache"] = cache
    return clone


@pytest.mark.parametrize("dtype", CACHES)
def test_no_call_reads_a_pose_cache_that_the_failed_call_filled(comfy, overflowing, dtype):
    model = guarded(comfy, posed(plain_fp16(comfy, overflowing), CACHES[dtype]()))
    assert is_finite(families.sample(model, "wan", steps=3))
    assert report_of(model).verdict == "recovered" and len(report_of(model).events) == 1


@pytest.mark.parametrize("dtype", CACHES)
def test_a_check_runs_what_a_pose_cache_would_give_it(comfy, wan, dtype):
    cache = CACHES[dtype]()
    model = guarded(comfy, posed(families.load(comfy, wan, "fp16", "fp16"), cache), check="first step")
    families.sample(model, "wan", steps=1)
    (check,) = report_of(model).checks
    assert check.left_out == "" and check.snr_db < 80
    assert (check.snr_db > 48) is (dtype in ("stand-in", "default")), "what is kept in fewer bits is farther from fp32"
    assert cache.slots == [], "no slot of the past is put back: its pinned memory is free"


def test_a_check_draws_no_random_numbers_of_pythons(comfy, wan):
    latents = []
    for check in ("off", "first step"):
        random.seed(7)
        changed = inside(
            families.load(comfy, wan, "bf16", "bf16"),
            lambda run, args, kwargs: run(*args, **kwargs) * (1 + 0.1 * random.random()),
        )
        model = guarded(comfy, changed, check=check)
        latents.append([families.sample(model, "wan", steps=3), torch.tensor(random.random())])
    assert all(map(torch.equal, *latents))
    (one,) = report_of(model).checks
    assert one.left_out == "" and one.snr_db > 33, "the call in fp32 drew what the call drew"


def test_the_holder_of_easycache_is_what_it_was_before_a_repeat(comfy):
    from halfsafe.nodes.host.replay.core_state import CoreState

    holder = nodes_easycache.EasyCacheHolder(0.2, 0.0, 1.0, 8, False)
    options = {"easycache": holder, "sample_sigmas": torch.ones(2)}
    before = CoreState(options)
    for _ in range(2):
        holder.uuid_cache_diffs["key"], holder.skip_current_step = torch.ones(1), True
        holder.output_change_rates.append(1.0)
        before.put_back()
        assert (holder.uuid_cache_diffs, holder.skip_current_step, holder.output_change_rates) == ({}, False, [])
