"""Scales, codebook and codes of ComfyUI's ``asym_w4a8_int8``, fixed from a rotated weight.

Equals comfy-kitchen's eager ``quantize_w4a8_int8_weight`` (``backends/eager/w4a8_int8.py``: 4 bits from 0.2.31, 6 bits
from 0.2.40) of an fp32 weight bit for bit, with its defaults: groups of 16 inputs, e4m3 scales, no correction.
"""

import torch

GROUP = 16
LARGEST_6_BIT = 31
CODEBOOK = (
    -0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720,
    0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671,
)  # fmt: skip
"""The 16 levels with the least squared error for normal values divided by the largest of their group."""
HEAVY_TAILED = -0.1
"""Excess kurtosis from which on the levels are fitted to the weight; about -0.5 for rotated normal values."""
SAMPLED_VALUES = 1 << 22
KURTOSIS_SAMPLE = 1 << 19
FIT_SAMPLE = 300_000
FIT_PASSES = 25
SCALE_PASSES = 2
SMALLEST = 1e-8
LARGEST_E4M3 = 0x7E
"""The bits of e4m3fn's largest number; one more is NaN."""


def codebook_rows(rows: int, columns: int) -> torch.Tensor | None:
    """Return the rows that a weight's codebook is chosen by; None for all of them."""
    most = max(1, SAMPLED_VALUES // max(columns, 1))
    return torch.linspace(0, rows - 1, most).long() if rows > most else None


def choose_codebook(turned: torch.Tensor) -> torch.Tensor:
    """Choose the 16 levels for rotated rows: :data:`CODEBOOK`, or fitted ones where the values are heavy-tailed."""
    grouped = _grouped(turned)
    normalized = (grouped / grouped.abs().amax(2, keepdim=True).clamp(min=SMALLEST)).flatten()
    sample = _sample(normalized, KURTOSIS_SAMPLE)
    kurtosis = ((sample - sample.mean()) / (sample.std() + 1e-9)).pow(4).mean() - 3.0
    if kurtosis.item() <= HEAVY_TAILED:
        return torch.tensor(CODEBOOK, device=turned.device)
    return _fitted(_sample(normalized, FIT_SAMPLE))


def _sample(values: torch.Tensor, count: int) -> torch.Tensor:
    if values.numel() <= count:
        return values
    # Drawn on the CPU: a generator of another device gives other numbers, and so another codebook.
    drawn = torch.randint(0, values.numel(), (count,), generator=torch.Generator().manual_seed(0))
    return values[drawn.to(values.device)]


def _fitted(sample: torch.Tensor) -> torch.Tensor:
    """Fit 16 levels to values by Lloyd's iteration: each level becomes the mean of the values nearest to it."""
    levels = torch.quantile(sample, torch.linspace(0, 1, len(CODEBOOK), device=sample.device))
    for _ in range(FIT_PASSES):
        nearest = (sample.unsqueeze(1) - levels).abs().argmin(1)
        own = [sample[nearest == index] for index in range(len(CODEBOOK))]
        levels = torch.stack([mine.mean() if mine.numel() else level for mine, level in zip(own, levels, strict=True)])
    return levels


def choose_scales(turned: torch.Tensor, codebook: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fix the scales for 4-bit codes of rotated rows: per group of 16 (e4m3, of its row's), and per row (fp32)."""
    grouped = _grouped(turned)
    start = grouped.abs().amax(2, keepdim=True).clamp(min=SMALLEST)
    return _relative(*_least_squares(grouped, start, codebook, lambda values: _nearest_in(codebook, values)))


def choose_scales_of_6_bits(turned: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fix the scales for 6-bit codes of rotated rows: for each group, of three neighbours the one that fits best."""
    grouped, levels = _grouped(turned), levels_of_6_bits(turned.device)
    start = (grouped.abs().amax(2, keepdim=True) / LARGEST_6_BIT).clamp(min=SMALLEST)
    relative, channel = _relative(*_least_squares(grouped, start, levels, _rounded))
    target, raw = turned / channel.unsqueeze(1), relative.view(torch.uint8)
    lower, higher = raw.sub(1).clamp_(min=1), raw.add(1).clamp_(max=LARGEST_E4M3)
    best, least = relative, _error(levels, relative, target)
    for candidate in (bits.view(torch.float8_e4m3fn) for bits in (lower, higher)):
        error = _error(levels, candidate, target)
        better = error < least
        least = torch.where(better, error, least)
        best = torch.where(better, candidate.view(torch.uint8), best.view(torch.uint8)).view(torch.float8_e4m3fn)
    return best, channel


def levels_of_6_bits(device: torch.device) -> torch.Tensor:
    """Return the numbers of 6-bit codes before they are scaled: -31 to 31."""
    return torch.arange(-LARGEST_6_BIT, LARGEST_6_BIT + 1, dtype=torch.float32, device=device)


def _grouped(turned: torch.Tensor) -> torch.Tensor:
    return turned.view(len(turned), -1, GROUP)


def _least_squares(grouped: torch.Tensor, scale: torch.Tensor, levels: torch.Tensor, assign):
    """Improve groups' scales: in turn the nearest levels for the scale, and the scale with the least squared error."""
    numbers = levels[assign(grouped / scale)]
    for _ in range(SCALE_PASSES):
        squares = (numbers * numbers).sum(2, keepdim=True).clamp(min=SMALLEST)
        scale = ((grouped * numbers).sum(2, keepdim=True) / squares).clamp(min=SMALLEST)
        numbers = levels[assign(grouped / scale)]
    return scale, numbers * scale


def _relative(scale: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split groups' scales into those of the rows, whose largest value is 127 of them, and the rest in e4m3."""
    channel = (values.abs().amax((1, 2)) / 127).clamp(min=SMALLEST)
    return (scale.squeeze(2) / channel.unsqueeze(1)).to(torch.float8_e4m3fn), channel


def _rounded(values: torch.Tensor) -> torch.Tensor:
    # A weight that holds NaN is refused once it is read whole; a sample of its rows comes here before.
    return values.round_().clamp_(-LARGEST_6_BIT, LARGEST_6_BIT).nan_to_num_().add_(LARGEST_6_BIT).int()


def _nearest_in(levels: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return _nearest(levels, values, lambda index: levels[index])


def _nearest(levels: torch.Tensor, values: torch.Tensor, number) -> torch.Tensor:
    """Find the nearest of ascending levels for each value, the lower of two that are as near."""
    position, last = torch.searchsorted(levels, values.contiguous()), levels.shape[-1] - 1
    low, high = (position - 1).clamp_(min=0), position.clamp_(max=last)
    return torch.where((values - number(high)).abs_() < (values - number(low)).abs_(), high, low)


def nearest_levels(
    levels: torch.Tensor, relative: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round values on rows' int8 grids ``(n, c)`` to the nearest numbers that levels stand for in their groups.

    Args:
        relative: the groups' scales ``(n, g)``; each is for ``c / g`` columns.

    Returns:
        Indices of levels (uint8), and the numbers (fp32).
    """
    grids = (levels * relative.float().unsqueeze(2)).round_().clamp_(-127, 127).view(-1, len(levels))
    values = target.reshape(len(grids), -1)
    index = _nearest(grids, values, lambda found: grids.gather(1, found))
    return index.to(torch.uint8).view(target.shape), grids.gather(1, index).view(target.shape)


def _error(levels: torch.Tensor, relative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Sum the squared error of each group with its scale."""
    return _grouped(nearest_levels(levels, relative, target)[1].sub_(target).square_()).sum(2)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack rows of codes (uint8): halves of bytes, the low one first, then for 6 bits the top two of four a byte."""
    halves = codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4
    if bits == 4:
        return halves.view(torch.int8)
    top = codes >> 4
    fours = top[:, ::4] | top[:, 1::4] << 2 | top[:, 2::4] << 4 | top[:, 3::4] << 6
    return torch.cat((halves, fours), 1).view(torch.int8)
