"""Tell which patches are low-rank: ComfyUI's adapters (``comfy/weight_adapter``) as factors ``down`` and ``up``.

A patch is ``(strength, value, strength of the model, offset, function)``, as ``ModelPatcher.add_patches`` keeps it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from comfy.weight_adapter import LoHaAdapter, LoKrAdapter, LoRAAdapter

from ....precision.arithmetic.low_rank import Factors, hadamard_factors, kronecker_factors, normalized

Shape = tuple[int, int]
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class LowRank:
    """One low-rank change of a weight, its factors not made yet.

    Args:
        adapter: ComfyUI's adapter, which holds the tensors.
        rank: of the factors.
        shape: ``(outputs, inputs)`` of the change.
        alpha: what the product of the factors is multiplied by, besides the patch's strength.
        make: makes ``(down, up)``.
        offset: ``(axis, start, length)`` of the part of the weight that changes, or None.
    """

    adapter: object
    rank: int
    shape: Shape
    alpha: float
    make: Callable[[], Pair]
    offset: tuple[int, int, int] | None = None

    @property
    def key(self) -> tuple:
        """The key of the patch that this change was made of."""
        return key_of(self.adapter, self.offset)

    def factors(self, whole: Shape, dtype: torch.dtype) -> Factors:
        """Make the factors for a weight of shape ``whole``, with zeros where the change has no part."""
        down, up = self.make()
        if self.offset is not None:
            axis, start, _ = self.offset
            down, up = (down, _placed(up, 0, start, whole[0])) if axis == 0 else (_placed(down, 1, start, whole[1]), up)
        made = normalized(down, up, dtype)
        return Factors(made.down, made.up, made.scale * self.alpha)


def _placed(tensor: torch.Tensor, axis: int, start: int, size: int) -> torch.Tensor:
    """Pad an axis with zeros to ``size``, so that the tensor starts at ``start``."""
    shape = list(tensor.shape)
    shape[axis] = size
    whole = torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)
    whole.narrow(axis, start, tensor.shape[axis]).copy_(tensor)
    return whole


def low_rank(patch: tuple, whole: Shape) -> LowRank | str:
    """Express a patch of a weight of shape ``(outputs, inputs)`` as a low-rank change, or say what it is instead."""
    _, value, strength_model, offset, function = patch
    if strength_model != 1.0:
        return "a merge of models"
    read = READERS.get(type(value))
    if read is None:
        return f"a patch of kind '{_kind(value)}'"
    if function is not None:
        return "a patch that rearranges the weight's rows"
    found = read(value)
    if isinstance(found, str):
        return found
    part = _part(whole, offset)
    if found.shape != part:
        return f"a patch of shape {found.shape} for one of {part}"
    return replace(found, offset=offset and tuple(offset))


def key_of(value: object, offset: Sequence[int] | None) -> tuple:
    """Tell a patch from others of the same weight, for as long as its value lives."""
    return id(value), offset and tuple(offset)


def _kind(value: object) -> str:
    """Name the kind of a patch's value, as ``calculate_weight`` of ``comfy/lora.py`` distinguishes them."""
    if isinstance(value, tuple):
        return value[0] if len(value) == 2 and isinstance(value[0], str) else "diff"
    return getattr(value, "name", "weights of another model")


def _part(whole: Shape, offset: tuple[int, int, int] | None) -> Shape:
    if offset is None:
        return whole
    return (offset[2], whole[1]) if offset[0] == 0 else (whole[0], offset[2])


def _lora(adapter: LoRAAdapter) -> LowRank | str:
    up, down, alpha, mid, dora_scale, reshape = adapter.weights
    if dora_scale is not None:
        return "a DoRA, which scales the weight too"
    if mid is not None or reshape is not None:
        return "a LoRA that resizes the weight"
    up, down = up.flatten(1), down.flatten(1)
    scale = 1.0 if alpha is None else alpha / down.shape[0]
    return LowRank(adapter, len(down), (len(up), down.shape[1]), scale, lambda: (down, up))


def _loha(adapter: LoHaAdapter) -> LowRank | str:
    up1, down1, alpha, up2, down2, core1, _, dora_scale = adapter.weights
    if dora_scale is not None or core1 is not None or _is_of_convolution(up1, down1, up2, down2):
        return "a LoHa with a core or with DoRA"
    scale = 1.0 if alpha is None else alpha / len(down1)
    rank, shape = len(down1) * len(down2), (len(up1), down1.shape[1])
    change = LowRank(adapter, rank, shape, scale, lambda: hadamard_factors([down1, down2], [up1, up2]))
    return _if_it_is_small(change, "LoHa")


def _lokr(adapter: LoKrAdapter) -> LowRank | str:
    whole1, whole2, alpha, up1, down1, up2, down2, core, dora_scale = adapter.weights
    if dora_scale is not None or core is not None or _is_of_convolution(whole1, whole2, up1, down1, up2, down2):
        return "a LoKr with a core or with DoRA"
    factored = [down for whole, down in ((whole1, down1), (whole2, down2)) if whole is None]
    scale = 1.0 if alpha is None or not factored else alpha / len(factored[-1])
    pairs = [_pair(whole1, down1, up1), _pair(whole2, down2, up2)]
    downs, ups = ([pair[index] for pair in pairs] for index in (0, 1))
    rank, outputs, inputs = (a * b for a, b in zip(_sizes(pairs[0]), _sizes(pairs[1]), strict=True))
    change = LowRank(adapter, rank, (outputs, inputs), scale, lambda: kronecker_factors(downs, ups))
    return _if_it_is_small(change, "LoKr")


def _pair(whole: torch.Tensor | None, down: torch.Tensor, up: torch.Tensor) -> Pair:
    """Return (down, up) of a Kronecker factor; of one that is kept whole, the smaller of the two is the identity."""
    if whole is None:
        return down, up
    outputs, inputs = whole.shape[:2]
    return (whole, torch.eye(outputs)) if outputs < inputs else (torch.eye(inputs), whole)


def _sizes(pair: Pair) -> tuple[int, int, int]:
    down, up = pair
    return len(down), len(up), down.shape[1]


def _is_of_convolution(*tensors: torch.Tensor | None) -> bool:
    return any(tensor is not None and tensor.dim() != 2 for tensor in tensors)


def _if_it_is_small(change: LowRank, kind: str) -> LowRank | str:
    """Return a change whose factors have no more numbers than it has, or say that it is larger."""
    outputs, inputs = change.shape
    if change.rank * (outputs + inputs) > outputs * inputs:
        return f"a {kind} of rank {change.rank}, which is not low for {outputs} x {inputs}"
    return change


READERS: dict[type, Callable] = {LoRAAdapter: _lora, LoHaAdapter: _loha, LoKrAdapter: _lokr}
