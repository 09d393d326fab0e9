"""What models and nodes keep of one call for the next, in repeats and checks: small stand-ins for caches of newer cores."""

from unittest.mock import Mock

import pytest
import torch
from support import families
from support.guarding import guarded, inside, is_finite, plain_fp16, report_of


class PrefixCache:
    """The switch and the methods of Qwen-Image 2.1; what it keeps is the whole result, whatever its dtype."""

    def __init__(self, module):
        self.kept = None
        module.prefix_cache_enabled, module.reset_prefix_cache = True, self.reset

    def reset(self, enabled):
        assert enabled is True
        self.kept = None

    def __call__(self, executor, args, kwargs):
        if args[5].get("qwen_image21_cache", {}).get("device") == "off":
            return executor(*args, **kwargs)
        self.kept = executor(*args, **kwargs) if self.kept is None else self.kept
        return self.kept


@pytest.fixture
def overflowing(models_dir):
    return families.files_in(models_dir / "diffusion_models", "caches")("wan", "ffn")


def test_a_prefix_cache_that_the_failed_call_filled_is_read_by_no_repeat_and_no_later_call(comfy, overflowing):
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
    assert check.left_out == "" and 48 < check.snr_db < 80 and cache.kept.isfinite().all()


class Patch:
    """A patch that keeps a dict, as FluxKVCache's does."""

    def __init__(self):
        self.cache = {}

    def __call__(self, executor, args, kwargs):
        if "result" not in self.cache:
            self.cache["result"] = executor(*args, **kwargs)
        return self.cache["result"]


def keeping(model, patch=None):
    patch = patch or Patch()
    clone = inside(model, patch)
    clone.model_options["transformer_options"].setdefault("patches", {})["kept_by_a_test"] = [patch]
    return clone, patch


def test_a_repeat_sees_and_leaves_what_a_patch_kept_before_the_call(comfy, overflowing):
    plain, patch = keeping(plain_fp16(comfy, overflowing))
    model = guarded(comfy, plain)
    assert is_finite(families.sample(model, "wan", steps=3))
    assert report_of(model).verdict == "recovered" and len(report_of(model).events) == 1 and is_finite(patch.cache["result"])


class InterruptedPatch(Patch):
    """A patch in whose second call the user stops the program."""

    def __init__(self):
        super().__init__()
        self.calls = Mock()

    def __call__(self, executor, args, kwargs):
        self.calls()
        if self.calls.call_count == 2:
            raise KeyboardInterrupt
        return super().__call__(executor, args, kwargs)


def test_a_check_that_is_broken_off_leaves_what_a_patch_kept_of_the_call_itself(comfy, wan):
    plain, patch = keeping(families.load(comfy, wan, "fp16", "fp16"), InterruptedPatch())
    model = guarded(comfy, plain, check="first step")
    with pytest.raises(KeyboardInterrupt):
        families.sample(model, "wan", steps=1)
    assert patch.calls.call_count == 2 and list(patch.cache) == ["result"]


def test_a_check_leaves_what_a_patch_kept_of_the_call_itself(comfy, wan):
    plain, patch = keeping(families.load(comfy, wan, "fp16", "fp16"))
    unchecked = families.sample(plain, "wan", steps=3)
    patch.cache = {}
    model = guarded(comfy, plain, check="first step")
    assert torch.equal(unchecked, families.sample(model, "wan", steps=3))
    (check,) = report_of(model).checks
    assert check.left_out == "" and 48 < check.snr_db < 80
