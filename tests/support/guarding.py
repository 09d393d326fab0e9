"""What the guard tests share.

The guard puts back what hangs on a call before it repeats it, so that what counts calls here is a ``Mock``, which it
leaves alone as it does all of Python's own library.
"""

from __future__ import annotations

import importlib
from unittest.mock import Mock

import torch
from halfsafe.nodes.host.compute.per_model import runs_in
from halfsafe.nodes.host.guard.model import Guard
from support import families
from support.families import load


def guarded(comfy, model, on_nan: str = "retry_higher", max_retries: int = 8, check: str = "off"):
    """The model of the NaN Guard node."""
    return comfy.run("HalfsafeNaNGuard", model=model, on_nan=on_nan, max_retries=max_retries, check=check)[0]


def plain_fp16(comfy, path, storage: str = "fp16"):
    """The model of a file in plain fp16, the arithmetic that overflows."""
    return load(comfy, path, storage, "fp16")


def report_of(model):
    """The guard's report on a model."""
    return Guard.on(model).report(model)


def modes_of(model) -> dict[str, str]:
    """Layer -> the mode it runs in now, of all layers that multiply."""
    guard = Guard.on(model)
    own, now = guard.states.kept()[0].plan.modes, guard.states_of(model)
    return {name: now[name].mode if now[name].widened else mode for name, mode in own.items()}


def loaded_once(comfy, files):
    """(family, kind, dtype) -> the model of a file in that dtype, loaded when it is first asked for; guards have learned nothing of it."""
    loaded: dict[tuple, object] = {}

    def get(family: str, kind: str | None, dtype: str):
        key = (family, kind, dtype)
        if key not in loaded:
            loaded[key] = load(comfy, files(family, kind), dtype, dtype)
        runs_in(loaded[key].model).wider.clear()
        runs_in(loaded[key].model).fallback = False
        return loaded[key]

    return get


class Counted:
    """Counts the calls of a model's diffusion module."""

    def __init__(self, model):
        self._calls = Mock()
        self.module = model.model.diffusion_model
        self.forward = self.module.forward

    def __enter__(self) -> Counted:
        def run(*args, **kwargs):
            self._calls()
            return self.forward(*args, **kwargs)

        self.module.forward = run
        return self

    def __exit__(self, *error: object) -> None:
        del self.module.forward

    @property
    def count(self) -> int:
        return self._calls.call_count


def inside(model, change, key: str = "test.inside"):
    """A clone whose calls go through ``change(executor, args, kwargs)``, inside of the guard."""
    from comfy.patcher_extension import WrappersMP

    clone = model.clone()
    clone.add_wrapper_with_key(
        WrappersMP.APPLY_MODEL, key, lambda executor, *args, **kwargs: change(executor, args, kwargs)
    )
    return clone


def step_of(args: tuple) -> int:
    """Which step of the sampler's run the call with these arguments belongs to."""
    options = args[5]
    return int((options["sample_sigmas"] - options["sigmas"][0]).abs().argmin())


def nan_at(number: int):
    """For ``inside``: the result of the given call is NaN, as of a device that fails once."""
    calls = Mock()

    def change(executor, args, kwargs):
        calls()
        result = executor(*args, **kwargs)
        return result * torch.nan if calls.call_count == number else result

    return change


def raising_at(error: BaseException, number: int):
    """For ``inside``: the given call raises."""
    calls = Mock()

    def change(executor, args, kwargs):
        calls()
        if calls.call_count == number:
            raise error
        return executor(*args, **kwargs)

    return change


def left_on(model: torch.nn.Module) -> dict[str, set[str]]:
    """What every module of a model has of its own."""
    return {name: set(module.__dict__) for name, module in model.named_modules()}


def is_finite(tensor: torch.Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


def core(module: str):
    """A module of ComfyUI, whose name the fixture ``comfy`` takes."""
    return importlib.import_module(module)


def sample(model, positive, negative=None, cfg=3.0, steps=2, sampler="euler", batch=1, **options) -> torch.Tensor:
    """A latent from ComfyUI's sampler with both conditionings."""
    start = families.noise(model, batch)
    negative = negative or families.conditioning("wan", seed=9)
    run = core("comfy.sample").sample
    return run(
        model, start, steps, cfg, sampler, "simple", positive, negative, torch.zeros_like(start), seed=1, **options
    )


def int8_attention(function, q, k, v, heads, *args, **kwargs):
    """An attention kernel of another pack, for ``optimized_attention_override``: in block 1 its result has few levels."""
    result = function(q, k, v, heads, *args, **kwargs)
    if kwargs["transformer_options"].get("block_index") != 1:
        return result
    step = result.abs().amax() / 2
    return (result / step).round() * step
