"""Layers that a call passed by: ComfyUI multiplied past their forwards, or did not use them.

What our code puts on a layer's forward has no effect there, without an error. ComfyUI 0.45 multiplies parallel layers
of Qwen 3.x text encoders by one combined weight (#17361); after 0.33 Z-Image multiplies past an int8 layer (#15928).
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ....precision.base.patching import compile_disabled

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


@contextlib.contextmanager
def modules_entered() -> Iterator[set[torch.nn.Module]]:
    """Collect the modules that are called in the context, on any thread, where compiled code runs as plain torch."""
    entered: set[torch.nn.Module] = set()
    handle = register_module_forward_pre_hook(lambda module, args: entered.add(module))
    try:
        with compile_disabled():
            yield entered
    finally:
        handle.remove()


def passed_by(
    model: torch.nn.Module, layers: Iterable[torch.nn.Module], entered: set[torch.nn.Module]
) -> list[torch.nn.Module]:
    """List those of the layers, which were not entered, that have a neighbour which was: the module that holds them, or
    another layer in it."""
    holders = {child: holder for holder in model.modules() for child in holder.children()}

    def holder_of(module: torch.nn.Module) -> torch.nn.Module:
        holder = holders[module]
        return holder_of(holder) if isinstance(holder, LISTS) and holder in holders else holder

    leaves = (module for module in holders if module in entered and next(module.children(), None) is None)
    active = {*entered, *map(holder_of, leaves)}
    return [layer for layer in layers if holder_of(layer) in active]
