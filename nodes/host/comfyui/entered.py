"""Layers that a call passed by: ComfyUI multiplied past their forwards, or did not use them.

What our code puts on a layer's forward has no effect there, without an error. ComfyUI 0.45
multiplies parallel layers of Qwen 3.x text encoders by one combined weight (#17361); after 0.33
Z-Image multiplies past an int8 layer (#15928)."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ....precision.base.patching import compile_disabled

LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential)


class Entered(Counter[torch.nn.Module]):
    """How often each module was called."""

    @classmethod
    @contextlib.contextmanager
    def counted(cls) -> Iterator["Entered"]:
        """Count the calls of modules in the context, on any thread, where compiled code runs as
        plain torch."""
        entered = cls()
        handle = register_module_forward_pre_hook(lambda module, args: entered.update((module,)))
        try:
            with compile_disabled():
                yield entered
        finally:
            handle.remove()

    def passed_by(self, model: torch.nn.Module, layers: Mapping[torch.nn.Module, int]) -> list[torch.nn.Module]:
        """List the layers that ran less often than the module that holds them, as where decoding
        passes by them, and those that did not run although another layer in that module did.
        ``layers``: layer -> how often it ran."""
        holders = {child: holder for holder in model.modules() for child in holder.children()}

        def holder_of(module: torch.nn.Module) -> torch.nn.Module:
            holder = holders[module]
            return holder_of(holder) if isinstance(holder, LISTS) and holder in holders else holder

        leaves = (module for module in holders if module in self and next(module.children(), None) is None)
        active = {*self, *map(holder_of, leaves)}
        least = {layer: max(self[holder_of(layer)], holder_of(layer) in active) for layer in layers}
        return [layer for layer, runs in layers.items() if runs < least[layer]]
