"""Bounds on the numbers of one operation, which hold while the numbers recorded in each call stay in a range.

==================  =============================================  ====================================================
proof               no number of these passes fp16's range         from
==================  =============================================  ====================================================
``OperandScale``    an operand, and a result that only fits fp16   amax of the operand, 1-norms of the weight's rows
``ResultBound``     a result that may be returned in fp16          the same, and the bias; part of an ``OperandScale``
``FiniteResult``    any before a result                            amax of the result
``InputRange``      a range that was measured                      amax of an input of the model
``SumBound``        a sum of products in fp16                      amax or row norms of the operand, norms of the weight
``ScoreBound``      a score of an attention in fp16                row norms of q and k
``AttentionRange``  all numbers of an attention in fp16            the same, and amax of v, in one number
``AttentionBound``  the same of one attention                      amax of q, or row norms of q and k
==================  =============================================  ====================================================

``Calibration`` holds the proofs of a model and checks each one after every call that recorded a number for it.
"""

from abc import ABC, abstractmethod

from ..base.dtypes import FP16_MAX
from .amax_buffer import Recorder

HEADROOM_BITS = 2
FLOOR_BITS = 12
MARGIN = 2.0
"""What a bound on a sum must leave: rounding moves a sum by less than it is (``fp16_accumulation``)."""


class Proof(ABC):
    """State a bound on the numbers of an operation, from a call that calibrates.

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
        """Return the magnitude to be checked, from the ``width`` numbers recorded in a call."""
        return numbers[0]

    @abstractmethod
    def holds(self, magnitude: float) -> bool:
        """Tell whether the proof holds for a magnitude; never for NaN, nor before it was measured."""

    def forget(self) -> None:
        """Begin anew, for a model with other operands."""
        self.largest = 0.0


def fits_range(magnitude: float, limit: float = FP16_MAX, floor: float = 2.0**-FLOOR_BITS) -> bool:
    """Tell whether a magnitude is 0 or from ``floor`` to ``limit``; no NaN is.

    Below ``floor`` fp16's subnormal numbers lose more than bf16 rounds away.
    """
    # fp16's largest number is what model code's own clamp leaves of an overflow (``clamp_fp16`` in
    # comfy/ldm/lumina/model.py).
    return limit > 0 and magnitude != FP16_MAX and (magnitude == 0 or floor <= magnitude <= limit)
