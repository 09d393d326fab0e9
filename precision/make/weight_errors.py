"""Errors of weights, measured as the weights are made, and sentences on weights that are quantized
again."""

import math
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping

from ..base.message import Message, joined
from ..base.text import listed
from ..formats.checkpoint import StoredWeight, read_checkpoint
from ..formats.comfy_format import Made
from ..formats.layer_plan import LayerPlan

PARTS = 8
VALUES_A_PART = 1 << 15
"""The error of a weight is measured on at most twice so many parts of so many values, which are
half a million: in fp8 the whole weight takes ten times as long as its conversion."""
AGAIN = (
    "{count} layers in {before} were quantized again, to {after}, with an error of {error} added.",
    "These are {names}.",
    "storage=as_file or as loaded does not round them again.",
)
MERGED = (
    "{count} layers in {before} were unpacked, merged with their patches and quantized again, to {after}, with an "
    "error of {error}.",
    "These are {names}.",
)


def measuring_errors(
    made: Iterable[Made], plans: Mapping[str, LayerPlan], errors: dict[str, float], all_changed: bool = True
) -> Iterator[Made]:
    """Yield weights as they are made, and put the relative error of each changed weight into
    ``errors`` by its name.

    ``all_changed``: False for those alone that are quantized again.
    """
    for weight, tensors in made:
        plan = plans[weight.name]
        if plan.again or (all_changed and plan.changes):
            errors[weight.name] = _error(weight, tensors)
        yield weight, tensors


def _error(weight: StoredWeight, tensors: Mapping) -> float:
    """Return the relative error of a weight as stored in ``tensors``, on a sample of its rows."""
    plain = weight.matrix(tensors[weight.name]) if len(tensors) == 1 else None  # of any name: a norm's may be ``scale``
    stored = weight if plain is not None else read_checkpoint(tensors, None, weight.name).weights[weight.name]
    error = size = 0.0
    for part, values in weight.parts(sample=PARTS, most=VALUES_A_PART):
        own = stored.rows(part) if plain is None else plain[part].float()
        error += (own - values).square().sum().item()
        size += values.square().sum().item()
    return math.sqrt(error / size) if size else 0.0


def told_again(plans: Mapping[str, LayerPlan], errors: Mapping[str, float], merged: Container[str] = ()) -> list[str]:
    """Return a message for each pair of storages that weights were quantized again between.

    ``errors``: of some of them; ``merged``: the names of weights that patches are merged into.
    """
    groups: dict[tuple[str, str, bool], list[str]] = defaultdict(list)
    for name, plan in plans.items():
        if plan.again:
            groups[plan.again, plan.stored, name in merged].append(name)
    told: list[str] = []
    for (before, after, is_merged), names in groups.items():
        found = [errors[name] for name in names if name in errors]
        error = f"{sum(found) / len(found):.1%}" if found else "an unknown size"
        layers = listed([name.removesuffix(".weight") for name in names], 2)
        values = {"count": len(names), "before": before, "after": after, "error": error, "names": layers}
        sentences = MERGED if is_merged else AGAIN
        told.append(joined(Message(sentence, **values) for sentence in sentences))
    return told
