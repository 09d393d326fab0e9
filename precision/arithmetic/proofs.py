"""What a proof is: a bound on the numbers of one operation that holds while what its calls record stays in a range.

==================  =============================================  ====================================================
proof               no number of these passes fp16's range         from
==================  =============================================  ====================================================
``OperandScale``    an operand, and a result that only fits fp16   amax of the operand, 1-norms of the weight's rows
``ResultBound``     a result that may be returned in fp16          the same, and the bias; part of an ``OperandScale``
``SumBound``        a sum of products in fp16                      amax or row norms of the operand, norms of the weight
``ScoreBound``      a score of an attention in fp16                row norms of q and k
``AttentionRange``  all numbers of an attention in fp16            the same, and amax of v, in one number
``AttentionBound``  the same of one attention                      amax or row norms of q and k, and amax of v
``MeasuredOnce``    the operands made of a tensor that many have   its amax and row norms, once a call
==================  =============================================  ====================================================

``Calibration`` keeps the proofs of a model and checks each after every call, unless it was never given a device to
record on: what is proven from the weights alone records nothing and needs no check. Nor does an operation whose operand
is known to fit before it is made (``bounds``): it records nothing in that call.
"""

from abc import ABC, abstractmethod

from ..dtypes import FP16_MAX
from .amax_buffer import NOTHING, Recorder

HEADROOM_BITS = 2
FLOOR_BITS = 12
MARGIN = 2.0
"""What a bound on a sum must leave: rounding moves a sum by less than it is (``fp16_accumulation``)."""


class Proof(ABC):
    """State what the numbers of one operation cannot pass, from what a call that calibrates has measured.

    ``exponent``: its operand is multiplied by ``2**-exponent``. ``largest``: the largest magnitude of all calls so far.
    """

    width = 1
    """How many numbers it records in a call."""

    def __init__(self, name: str):
        self.name = name
        self.exponent: float = 0
        self.largest = 0.0
        self.recorder = Recorder()

    def magnitude(self, numbers: list[float]) -> float:
        """Return what the proof depends on, from the ``width`` numbers recorded in a call."""
        return numbers[0]

    def ran(self, numbers: list[float]) -> bool:
        """Tell whether the operation recorded its numbers in a call."""
        return NOTHING not in numbers

    @abstractmethod
    def holds(self, magnitude: float) -> bool:
        """Tell whether the proof holds for a magnitude; never for NaN, nor before it was measured."""

    def forget(self) -> None:
        """Begin anew, for a model whose operands are others now."""
        self.largest = 0.0


def fits_range(magnitude: float, limit: float = FP16_MAX, floor: float = 2.0**-FLOOR_BITS) -> bool:
    """Tell whether a magnitude is 0 or from ``floor`` to ``limit``; no NaN is.

    Below ``floor`` fp16's subnormal numbers lose more than bf16 rounds away.
    """
    # fp16's largest number is what model code's own clamp leaves of an overflow (``clamp_fp16`` in
    # comfy/ldm/lumina/model.py).
    return limit > 0 and magnitude != FP16_MAX and (magnitude == 0 or floor <= magnitude <= limit)

