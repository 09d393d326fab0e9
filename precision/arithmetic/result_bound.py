"""Which results may be fp16: those proven to fit it, as long as what model code makes of them fits it too.

Inside of a block a stream in fp32 passes a norm and then a chain of layers whose result is added to it, in fp32 since
one of the two is. What the chain holds in between may be fp16. A layer that begins a stream, such as an embedder or
SDXL's ``proj_in``, must return fp32: ComfyUI clamps fp16 streams in silence (``nan_to_num`` in
``comfy/ldm/flux/layers.py``).
"""

import math
import re

import torch

from ..base.dtypes import FP16_MAX
from .operand_scale import OperandScale

LARGEST_FACTOR = 128.0
"""Results that model code may multiply with each other, as gated MLPs do:
twice this squared is fp16's largest number."""

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
    """Return the largest result that the layer of this name may return in fp16; None where it must be fp32."""
    if _FACTORS.fullmatch(name):
        return LARGEST_FACTOR
    return FP16_MAX if _SUMMANDS.fullmatch(name) else None


class Fp16Results:
    """Choose the operations of a model to return fp16, in calls that calibrate.

    What model code makes of two fp16 results can still overflow, and is then the operand of a later operation: fp16
    results are given up for the model. ``allowed``: any result may be fp16. ``any_returned``: a layer or an attention
    has returned fp16 in this call. ``scales``: those of all operations.
    """

    def __init__(self) -> None:
        self.allowed = False
        self.scales: list[OperandScale] = []
        self.begin()

    def begin(self) -> None:
        """Start a call that calibrates, with nothing proven yet."""
        self.any_returned = False
        self._block: list[OperandScale] = []
        self._overflowed = False
        self._widened = False
        for scale in self.scales:
            scale.fits_result = False

    def note_result(self, scale: OperandScale) -> None:
        """Count an operation with an fp16 result to the block of operations that runs."""
        self.any_returned = True
        self._block.append(scale)

    def give_up(self, scale: OperandScale) -> None:
        """Refute the proof of an operation whose result must be fp32 after all; the call is made again."""
        scale.refute_result()
        self._widened = True

    def note_operand(self, magnitude: float, dtype: torch.dtype) -> None:
        """Look for an overflow in an operand, by its amax: an fp16 result may be the reason."""
        if self.any_returned:
            # ComfyUI clamps what overflows in some models (``clamp_fp16`` in comfy/ldm/lumina/model.py): fp16's largest
            # number counts as not finite.
            limit = FP16_MAX if dtype == torch.float16 else math.inf
            self._overflowed = self._overflowed or not magnitude < limit

    def close_block(self, coarse: bool) -> None:
        """End the block of operations that ran. ``coarse``: fp16 is too coarse for what is made of their results."""
        if coarse and self._block:
            self._widened = True
            for scale in self._block:
                scale.is_refuted = True
        self._block = []

    def conclude(self) -> bool:
        """Give up what the call has refuted; return whether that was anything, so that the call must be made again."""
        self.allowed = self.allowed and not self._overflowed
        return self._overflowed or self._widened
