"""Which layers of an fp16_safe model may return fp16, by their names:
those whose result does not begin a residual stream.

Inside of a block a stream in fp32 passes a norm and then a chain of layers whose result is added to it, in fp32 since
one of the two is. What the chain holds in between may be fp16. A layer that begins a stream, such as an embedder or
SDXL's ``proj_in``, must return fp32: ComfyUI clamps fp16 streams in silence (``nan_to_num`` in
``comfy/ldm/flux/layers.py``).
"""

import re

from ..base.dtypes import FP16_MAX

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
