"""Stand-ins for caches of results between steps, each keeping them in another place."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from types import SimpleNamespace

import torch
from support.guarding import inside

STEPS = 4
"""Of so many calls a cache makes one."""
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
    "attribute of a block": lambda: attribute(lambda model, options: block_of(model.diffusion_model)),
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


def block_of(module: torch.nn.Module) -> torch.nn.Module:
    """The first part of a diffusion model that is more than one of torch's or ComfyUI's layers."""
    return next(part for part in module.modules() if part is not module and type(part).__module__.startswith("comfy.ldm."))


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
    for module in (model.model, model.model.diffusion_model, block_of(model.model.diffusion_model)):
        vars(module).pop("state", None)
    clone = put(model, *PLACES[place]())
    clone.model_options["transformer_options"]["namespace"] = SimpleNamespace()
    return clone


def put_at(place):
    return as_forward if place in ("closure", "attribute of the diffusion model", "instance") else as_wrapper
