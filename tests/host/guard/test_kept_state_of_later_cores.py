"""Caches of ComfyUI in repeats and checks: LazyCache, and one as WanAnimate2Cache (0.33) keeps it."""

import pytest
import torch
from comfy_extras import nodes_easycache
from support import families
from support.guarding import guarded, inside, is_finite, plain_fp16, report_of

STEPS = 8


@pytest.fixture
def overflowing(models_dir):
    return families.files_in(models_dir / "diffusion_models", "later_caches")("wan", "ffn")


class PoseBranchCache:
    """What the node puts into ``animate2_cache`` of the options: blocks of each pose sequence, in slots, the last used in the end."""

    def __init__(self):
        self.slots, self.slot, self._pending = [], None, {}

    def select(self, key) -> bool:
        self.slot = next((slot for slot in self.slots if torch.equal(slot["key"], key)), None)
        if self.slot is None:
            self.slot = {"key": key.clone(), "blocks": {}}
            self.slots.append(self.slot)
        return bool(self.slot["blocks"])

    def free(self) -> None:
        self.slots, self.slot = [], None


def animated(model):
    """A model with a cache that gives each step what the first one of its text made, as the pose branch is the same in all steps."""

    def change(executor, args, kwargs):
        cache = args[5]["animate2_cache"]
        if not cache.select(args[3]):
            cache.slot["blocks"][0] = executor(*args, **kwargs)
        return cache.slot["blocks"][0].clone()

    clone = inside(model, change)
    clone.model_options["transformer_options"]["animate2_cache"] = PoseBranchCache()
    return clone, clone.model_options["transformer_options"]["animate2_cache"]


def test_a_pose_that_the_failed_call_kept_is_read_by_no_repeat_and_no_later_step(comfy, overflowing):
    plain, cache = animated(plain_fp16(comfy, overflowing))
    model = guarded(comfy, plain)
    assert is_finite(families.sample(model, "wan", steps=3))
    assert report_of(model).verdict == "recovered" and len(report_of(model).events) == 1
    assert all(is_finite(kept) for slot in cache.slots for kept in slot["blocks"].values())


def test_a_check_of_a_pose_cache_is_of_the_model_and_leaves_the_cache(comfy, wan):
    plain, cache = animated(families.load(comfy, wan, "fp16", "fp16"))
    unchecked = families.sample(plain, "wan", steps=3)
    cache.free()
    model = guarded(comfy, plain, check="first step")
    assert torch.equal(unchecked, families.sample(model, "wan", steps=3))
    (check,) = report_of(model).checks
    assert check.left_out == "" and 48 < check.snr_db < 80


def lazy(model):
    """A model with LazyCache, which skips some of eight steps."""
    return nodes_easycache.LazyCacheNode.execute(model, 3.0, 0.0, 1.0, False).args[0]


def skipped(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]


def test_lazycache_skips_the_steps_of_a_cured_model_that_it_skips_of_the_model_in_fp32(comfy, overflowing, caplog):
    caplog.set_level("INFO")
    reference = families.sample(lazy(families.load(comfy, overflowing, "fp32", "fp32")), "wan", steps=STEPS)
    model = guarded(comfy, lazy(plain_fp16(comfy, overflowing)))
    result = families.sample(model, "wan", steps=STEPS)
    assert report_of(model).verdict == "recovered" and (result - reference).norm() < 0.02 * reference.norm()
    (first, second) = skipped(caplog)
    assert first == second and "skipped 0/" not in first


def test_a_check_changes_nothing_of_a_run_with_lazycache(comfy, wan):
    plain = lazy(families.load(comfy, wan, "fp16", "fp16"))
    model = guarded(comfy, plain, check="every 5th step")
    assert torch.equal(families.sample(plain, "wan", steps=STEPS), families.sample(model, "wan", steps=STEPS))
    assert report_of(model).checks and all(check.left_out == "" and check.snr_db > 48 for check in report_of(model).checks)
