"""Signal to noise ratios in dB."""

import math


def decibels(noise: float, signal: float) -> float:
    """Compute ``10 log10(signal / noise)``: inf without noise,
    -inf for noise that is not finite or without a signal."""
    if noise == 0:
        return math.inf
    if not math.isfinite(noise) or signal == 0:
        return -math.inf
    return 10 * (math.log10(signal) - math.log10(noise))
