"""Caches of results between steps, each keeping them in another place: no check shows in the picture, and no repeat is
given the result of the failed call."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from halfsafe.nodes.host.run.kept_state import KeptState
from support import families
from support.guarding import guarded, inside, is_finite, plain_fp16, report_of

STEPS = 4
OF_MODULE: dict = {}
OF_MODELS: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
rebound = (0, None)


class Slotted:
    __slots__ = ("state",)


class OnTheClass:
    state = (0, None)


class Keeper:
    """A cache of an own class."""


def of_module():
    return lambda model, options: OF_MODULE.get("state"), lambda model, options, state: OF_MODULE.update(state=state)


def global_name():
    def write(model, options, state):
        global rebound
        rebound = state

    return lambda model, options: rebound, write


def weak_dict():
    return lambda model, options: OF_MODELS.get(model), lambda model, options, state: OF_MODELS.__setitem__(
        model, state
    )


def attribute(of):
    return lambda model, options: getattr(of(model, options), "state", None), lambda model, options, state: setattr(
        of(model, options), "state", state
    )


def in_a_closure():
    state = None

    def write(model, options, new):
        nonlocal state
        state = new

    return lambda model, options: state, write


def in_a_deque():
    kept = deque(maxlen=1)
    return lambda model, options: kept[0] if kept else None, lambda model, options, state: kept.append(state)


def in_a_default():
    def use(new=None, kept=[None]):  # noqa: B006
        kept[0] = new or kept[0]
        return kept[0]

    return lambda model, options: use(), lambda model, options, state: use(state)


def of_a_function():
    def use():
        return use.__dict__.get("state")

    return lambda model, options: use(), lambda model, options, state: setattr(use, "state", state)


def in_place():
    """The result is written into a tensor that is made once."""
    kept = {}

    def read(model, options):
        return (kept["count"], kept["result"].clone()) if kept else None

    def write(model, options, state):
        kept.setdefault("result", torch.empty_like(state[1])).copy_(state[1])
        kept["count"] = state[0]

    return read, write


def fixed(value):
    return lambda: attribute(lambda model, options: value)


PLACES = {
    "module-level dict": of_module,
    "module-level name": global_name,
    "dict with weak keys": weak_dict,
    "attribute of the model": lambda: attribute(lambda model, options: model),
    "attribute of the diffusion model": lambda: attribute(lambda model, options: model.diffusion_model),
    "attribute of a block": lambda: attribute(lambda model, options: model.diffusion_model.blocks[1].self_attn),
    "closure": in_a_closure,
    "deque": in_a_deque,
    "mutable default": in_a_default,
    "attribute of a function": of_a_function,
    "tensor written in place": in_place,
    "instance": lambda: fixed(Keeper())(),
    "slots": lambda: fixed(Slotted())(),
    "class": lambda: fixed(OnTheClass)(),
    "namespace in transformer_options": lambda: attribute(lambda model, options: options["namespace"]),
}


def cached(read, write, model, options, compute):
    """One call of every ``STEPS`` runs, and the others are given what it returned."""
    count, kept = read(model, options) or (0, None)
    result = compute() if kept is None or count % STEPS == 0 else kept
    write(model, options, (count + 1, result))
    return result


def as_wrapper(model, read, write):
    """The cache as a wrapper around the call."""

    def change(executor, args, kwargs):
        return cached(read, write, executor.class_obj, args[5], lambda: executor(*args, **kwargs))

    return inside(model, change)


def as_forward(model, read, write):
    """The cache as the forward of the diffusion model, which TeaCache and others exchange."""
    module = model.model.diffusion_model
    own = type(module).forward.__get__(module)

    def forward(*args, transformer_options, **kwargs):
        compute = functools.partial(own, *args, transformer_options=transformer_options, **kwargs)
        return cached(read, write, model.model, transformer_options, compute)

    clone = model.clone()
    clone.add_object_patch("diffusion_model.forward", forward)
    return clone


def with_cache(model, place, put):
    OF_MODULE.clear(), OF_MODELS.clear(), globals().update(rebound=(0, None))
    OnTheClass.state = (0, None)
    for module in (model.model, model.model.diffusion_model, model.model.diffusion_model.blocks[1].self_attn):
        vars(module).pop("state", None)
    clone = put(model, *PLACES[place]())
    clone.model_options["transformer_options"]["namespace"] = SimpleNamespace()
    return clone


def put_at(place):
    return as_forward if place in ("closure", "attribute of the diffusion model", "instance") else as_wrapper


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

    OF_MODULE.clear()
    model = guarded(comfy, inside(plain_fp16(comfy, overflowing), change))
    with pytest.raises(KeyboardInterrupt):
        families.sample(model, "wan", steps=STEPS)
    assert calls.call_count == 3 and read(None, None) is None


def test_a_model_without_anything_of_others_has_few_places(comfy, wan):
    """No layer, container or weight is looked at."""
    model = families.load(comfy, wan, "fp16", "fp16").model
    state = KeptState(model, {})
    assert not state.keepers and len(state.places) < len(list(model.modules())) / 4
