"""When low-rank changes of an 8-bit weight are merged into it instead of added beside it, and what that costs.

For a weight of N x K and M rows of an input, with factors of rank r, summed over all changes:

========  ====================  ==================  ==========================================
          bytes                 operations a call   seconds, as those of 16-bit operations
========  ====================  ==================  ==========================================
weight    ``N K``               ``2 N K M``         ``N K M`` in 8 bits, ``2 N K M`` in 16
factors   ``2 r (N + K)``       ``2 r (N + K) M``   ``2 r (N + K) M``: they are in 16 bits
========  ====================  ==================  ==========================================

8-bit products are taken to run at twice the speed of 16-bit ones, as in NVIDIA's data sheets. From
``r = N K / (2 (N + K))`` on the factors take more memory than the weight, and more transfer where weights are moved in
and out; and a layer with 8-bit products and factors beside is slower than one in 16 bits with all merged. Merged they
cost no operation, no memory and no kernel.

Merged they cost accuracy: the sum is rounded to the weight's grid anew. Of a change smaller than the grid's steps
little is left, so it stays beside where rounding would take more than ``LARGEST_LOSS`` of it.
"""

from dataclasses import dataclass

import torch

LARGEST_LOSS = 0.5
"""A change of half the size of a grid's rounding keeps a third to two thirds of itself, one of twice its size 0.93 to 1
(fp8 and int8, random weights)."""


@dataclass(frozen=True)
class MergingError:
    """The norm of what rounding a merged weight changes, to that of the exact sum and to that of the change merged."""

    of_weight: float
    of_change: float

    @property
    def keeps_change(self) -> bool:
        """Tell whether most of the change is left; not of one that is zero or not finite."""
        return self.of_change <= LARGEST_LOSS


def outweighs(rank: int, shape: tuple[int, int]) -> bool:
    """Tell whether 16-bit factors of a rank take more memory than an 8-bit weight of this shape, and their products
    more time than its own in 8 bits."""
    outputs, inputs = shape
    return 2 * rank * (outputs + inputs) > outputs * inputs


def merging_error(base: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> MergingError:
    """Measure what rounding lost, relative to the sum and to the change.

    Args:
        base: a weight without the change, fp32.
        exact: with it, fp32.
        rounded: ``exact`` as it is stored, fp32.
    """
    lost, whole, change = (float(torch.linalg.vector_norm(part)) for part in (rounded - exact, exact, exact - base))
    return MergingError(_ratio(lost, whole), _ratio(lost, change))


def _ratio(lost: float, whole: float) -> float:
    return lost / whole if whole else float("inf")
