"""Caches of results between steps, each keeping them in another place: no check shows in the picture, and no repeat is
given the result of the failed call."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from halfsafe.nodes.host.run.kept_state import KeptState
from support import caches, families
from support.caches import PLACES, STEPS, put_at, with_cache
from support.guarding import guarded, inside, is_finite, plain_fp16, report_of


@pytest.mark.parametrize("place", PLACES)
def test_no_check_shows_in_the_picture(comfy, wan, place):
    plain = families.load(comfy, wan, "bf16", "bf16")
    latents, checks = [], []
    for check in ("off", "first step", "every 5th step"):
        model = guarded(comfy, with_cache(plain, place, put_at(place)), check=check)
        latents.append(families.sample(model, "wan", steps=STEPS))
        checks += report_of(model).checks
    assert torch.equal(latents[0], latents[1]) and torch.equal(latents[0], latents[2])
    assert len(checks) == 2 and all(one.left_out == "" and one.snr_db > 33 for one in checks)


@pytest.fixture(scope="module")
def overflowing(models_dir):
    return families.files_in(models_dir / "diffusion_models", "kept")("wan", "ffn")


@pytest.mark.parametrize("place", PLACES)
def test_no_repeat_is_given_the_failed_result_and_none_stays(comfy, overflowing, place):
    model = guarded(comfy, with_cache(plain_fp16(comfy, overflowing), place, put_at(place)))
    assert is_finite(families.sample(model, "wan", steps=STEPS))
    assert report_of(model).verdict == "recovered" and len(report_of(model).events) == 1


def numbers():
    yield from range(1000)


def test_a_check_beside_a_generator_is_left_out_and_says_so(comfy, wan):
    """A suspended generator cannot be put back."""
    plain, drawn = families.load(comfy, wan, "bf16", "bf16"), []
    for check in ("off", "first step"):
        counting = numbers()

        def change(executor, args, kwargs, counting=counting):
            return executor(*args, **kwargs) * (1 + next(counting))

        model = guarded(comfy, inside(plain, change), check=check)
        drawn.append(families.sample(model, "wan", steps=STEPS))
    assert torch.equal(*drawn)
    assert report_of(model).checks[0].left_out.startswith("numbers (tests) goes on")


def test_what_cannot_be_put_back_is_named_and_is_not_called_a_fault_of_no_precision(comfy, overflowing):
    """A ``Mock`` keeps the first result out of reach."""
    kept = Mock(result=None)

    def change(executor, args, kwargs):
        kept.result = executor(*args, **kwargs) if kept.result is None else kept.result
        return kept.result

    model = guarded(comfy, inside(plain_fp16(comfy, overflowing), change))
    with pytest.raises(Exception, match="step cache of"):
        families.sample(model, "wan", steps=STEPS)
    assert report_of(model).verdict == "stopped"


@pytest.mark.parametrize("place", ["closure", "module-level dict"])
def test_a_repeat_that_is_broken_off_leaves_what_was_kept_before(comfy, overflowing, place):
    calls = Mock()
    read, write = PLACES[place]()

    def change(executor, args, kwargs):
        calls()
        write(executor.class_obj, args[5], ("left by call", calls.call_count))
        if calls.call_count == 3:
            raise KeyboardInterrupt
        return executor(*args, **kwargs)

    caches.OF_MODULE.clear()
    model = guarded(comfy, inside(plain_fp16(comfy, overflowing), change))
    with pytest.raises(KeyboardInterrupt):
        families.sample(model, "wan", steps=STEPS)
    assert calls.call_count == 3 and read(None, None) is None


def test_a_model_without_anything_of_others_has_few_places(comfy, wan):
    """No layer, container or weight is looked at."""
    model = families.load(comfy, wan, "fp16", "fp16").model
    state = KeptState(model, {})
    assert not state.keepers and len(state.places) < len(list(model.modules())) / 4
