"""Measure a model's operations in its first call, and check the proofs made from that in each later one.

The first call calibrates: it fixes how each operand is scaled. Later calls only record. When a record leaves the range
that a proof holds for, the call is repeated with calibration. So a clean call costs one reduction per operation whose
operand is not known to fit (``bounds``) and one small synchronisation, and no value that overflows is ever used.
"""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch

from ..oom import is_oom
from .amax_buffer import AmaxBuffer
from .bounds.known_values import MeasuredOnce
from .bounds.modulation import Modulation, SmallTensors
from .compiling import compile_disabled
from .operand_scale import OperandScale
from .operand_sharing import SharedOperands
from .proofs import Proof
from .result_bound import FiniteResult, Fp16Results

Result = TypeVar("Result")
AnyProof = TypeVar("AnyProof", bound=Proof)


class Calibration:
    """Keep the proofs of one model's operations, and make its calls.

    ``calibrating``: this call may read numbers back from the device, to fix how operands are scaled; nothing compiled
    runs in it. A compiled graph depends on what a proof decides, such as ``in_fp32``, and not on the number of
    measurements.
    ``last``: the last operation of the call that calibrated. It is always measured: what is not finite before it is not
    finite there.
    ``flops``: floating-point operations of each operation in the call that calibrated. ``repeats``: calls made twice.
    """

    def __init__(self) -> None:
        self.proofs: dict[str, Proof] = {}
        self.flops: Counter[str] = Counter()
        self.operands = SharedOperands()
        self.values = self.operands.values
        self.last: OperandScale | None = None
        self.results = Fp16Results()
        self.calibrating = True
        self.repeats = 0
        self._once: list[MeasuredOnce] = []
        self._results: list[FiniteResult] = []
        self._modulations: list[Modulation] = []
        self._buffers: dict[torch.device, tuple[AmaxBuffer, list[Proof]]] = {}
        self._small: dict[torch.device, SmallTensors] = {}

    def add(self, proof: AnyProof) -> AnyProof:
        """Keep a proof under its name, in place of an earlier one."""
        self.proofs[proof.name] = proof
        return proof

    def scale(self, name: str) -> OperandScale:
        """Make the operand scale of an operation."""
        return self.add(OperandScale(name, self.results.bound()))

    def largest(self) -> dict[str, float]:
        """Return operation -> the largest magnitude it was given, of those that met any."""
        return {name: proof.largest for name, proof in self.proofs.items() if proof.largest}

    @property
    def varies(self) -> bool:
        """Tell whether blocks that run alike may measure different things: one of them what others have too, or all of
        them in some calls only."""
        return bool(self._once) or self.values.sampling

    def recalibrate(self) -> None:
        """Calibrate in the next call, as in the first one. What was compiled stays as it is where the outcome is the
        same."""
        self.calibrating = True
        for proof in self.proofs.values():
            proof.forget()
        for modulation in self._modulations:
            modulation.forget()

    def run(self, call: Callable[[], Result]) -> Result:
        """Make one model call; repeat it with calibration when a proof did not hold, and without fp16 results where
        those are what model code fails on: not every operation of torch takes fp16 together with fp32.

        Raises:
            Whatever ``call`` raises.
        """
        try:
            return self._run(call)
        except RuntimeError as error:
            if is_oom(error) or not self.results.any_proven:
                raise
            self.results.allowed = False
            try:
                return self._calibrated(call)
            except BaseException:
                self.results.allowed = True  # they are not what fails
                raise
        finally:
            self.operands.end()

    def _run(self, call: Callable[[], Result]) -> Result:
        if not self.calibrating:
            try:
                result = self._recorded(call)
                if self._all_hold():
                    return result
            except RuntimeError as error:
                if is_oom(error) or not self._has_missed():
                    raise  # model code that meets a result in fp16 for the first time may fail on it
            self.repeats += 1
        return self._calibrated(call)

    def _recorded(self, call: Callable[[], Result]) -> Result:
        self.operands.begin(calibrating=False)
        for proof in self._watched():
            proof.recorder.missed = False
        for buffer, _ in self._buffers.values():
            buffer.clear()
        return call()

    def _calibrated(self, call: Callable[[], Result]) -> Result:
        self.calibrating = True
        result = self._measured(call)
        while self.results.conclude():
            result = self._measured(call)
        self._place()
        self.calibrating = False
        return result

    def _measured(self, call: Callable[[], Result]) -> Result:
        self.flops.clear()
        self.operands.begin(calibrating=True)
        self.results.begin()
        with compile_disabled():
            return call()

    def _place(self) -> None:
        """Give every measured proof its records on its device, and the graphs the exponents."""
        devices: dict[torch.device, list[Proof]] = {}
        if self.last is not None:
            self.last.covered = None
        scales = [proof for proof in self.proofs.values() if isinstance(proof, OperandScale)]
        self._once = [scale.once for scale in scales if scale.once is not None and scale.once.is_shared]
        self._results = [scale.finite for scale in scales if scale.by_result]
        self._modulations = self.values.modulations()
        for proof in self._watched():
            if proof.recorder.device is not None:
                devices.setdefault(proof.recorder.device, []).append(proof)
        for device, proofs in devices.items():
            if device not in self._buffers or self._buffers[device][1] != proofs:
                self._buffers[device] = buffer, _ = AmaxBuffer(sum(proof.width for proof in proofs), device), proofs
                left = iter(buffer.entries)
                for proof in proofs:
                    proof.recorder.place([next(left) for _ in range(proof.width)])
            buffer = self._buffers[device][0]
            buffer.set_exponents([proof.exponent for proof in proofs for _ in range(proof.width)])
            modulations = [proof for proof in proofs if isinstance(proof, Modulation)]
            first = len(buffer.records) - sum(each.width for each in modulations)
            self._small[device] = SmallTensors(modulations, buffer.records[first:])

    def _watched(self) -> list[Proof]:
        return [*self.proofs.values(), *self._once, *self._results, *self.values.rotations, *self._modulations]

    def _has_missed(self) -> bool:
        return any(proof.recorder.missed for proof in self._watched())

    def _all_hold(self) -> bool:
        """Tell whether every proof holds for what this call has recorded; note the largest magnitudes on the way."""
        hold = not self._has_missed()
        for device, (buffer, proofs) in self._buffers.items():
            self._small[device].measure()
            records = iter(buffer.read())
            for proof in proofs:
                recorded = [next(records) for _ in range(proof.width)]
                if proof.ran(recorded):
                    hold = self._holds(proof, proof.magnitude(recorded)) and hold
        return hold

    def _holds(self, proof: Proof, magnitude: float) -> bool:
        """Tell whether a proof holds for a magnitude, and those of the operations that share its operand."""
        proofs = (proof, *self.operands.sharing(proof))
        for each in proofs:
            each.largest = max(each.largest, magnitude)
        return all(each.holds(magnitude) for each in proofs)
