"""Calibrate a model's operations in its first call, run later calls with that plan, and check their
results.

The first call calibrates: it chooses the scale of each operand. A product of fp16 operands with
fp32 sums is correct if its result is finite, so later calls only check their own result and measure
scaled operands, the inputs of the model, attention in fp16, and layers whose overflow model code
may hide (``hiding.py``). If a check finds Inf or NaN, or a number left its range, the call is
repeated with calibration. A clean call costs a few reductions and one small synchronisation, and a
value that overflowed is never used.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate
from typing import Any, Protocol, TypeVar

import torch

from ..base.amax import amax
from ..base.nested import floats_in
from ..base.oom import is_torch_oom
from ..base.patching import compile_disabled
from .hiding import HidingCode
from .operand_scale import OperandScale
from .proofs import HEADROOM_BITS, NOTHING, AmaxBuffer, Proof

Result = TypeVar("Result")
AnyProof = TypeVar("AnyProof", bound=Proof)
NOTHING_ELSE = nullcontext()


class _Looks(Protocol):
    """What looks at the attempts of a call: :class:`Calibration` says what each method does."""

    def take_back(self) -> None: ...

    def stands(self, result: Any) -> bool: ...

    def goes_on_after(self, error: RuntimeError) -> bool: ...


def until_it_stands(looks: Collection[_Looks], attempt: Callable[[], Result]) -> Result:
    """Make attempts at a call until every look lets the result stand, the last one asked first.

    A look that has the call repeated ends the asking: the looks before it see no result of that
    attempt, and count no repeat for it. ``looks`` may grow during the first attempt.

    Raises:
        Whatever an attempt raises, if no look goes on after it.
    """
    try:
        while True:
            try:
                result = attempt()
            except RuntimeError as error:
                if not any(each.goes_on_after(error) for each in reversed([*looks])):
                    raise
                continue
            if all(each.stands(result) for each in reversed([*looks])):
                return result
    except BaseException:
        for each in looks:
            each.take_back()
        raise


class _InputRange(Proof):
    """Proof that an input of the model stays in its measured range, with ``HEADROOM_BITS`` of room
    on both sides."""

    range = math.inf, 0.0

    def forget(self) -> None:
        super().forget()
        self.range = math.inf, 0.0

    def measure(self, magnitude: float) -> None:
        """Widen the range to include a magnitude. Inf, as of a mask, is included; NaN is
        ignored."""
        self.range = min(self.range[0], magnitude or math.inf), max(self.range[1], magnitude)

    def holds(self, magnitude: float) -> bool:
        """True for 0 and for magnitudes within ``2**HEADROOM_BITS`` (4) times the calibrated
        range."""
        room = 2.0**HEADROOM_BITS
        return magnitude == 0 or self.range[0] / room <= magnitude <= self.range[1] * room


class Calibration:
    """The proofs of one model's operations, and the loop that runs its calls.

    ``looks_at_result``: check the result of each call, where an overflow of a product shows as Inf
    or NaN. ``calibrating``: this call may read numbers back from the device to choose scales, and
    runs no compiled code. A compiled graph depends on the decisions of a proof, such as
    ``in_fp32``, but not on the number of measurements. ``flops``: floating-point operations of each
    operation in the calibrating call. ``repeats``: number of calls that ran twice. ``in_fp16``:
    some operation or attention multiplies in fp16, so results are checked. ``spares_memory``:
    calibrate without a second copy of the weight, after an out-of-memory error.
    ``lacks_precision``: in this calibrating attempt some weight was asked for in fp16 that has to
    be multiplied in fp32. ``by_layer``: each product switches fp16 accumulation off itself, because
    it is not switched off for the whole call.
    """

    def __init__(self, looks_at_result: bool = True) -> None:
        self.looks_at_result = looks_at_result
        self.proofs: dict[str, Proof] = {}
        self.flops: Counter[str] = Counter()
        self.hiding = HidingCode()
        self.calibrating = True
        self.in_fp16 = False
        self.by_layer = True
        self.spares_memory = self._ran_short = False
        self.repeats = 0
        self.lacks_precision = False
        self._spared = False
        self._result = Proof("result of the call")
        self._missed = self._result.missed
        self._buffers: dict[torch.device, tuple[AmaxBuffer, dict[int, Proof]]] = {}

    def add(self, proof: AnyProof) -> AnyProof:
        """Register a proof under its name. A proof with the same name is replaced."""
        self.proofs[proof.name] = proof
        proof.missed = self._missed
        return proof

    def scale(self, name: str) -> OperandScale:
        """Create and register the operand scale of an operation."""
        self.in_fp16 = True
        return self.add(OperandScale(name))

    def largest(self) -> dict[str, float]:
        """Return operation name -> largest magnitude of its operands, for operations with a
        measured operand."""
        return {name: proof.largest for name, proof in self.proofs.items() if proof.largest}

    def watch_inputs(self, inputs: Mapping[str, object]) -> None:
        """Measure the model's inputs, by name. Tensors of fewer than 2 dimensions, such as
        timesteps, are skipped."""
        for key, x in inputs.items():
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 2:
                continue
            name = f"input {key}"
            proof = self.proofs.get(name)
            if not isinstance(proof, _InputRange):
                proof = self.add(_InputRange(name))
            if not self.calibrating:
                proof.record_amax(x)
            else:
                proof.device = x.device
                proof.measure(amax(x).item())

    def recalibrate(self) -> None:
        """Calibrate in the next call, as in the first one. Compiled graphs are kept if the
        decisions are the same."""
        self.calibrating = True
        for proof in self.proofs.values():
            proof.forget()

    def run(self, call: Callable[[], Result]) -> Result:
        """Run one model call, and repeat it until its check succeeds. Returns the result of
        ``call``.

        Raises:
            Any exception of ``call`` for which :meth:`goes_on_after` is False.
        """
        self.begin_call()

        def attempt() -> Result:
            with self.attempt():
                return call()

        return until_it_stands([self], attempt)

    def begin_call(self) -> None:
        """Start a model call, which may take several attempts."""
        self._spared = False

    def take_back(self) -> None:
        """Undo the changes of the attempts at a call that failed."""
        if self._spared:
            self.spares_memory = False  # the call does not fit without measuring either

    def attempt(self) -> AbstractContextManager:
        """Prepare one attempt and return the context to run it in. A calibrating attempt runs no
        compiled code."""
        if not self.calibrating:
            self._missed.any = False
            for buffer, _ in self._buffers.values():
                buffer.clear()
            return NOTHING_ELSE
        self._ran_short = self.lacks_precision = False
        self.flops.clear()
        held = ExitStack()
        held.enter_context(compile_disabled())
        if self.in_fp16 and self.looks_at_result:
            held.enter_context(self.hiding)
        return held

    def stands(self, result: object) -> bool:
        """Check an attempt. Returns True if its result may be used, False if the call has to be
        repeated."""
        if self.calibrating:
            if self.lacks_precision:
                return False
            self._place(result)
            self.calibrating = False
            return True
        if self._holds(result):
            return True
        self.repeats += 1
        self.calibrating = True
        return False

    def goes_on_after(self, error: RuntimeError) -> bool:
        """True if a call is repeated after an attempt that raised ``error``.

        A call is repeated at most once for each reason: with calibration, if an operation ran that
        was never measured; and with less memory, if measuring ran out of memory.
        """
        if self.calibrating and self._ran_short and not self.spares_memory:
            self.spares_memory = self._spared = True
            return True
        if is_torch_oom(error) or self.calibrating or not self._missed.any:
            return False
        self.repeats += 1
        self.calibrating = True
        return True

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Context for measuring a layer. After an out-of-memory error the call is measured again
        with less memory, once."""
        try:
            yield
        except RuntimeError as error:
            self._ran_short = is_torch_oom(error)
            raise

    def _place(self, result: object) -> None:
        """Allocate one record buffer per device, assign slots to the measured proofs, and upload
        the scales that compiled graphs read."""
        found = floats_in([result]) if self.in_fp16 and self.looks_at_result else []
        self._result.device = found[0].device if found else None
        devices: dict[torch.device, list[Proof]] = {}
        for proof in (*self.proofs.values(), self._result):
            if proof.device is not None:
                devices.setdefault(proof.device, []).append(proof)
        for device, proofs in devices.items():
            ends = list(accumulate(proof.width for proof in proofs))
            placed = {end - proof.width: proof for proof, end in zip(proofs, ends, strict=True)}
            if device not in self._buffers or self._buffers[device][1] != placed:
                self._buffers[device] = AmaxBuffer(ends[-1], device), placed
                for first, proof in placed.items():
                    proof.entries = self._buffers[device][0].entries[first : first + proof.width]
            exponents = [proof.exponent for proof in proofs for _ in range(proof.width)]
            pairs = [[2.0**-exponent for exponent in exponents], [2.0**exponent for exponent in exponents]]
            self._buffers[device][0].scales.copy_(torch.tensor(pairs, dtype=torch.float32))

    def _holds(self, result: object) -> bool:
        """Read the records of every device and check each proof that ran. Returns False if a proof
        failed or an operation had no record. Also updates ``largest`` of the proofs."""
        if self._result.device is not None:
            for x in floats_in([result]):
                self._result.record_amax(x)
        hold = not self._missed.any
        for buffer, proofs in self._buffers.values():
            records = buffer.read()
            for place, proof in proofs.items():
                if records[place] != NOTHING:
                    magnitude = proof.magnitude(records[place : place + proof.width])
                    proof.largest = max(proof.largest, magnitude)
                    hold = proof.holds(magnitude) and hold
        return hold
