"""Tell what was done with the patches of 8-bit weights, why, and what it costs: by layer, and for the whole model."""

from typing import TYPE_CHECKING

from ....precision.arithmetic.merging import MergingError
from .merging import errors_of
from .patcher import UnmergedLowRank
from .patches import layer_name

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher

Outweighing = list[tuple[int, MergingError]]
"""Of each layer: the rank of its LoRAs, and what merging costs."""


def low_rank_reasons(extended: "ModelPatcher") -> dict[str, str]:
    """Say by layer what was done with the patches of its 8-bit weight; nothing for ComfyUI's own ModelPatcher."""
    if not isinstance(extended, UnmergedLowRank):
        return {}
    patches, errors = extended.sorted_patches(), errors_of(extended)
    ranks = {key: sum(change.rank for change in changes.values()) for key, changes in patches.low_rank.items()}
    found = {key: f"LoRA of rank {rank} added beside the weight" for key, rank in ranks.items()}
    for key in patches.outweighing.keys() & patches.kept:
        found[key] += f"; merging would round {errors[key].of_change:.0%} of its change away"
    text = "weight quantized anew, rounded to nearest, with {} merged into it"
    found |= {key: text.format(reason) + _error(errors.get(key)) for key, reason in patches.merged.items()}
    return {layer_name(key): text for key, text in found.items()}


def _error(error: MergingError | None) -> str:
    if error is None:
        return ""
    return f"; rounding it is off by {error.of_weight:.2%} of the weight, {error.of_change:.1%} of its change"


def merging_notes(extended: "ModelPatcher") -> list[str]:
    """Say how many layers have LoRAs that outweigh them, what was done with those and why, and what it costs."""
    if not isinstance(extended, UnmergedLowRank):
        return []
    patches = extended.sorted_patches()
    merged = [found for key, found in patches.outweighing.items() if key in patches.merged]
    beside = [found for key, found in patches.outweighing.items() if key in patches.kept]
    return [note(found) for note, found in ((_merged, merged), (_beside, beside)) if found]


def _merged(found: Outweighing) -> str:
    ranks, errors = [rank for rank, _ in found], [error for _, error in found]
    weight, change = max(error.of_weight for error in errors), max(error.of_change for error in errors)
    return (
        f"{len(found)} layers have their LoRAs merged into the 8-bit weight, in fp32 and rounded to nearest. "
        f"Their ranks add up to {min(ranks)} to {max(ranks)}: beside the weight they would take more memory than it "
        "and more time than its 8-bit product. "
        f"Rounding is off by at most {weight:.2%} of a weight and {change:.1%} of what the LoRAs change."
    )


def _beside(found: Outweighing) -> str:
    lost = max(error.of_change for _, error in found)
    return (
        f"{len(found)} layers keep LoRAs beside the 8-bit weight that take more memory than it: "
        f"merged, rounding would lose up to {lost:.0%} of what they change. Fewer or smaller LoRAs are faster."
    )
