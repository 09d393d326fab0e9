"""Graphs that combine a loader, a storage, LoRAs, merges, the pack's nodes, code of other packs and an end: factors, what cannot be combined, and drawing.

A case is one value of each factor of `FACTORS`; its row, as "family=wan device=sm_75 ...", makes it again. `pairs` covers every pair of two factors' values
that `CONSTRAINTS` allow; `draws` are whole random combinations. `composing` runs and judges a case. A new feature joins `FACTORS` first.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import combinations, product
from random import Random

Case = dict[str, str]
NODES = {
    "H": "HalfsafeAutoPrecision",
    "G": "HalfsafeNaNGuard",
    "A": "HalfsafeAccumulation",
    "C": "HalfsafeComputeDtype",
}
FACTORS: dict[str, tuple[str, ...]] = {
    "family": ("wan", "sd15", "flux", "lumina2"),
    "device": ("sm_75", "sm_89", "cpu"),
    "weights": ("in_range", "overflowing"),
    "source": ("core", "core_checkpoint", "ours", "our_checkpoint", "packed"),
    "storage": ("as_file", "fp8_e4m3fn", "fp8_e5m2", "int8", "nvfp4", "mxfp8"),
    "stored_by": ("file", "loader", "halfsafe", "end"),
    "compute": ("auto", "fp8", "fp16", "fp16_safe", "bf16", "fp32", "int8"),
    "lora": ("none", "before", "behind", "both", "hook", "hook_keyframes", "bypass"),
    "merge": ("none", "whole", "blocks"),
    "nodes": ("none", *"HGAC", *map("".join, (*product("HGAC", repeat=2), "CAG", "HGAC"))),
    "rules": ("default", "own"),
    "goal": ("balanced", "quality", "speed", "memory"),
    "on_nan": ("retry_higher", "stop", "report"),
    "check": ("off", "first step"),
    "foreign": ("none", "wrapper", "attn2", "block", "injected", "float64", "teacache", "magcache", "cache_dit"),
    "side": ("before", "behind"),
    "end": ("sample", "second_prompt", "unload", "save", "convert"),
}  # fmt: skip
"""``rules``: the default preset, or one that keeps a block's storage and computes it in fp32. ``nodes``: the pack's nodes in the order of the graph, by `NODES`. ``side``: where merge, foreign code and a bypass LoRA are, as ``before`` and ``behind`` of LoRAs."""

DEARER = {"flux": 1, "lumina2": 2, "sd15": 3, "second_prompt": 2, "unload": 1, "save": 1, "convert": 1}
"""Family or end -> how much more of the processor a case takes than one of Wan that samples once: of values that cover as many pairs the cheaper one is taken."""
TRIES = 50
OURS = ("ours", "our_checkpoint")
CONSTRAINTS: dict[str, Callable[..., bool]] = {
    "the file of a loader that packs weights in its own way has no storage of ComfyUI's": lambda source, stored_by, storage: source != "packed" or storage == "as_file" or stored_by in ("halfsafe", "end"),
    "packed weights end at 2, so they do not overflow": lambda source, weights: source != "packed" or weights == "in_range",
    "the stand-in packs layers in `blocks` alone": lambda source, family: source != "packed" or family != "lumina2",
    "ComfyUI's loaders take no storage": lambda source, stored_by: stored_by != "loader" or source in OURS,
    "only Halfsafe takes a storage for a model at hand": lambda stored_by, nodes: stored_by != "halfsafe" or "H" in nodes,
    "Halfsafe has no such storage": lambda stored_by, storage: stored_by != "halfsafe" or storage != "fp8_e5m2",
    "only Save Model and convert store at the end": lambda stored_by, end: stored_by != "end" or end in ("save", "convert"),
    "no node here takes a compute": lambda compute, source, nodes: compute == "auto" or source in OURS or "C" in nodes,
    "no node here takes rules": lambda rules, source, nodes, end: rules == "default" or source in OURS or end in ("save", "convert") or bool({*"HC"} & {*nodes}),
    "only Halfsafe takes a goal": lambda goal, nodes: goal == "balanced" or "H" in nodes,
    "only guards take on_nan": lambda on_nan, nodes: on_nan == "retry_higher" or "G" in nodes or "H" in nodes,
    "only guards take check": lambda check, nodes: check == "off" or "G" in nodes or "H" in nodes,
    "only UNets have an attn2": lambda foreign, family: foreign != "attn2" or family == "sd15",
    "ComfyUI alone cannot read a quantized file under a hook's LoRA": lambda lora, end, storage: not lora.startswith("hook") or end not in ("save", "convert") or storage == "as_file",
    "nothing of the pack is in the graph": lambda source, nodes, end: source in OURS or nodes != "none" or end in ("save", "convert"),
}  # fmt: skip
_FACTORS_OF = {words: tuple(inspect.signature(allows).parameters) for words, allows in CONSTRAINTS.items()}


FELL = (
    "family=wan device=sm_89 storage=fp8_e4m3fn stored_by=halfsafe nodes=H lora=behind",
    "family=wan device=sm_89 storage=int8 stored_by=halfsafe nodes=HC lora=both end=second_prompt",
    "family=wan device=sm_89 storage=int8 stored_by=halfsafe nodes=H lora=hook",
    "family=flux device=sm_89 source=ours storage=fp8_e4m3fn stored_by=loader lora=hook",
    "family=flux device=sm_75 storage=int8 stored_by=halfsafe nodes=H lora=hook_keyframes",
    "family=wan source=ours merge=whole end=save",
    "family=wan storage=int8 stored_by=halfsafe nodes=H merge=whole",
    "family=flux device=sm_89 source=ours storage=nvfp4 stored_by=loader rules=own",
    "family=flux storage=nvfp4 stored_by=end nodes=none rules=own end=save",
    "family=flux storage=nvfp4 stored_by=end nodes=none rules=own end=convert",
    "family=flux weights=overflowing nodes=G foreign=cache_dit",
    "family=wan nodes=G foreign=float64",
    "family=wan source=ours compute=fp16_safe foreign=float64",
    "family=sd15 nodes=C compute=fp16_safe foreign=attn2 side=behind",
    "family=sd15 weights=overflowing nodes=H foreign=attn2 end=second_prompt",
    "family=flux nodes=C compute=fp16_safe foreign=block side=behind",
    "family=wan device=sm_89 nodes=H goal=quality foreign=injected",
    "family=sd15 source=our_checkpoint weights=overflowing compute=int8 nodes=GH foreign=injected",
    "family=wan device=sm_89 weights=overflowing source=ours stored_by=loader compute=fp16 nodes=G foreign=block side=behind lora=hook_keyframes",
)
"""Cases that were wrong once, each the smallest of a cause."""


def refusal(case: Case) -> str:
    """Return why values cannot be combined, or "". Factors that the case lacks are not asked for."""
    for words, allows in CONSTRAINTS.items():
        factors = _FACTORS_OF[words]
        if all(factor in case for factor in factors) and not allows(*(case[factor] for factor in factors)):
            return words
    return ""


def row_of(case: Case) -> str:
    return " ".join(f"{factor}={case[factor].replace(' ', '_')}" for factor in FACTORS)


def case_of(row: str) -> Case:
    """Read a row. A factor that it lacks has its first value."""
    given = dict(part.split("=") for part in row.split())
    return {factor: next((v for v in values if v.replace(" ", "_") == given.get(factor)), values[0]) for factor, values in FACTORS.items()}  # fmt: skip


def _completed(case: Case, random: Random, choose: Callable[[Case, str], list[str]]) -> Case | None:
    """Fill the other factors in a random order, each with the first of the chosen values that the others allow; None if that fails each time."""
    for _ in range(TRIES):
        tried = dict(case)
        for factor in random.sample([*FACTORS], len(FACTORS)):
            if factor not in tried:
                values = (value for value in choose(tried, factor) if not refusal({**tried, factor: value}))
                tried[factor] = next(values, "")
        if "" not in tried.values():
            return tried
    return None


def draws(seed: int) -> Iterator[Case]:
    """Draw whole cases at random, without end."""
    random = Random(f"composed {seed}")
    while True:
        if case := _completed({}, random, lambda _, factor: random.sample(FACTORS[factor], len(FACTORS[factor]))):
            yield case


Pair = tuple[tuple[str, str], tuple[str, str]]


def all_pairs() -> list[Pair]:
    return [
        ((one, a), (other, b))
        for one, other in combinations(FACTORS, 2)
        for a, b in product(FACTORS[one], FACTORS[other])
    ]


@functools.cache
def pairs(seed: int = 0) -> tuple[tuple[Case, ...], frozenset[Pair]]:
    """Return the cases of `FELL` and others, which cover every pair of two factors' values, and the pairs that no case can have."""
    random, cases, impossible = Random(f"pairs {seed}"), list(map(case_of, FELL)), set()
    waiting = dict.fromkeys(random.sample(all_pairs(), len(all_pairs())))
    place = {factor: number for number, factor in enumerate(FACTORS)}

    def gain(case: Case, factor: str, value: str) -> int:
        here = factor, value
        return sum(
            ((here, other) if place[factor] < place[other[0]] else (other, here)) in waiting for other in case.items()
        )

    def choose(case: Case, factor: str) -> list[str]:
        values = random.sample(FACTORS[factor], len(FACTORS[factor]))
        return sorted(values, key=lambda value: (-gain(case, factor, value), DEARER.get(value, 0)))

    def covered(case: Case) -> None:
        for pair in combinations(((factor, case[factor]) for factor in FACTORS), 2):
            waiting.pop(pair, None)

    for case in cases:
        covered(case)
    while waiting:
        pair = next(iter(waiting))
        case = None if refusal(dict(pair)) else _completed(dict(pair), random, choose)
        if case is None:
            impossible.add(pair)
            del waiting[pair]
            continue
        cases.append(case)
        covered(case)
    return tuple(cases), frozenset(impossible)
