"""Decide which layers may return fp16: their result is bounded, and the operations that consume it have not overflowed.

In a block, an fp32 stream passes a norm and then a chain of layers whose result is added to the stream, in fp32 because
one summand is fp32. Values inside the chain may be fp16. A layer that starts a stream, such as an embedder or SDXL's
``proj_in``, must return fp32: ComfyUI clamps fp16 streams silently (``nan_to_num`` in ``comfy/ldm/flux/layers.py``).
"""

import math
import re

import torch

from ..base.dtypes import FP16_MAX
from .operand_scale import OperandScale

LARGEST_FACTOR = 128.0
"""Largest results that model code may multiply with each other, as gated MLPs do: with a headroom factor of 2 each,
their product is 2**16, the end of fp16's range."""

_BLOCK = r"(?:.*\.)?(?:\w*blocks|layers|\w*refiner)\.\d+\.(?:.*\.)?"
_ATTENTION = r"\w*att(?:n|ention)\d?\."
_MLP = r"(?:ffn?|feed_forward|\w*mlp)\."
_FACTORS = re.compile(
    rf"{_BLOCK}(?:{_ATTENTION}(?:(?:to_)?[qkv]|(?:to_)?qkv|add_[qkv]_proj|[kv]_img)"
    rf"|{_MLP}(?:0|fc1|w1|w3|net\.0\.proj)|linear1|in_layers\.2)"
)
_SUMMANDS = re.compile(
    rf"{_BLOCK}(?:{_ATTENTION}(?:o|out|proj|to_out\.0|to_add_out)|{_MLP}(?:2|fc2|w2|net\.2)|linear2|out_layers\.3)"
)


def largest_fp16_result(name: str) -> float | None:
    """Return the largest result that the layer of this name may return in fp16; None if it must return fp32."""
    if _FACTORS.fullmatch(name):
        return LARGEST_FACTOR
    return FP16_MAX if _SUMMANDS.fullmatch(name) else None


class Fp16Results:
    """Choose the operations of a model that return fp16, in calibrating calls.

    Model code can still overflow when it combines two fp16 results; the overflow is then the operand of a later
    operation, and fp16 results are disabled for the model. ``allowed``: results may be fp16. ``any_returned``: a layer
    or an attention returned fp16 in this call. ``scales``: the scales of all operations.
    """

    def __init__(self) -> None:
        self.allowed = False
        self.scales: list[OperandScale] = []
        self.begin()

    def begin(self) -> None:
        """Start a calibrating call, without any proven result."""
        self.any_returned = False
        self._block: list[OperandScale] = []
        self._overflowed = False
        self._widened = False
        for scale in self.scales:
            scale.fits_result = False

    def note_result(self, scale: OperandScale) -> None:
        """Add an operation with an fp16 result to the current block."""
        self.any_returned = True
        self._block.append(scale)

    def give_up(self, scale: OperandScale) -> None:
        """Refute the proof of an operation whose result must be fp32; the call is repeated."""
        scale.refute_result()
        self._widened = True

    def note_operand(self, magnitude: float, dtype: torch.dtype) -> None:
        """Check the amax of an operand for an overflow, which fp16 results may have caused."""
        if self.any_returned:
            # ComfyUI clamps what overflows in some models (``clamp_fp16`` in comfy/ldm/lumina/model.py): fp16's largest
            # number counts as not finite.
            limit = FP16_MAX if dtype == torch.float16 else math.inf
            self._overflowed = self._overflowed or not magnitude < limit

    def close_block(self, coarse: bool) -> None:
        """End the current block of operations. ``coarse``: fp16 is too coarse for the values computed from their
        results."""
        if coarse and self._block:
            self._widened = True
            for scale in self._block:
                scale.is_refuted = True
        self._block = []

    def conclude(self) -> bool:
        """Apply the refutations of this call. Returns True if there were any, so that the call has to be repeated."""
        self.allowed = self.allowed and not self._overflowed
        return self._overflowed or self._widened
