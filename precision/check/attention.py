"""Compute some rows of an attention in fp32, to compare an attention of quantized operands with.

A whole call in fp32 takes several times a step of a long video, and memory that is not there. The error of a kernel
shows in any of its rows: at most ``ROWS`` queries, from the first to the last, of at most ``HEADS`` heads are computed,
against all keys, one head after another. For 160,000 tokens of 128 numbers that takes about 300 MB, whatever the model.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..base import amax

ROWS = 64
HEADS = 8
LEAST_DB = 10.0
"""The SNR below which an attention with operands in 8 bits is reported: an error of 32 % of its result. Rounded as
8-bit kernels round, normally distributed values have 27 to 34 dB; noise has 0 dB or less."""
LEAST_DB_OF_4_BITS = 5.0
"""The same for operands in 4 bits: values rounded as fp4 kernels round have 9 to 15 dB."""
LOWEST_DB = -300.0
MANY_TOKENS = 100_000
"""Tokens above which attentions are checked on each device (Comfy-Org/ComfyUI#15263: noise above about 160,000)."""


@torch.no_grad()
def beside_fp32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Compute evenly spaced rows of ``softmax(q k^T scale + mask) v`` in fp32.

    Returns a function of a result (batch, heads, queries, d): the powers (of its error, of the signal) in these rows.

    Args:
        q: (batch, heads, queries, d). ``k``, ``v``: (batch, heads or a divisor of heads, keys, d and the result's d).
        mask: bool, True for keys that count, or added to the scores; broadcast to (batch, heads, queries, keys).
        scale: factor of the scores.

    Raises:
        RuntimeError: the shapes do not fit each other, or memory ran out.
    """
    batch, heads, queries, _ = q.shape
    count = min(batch * heads, HEADS)
    pairs = [divmod(number * (batch * heads - 1) // max(count - 1, 1), heads) for number in range(count)]
    rows = torch.linspace(0, queries - 1, min(queries, ROWS), device=q.device).round().long()
    seen = None if mask is None else mask.expand(batch, heads, queries, k.shape[2])
    results = []
    for image, head in pairs:
        of_kv = head * k.shape[1] // heads
        scores = (q[image, head, rows].float() @ k[image, of_kv].float().mT) * scale
        if seen is not None:
            own = seen[image, head, rows]
            scores = scores.masked_fill(~own, -math.inf) if own.dtype == torch.bool else scores + own.float()
        results.append(scores.softmax(dim=-1) @ v[image, of_kv].float())
    images, heads_of = (torch.tensor(each, device=q.device)[:, None] for each in zip(*pairs, strict=True))
    place, exact = (images, heads_of, rows[None]), torch.stack(results)

    @torch.no_grad()
    def powers(result: torch.Tensor) -> torch.Tensor:
        return torch.stack([(result[place].float() - exact).square().sum(), exact.square().sum()])

    return powers


def farthest(found: Sequence[tuple[float, float]], tokens: Sequence[int]) -> tuple[float, int] | None:
    """Return the lowest SNR in dB of attentions with these powers, and the tokens of that attention; None if none has a
    finite result."""
    compared = [
        (max(amax.decibels(error, signal), LOWEST_DB), count)
        for (error, signal), count in zip(found, tokens, strict=True)
        if math.isfinite(error) and 0 < signal < math.inf
    ]
    return min(compared, default=None)
