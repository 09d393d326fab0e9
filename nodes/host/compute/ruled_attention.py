"""Attention in fp32 inside the blocks that rules name; the running block is tracked by its
forward."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from ....precision.base.layers import kind_of
from ....precision.base.message import Message
from ....precision.base.patching import Patch, watched_forward
from ....precision.plan.choice import WithoutEffect
from ....precision.plan.rules import Rule
from ..comfyui.layers import is_called_by_items

LISTED = 3
NO_BLOCK = "the pattern matches no block of layers in this model"
NO_ATTENTION = "no attention that ComfyUI allows to be replaced ran in a forward of {0}"


def _blocks_of(rules: Sequence[Rule], modules: Mapping[str, torch.nn.Module]) -> dict[str, list[Rule]]:
    """Map modules with children to their matching rules; modules without a match are omitted. The
    rules of a module that is never called itself, such as a list of blocks or a UNet's block, apply
    to its children."""
    found: dict[str, list[Rule]] = {}
    if not rules:
        return found
    passed_on: dict[str, list[Rule]] = {}
    for name, module in modules.items():
        if not name or next(module.children(), None) is None or kind_of(module) is not None:
            continue
        holder, _, own = name.rpartition(".")
        matching = [rule for rule in rules if rule.matches_block(name, type(module).__name__)]
        matching += [rule for rule in passed_on.get(holder, ()) if rule not in matching]
        if is_called_by_items(module, modules[holder], own):
            passed_on[name] = matching
        elif matching:
            found[name] = matching
    return found


class RuledAttention:
    """Blocks of a model whose attention runs in fp32 by rule. ``ran_in``: block -> its rules, for
    blocks in which an attention ran."""

    def __init__(self, rules: Sequence[Rule], modules: Mapping[str, torch.nn.Module]):
        self.rules = _blocks_of(rules, modules)
        self.ran_in: dict[str, list[Rule]] = {}
        self._blocks = {name: modules[name] for name in self.rules}
        self._methods = {name: _forwards(block) for name, block in self._blocks.items()}
        self._depth = 0
        self._seen = 0

    def patches(self) -> list[Patch]:
        """Return the patches that track whether a block is running."""
        return [
            patch
            for name, methods in self._methods.items()
            for method in methods
            for patch in watched_forward(self._blocks[name], partial(self._noted, name), method)
        ]

    def _noted(self, name: str, forward: Callable, *args, **kwargs):
        seen = self._seen
        self._depth += 1
        try:
            return forward(*args, **kwargs)
        finally:
            self._depth -= 1
            if self._seen > seen:
                self.ran_in[name] = self.rules[name]

    def ran_in_blocks(self) -> list[str]:
        """List the blocks in which an attention ran, without those inside of others."""
        return _outermost(self.ran_in)

    def is_inside(self) -> bool:
        return self._depth > 0

    def begin(self) -> None:
        self._seen = 0

    def note(self) -> None:
        """Count an attention. Not for compiled graphs, which would be recompiled for each count."""
        self._seen += 1


def _forwards(block: torch.nn.Module) -> list[str]:
    """List the methods that a model may call on a block: ``forward``, and instead of it
    ``forward_gen`` in Wan-Animate-2, ``forward_generation`` in SenseNova
    (``wan/model_animate2.py``, ``sensenova/model.py`` of ``comfy/ldm``)."""
    return [name for name in dir(type(block)) if name == "forward" or name.startswith("forward_")]


def _outermost(blocks: Collection[str]) -> list[str]:
    """Omit the blocks inside other blocks of the list."""
    names = set(blocks)
    return [name for name in blocks if not any(name.startswith(f"{other}.") for other in names)]


def idle_rules(
    rules: Sequence[Rule], modules: Mapping[str, torch.nn.Module], ran: RuledAttention | None
) -> Iterator[WithoutEffect]:
    """Yield the rules that match no block of a model, or only blocks without an attention.

    ``ran``: the rules in the calls so far; None before any call.
    """
    blocks = _blocks_of(rules, modules)
    for rule in rules:
        matched = _outermost([name for name, of_block in blocks.items() if rule in of_block])
        if not matched:
            yield WithoutEffect(str(rule), NO_BLOCK)
        elif ran and not any(rule in of_block for of_block in ran.ran_in.values()):
            yield WithoutEffect(str(rule), Message(NO_ATTENTION, ", ".join(matched[:LISTED])))
