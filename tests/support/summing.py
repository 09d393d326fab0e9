"""What the accumulation tests share: the node, a look inside of a model's calls, the fp16 products it makes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from halfsafe.precision.base import flags
from support import families

FP16_ACCUMULATION = "fp16_accumulation"
SETTINGS = ("fp16_accumulation", "reduced_precision_reduction", "tf32", "fp8_fast_accumulation", "attention")


def accumulation(comfy, model, **wanted: str):
    """The model of the Accumulation node with these settings and the others unchanged."""
    return comfy.run("HalfsafeAccumulation", model=model, **{**dict.fromkeys(SETTINGS, "unchanged"), **wanted})[0]


def states() -> dict[str, object]:
    """The exact state of every flag."""
    return {name: flags.state_of(name) for name in flags.SETTINGS}


def spied(model, action):
    """A clone that runs ``action`` inside of the model's call, in the place of the diffusion model."""
    from comfy.patcher_extension import WrappersMP

    clone = model.clone()

    def run(executor, x, *args, **kwargs):
        action()
        return executor(x, *args, **kwargs)

    clone.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "spy", run)
    return clone


def raising(error):
    def action():
        raise error

    return action


@contextlib.contextmanager
def started_with(names, value: bool) -> Iterator[dict]:
    """ComfyUI as started with these flags, as its own --fast does: written, not scoped."""
    before = states()
    try:
        for name in names:
            flags.SETTINGS[name].write(value)
        yield states()
    finally:
        for name in names:
            flags.SETTINGS[name].write(before[name])


class Products(torch.overrides.TorchFunctionMode):
    """Each Linear product in fp16: its weight's shape and whether the flag was on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear and args[0].dtype == torch.float16:
            self.seen.append((tuple(args[1].shape), flags.is_on(FP16_ACCUMULATION)))
        if func is torch.addmm and args[1].dtype == torch.float16:
            self.seen.append((tuple(args[2].shape[::-1]), flags.is_on(FP16_ACCUMULATION)))
        return func(*args, **(kwargs or {}))


def products(model, call, **changes):
    with Products() as mode:
        result = families.replay(model, call, **changes)
    return mode.seen, result
