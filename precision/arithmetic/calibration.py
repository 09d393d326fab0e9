"""Measure a model's operations in its first call, run later calls by that plan, and look at what they computed.

The first call calibrates: it fixes how each operand is scaled and which results are fp16. A product of fp16 operands
with sums in fp32 is right where its result is finite, so later calls look at their own result, and measure no more than
scaled operands, the model's inputs, attention in fp16 and layers whose overflow model code may hide (``hiding.py``).
Where a look finds Inf or NaN, or a number has left its range, the call is repeated with calibration. So a clean call
costs a few reductions and one small synchronisation, and no value that overflows is ever used.
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
from ..base.oom import is_of_compiler, is_torch_oom
from ..base.patching import compile_disabled
from .hiding import HidingCode
from .operand_scale import OperandScale, SharedOperands
from .proofs import HEADROOM_BITS, NOTHING, AmaxBuffer, Proof
from .result_bound import Fp16Results

Result = TypeVar("Result")
AnyProof = TypeVar("AnyProof", bound=Proof)
NOTHING_ELSE = nullcontext()


class Looks(Protocol):
    """What looks at the attempts of a call: :class:`Calibration` says what each method does."""

    def take_back(self) -> None: ...

    def end_call(self) -> None: ...

    def stands(self, result: Any) -> bool: ...

    def goes_on_after(self, error: RuntimeError) -> bool: ...


def until_it_stands(looks: Collection[Looks], attempt: Callable[[], Result]) -> Result:
    """Make attempts at a call until every look lets the result stand, the last one asked first.

    ``looks`` may grow during the first attempt.

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
    finally:
        for each in looks:
            each.end_call()


class InputRange(Proof):
    """State the range of an input of the model that was measured, with room on both sides."""

    range = math.inf, 0.0

    def forget(self) -> None:
        super().forget()
        self.range = math.inf, 0.0

    def measure(self, magnitude: float) -> None:
        """Widen the range to a magnitude, Inf too, as of a mask; to no NaN."""
        self.range = min(self.range[0], magnitude or math.inf), max(self.range[1], magnitude)

    def holds(self, magnitude: float) -> bool:
        """Tell whether a magnitude is 0 or inside of the range and its room."""
        room = 2.0**HEADROOM_BITS
        return magnitude == 0 or self.range[0] / room <= magnitude <= self.range[1] * room


class Calibration:
    """Hold the proofs of one model's operations, and make its calls.

    ``looks_at_result``: the result of each call is looked at, as its products are made so that they cannot overflow.
    ``calibrating``: this call may read numbers back from the device, to fix how operands are scaled; nothing compiled
    runs in it. A compiled graph depends on what a proof decides, such as ``in_fp32``, and not on the number of
    measurements.
    ``flops``: floating-point operations of each operation in the call that calibrated. ``repeats``: calls made twice.
    ``in_fp16``: an operation or an attention multiplies in fp16, so that results are looked at.
    ``error``: what model code said when it failed with fp16 results, and not in the repeat without them.
    ``spares_memory``: layers are measured with what later calls need and no more, as measuring ran out of memory once.
    ``by_layer``: each product holds fp16 accumulation off by itself, as nothing holds it off for the call.
    """

    def __init__(self, looks_at_result: bool = True) -> None:
        self.looks_at_result = looks_at_result
        self.proofs: dict[str, Proof] = {}
        self.flops: Counter[str] = Counter()
        self.operands = SharedOperands()
        self.results = Fp16Results()
        self.hiding = HidingCode()
        self.calibrating = True
        self.in_fp16 = False
        self.by_layer = True
        self.spares_memory = self._ran_short = False
        self.repeats = 0
        self.error = self._error = ""
        self._spared = False
        self._result = Proof("result of the call")
        self._missed = self._result.missed
        self._buffers: dict[torch.device, tuple[AmaxBuffer, dict[int, Proof]]] = {}

    def add(self, proof: AnyProof) -> AnyProof:
        """Hold a proof under its name, in place of an earlier one."""
        self.proofs[proof.name] = proof
        proof.missed = self._missed
        return proof

    def scale(self, name: str) -> OperandScale:
        """Make the operand scale of an operation."""
        self.in_fp16 = True
        self.results.scales.append(OperandScale(name))
        return self.add(self.results.scales[-1])

    def largest(self) -> dict[str, float]:
        """Return operation -> the largest magnitude of its operands, if any."""
        return {name: proof.largest for name, proof in self.proofs.items() if proof.largest}

    def watch_inputs(self, inputs: Mapping[str, object]) -> None:
        """Measure the model's inputs, by name: a text and a latent, which have more than one dimension, no timestep."""
        for key, x in inputs.items():
            if not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dim() < 2:
                continue
            name = f"input {key}"
            proof = self.proofs.get(name)
            if not isinstance(proof, InputRange):
                proof = self.add(InputRange(name))
            if not self.calibrating:
                proof.record_amax(x)
            else:
                proof.device = x.device
                proof.measure(amax(x).item())

    def recalibrate(self) -> None:
        """Calibrate in the next call, as in the first. What was compiled stays where the outcome is the same."""
        self.calibrating = True
        for proof in self.proofs.values():
            proof.forget()

    def run(self, call: Callable[[], Result]) -> Result:
        """Make one model call; again as long as a look at it fails.

        Raises:
            Whatever ``call`` raises.
        """
        self.begin_call()

        def attempt() -> Result:
            with self.attempt():
                return call()

        return until_it_stands([self], attempt)

    def begin_call(self) -> None:
        """Begin a model call, which may take several attempts."""
        self._error = ""
        self._spared = False

    def take_back(self) -> None:
        """Take back what the attempts at a call have changed in vain: the call failed."""
        if self._error:
            self.results.allowed = True  # results in fp16 are not what fails
        if self._spared:
            self.spares_memory = False  # the call does not fit without measuring either
        self._error = ""

    def end_call(self) -> None:
        """End a model call, whether it failed or not."""
        self.operands.end()
        self.error = self._error or self.error

    def attempt(self) -> AbstractContextManager:
        """Begin an attempt, to be made inside of the context; nothing compiled runs in one that calibrates."""
        if not self.calibrating:
            self._missed.any = False
            for buffer, _ in self._buffers.values():
                buffer.clear()
            return NOTHING_ELSE
        self._ran_short = False
        self.flops.clear()
        self.operands.begin()
        self.results.begin()
        held = ExitStack()
        held.enter_context(compile_disabled())
        if self.in_fp16 and self.looks_at_result:
            held.enter_context(self.hiding)
        return held

    def stands(self, result: object) -> bool:
        """Look at what an attempt computed. Returns whether its result may be used; else the call is made again."""
        if self.calibrating:
            if self.results.conclude():
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
        """Tell whether a call is made again after an attempt that raised an error.

        It is, once for each reason: with calibration if it had met an operation that was never measured, with less
        memory if measuring ran out of it, and without fp16 results if it had any, as not every operation of torch takes
        fp16 together with fp32.
        """
        if self.calibrating and self._ran_short and not self.spares_memory:
            self.spares_memory = self._spared = True
            return True
        if is_torch_oom(error) or is_of_compiler(error):
            return False
        if not self.calibrating and self._missed.any:
            self.repeats += 1
            self.calibrating = True
            return True
        if not (self.results.any_returned and self.results.allowed):
            return False
        self.results.allowed = False
        self._error = str(error) or type(error).__name__
        self.calibrating = True
        return True

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure a layer: where memory runs out, the call is measured again with less, once."""
        try:
            yield
        except RuntimeError as error:
            self._ran_short = is_torch_oom(error)
            raise

    def _place(self, result: object) -> None:
        """Give every measured proof its records on its device, and the graphs the exponents."""
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
        if self._result.device is not None:
            for x in floats_in([result]):
                self._result.record_amax(x)
        hold = not self._missed.any
        for buffer, proofs in self._buffers.values():
            records = buffer.read()
            for place in [place for place, record in enumerate(records) if record != NOTHING and place in proofs]:
                hold = self._is_held(proofs[place], records[place : place + proofs[place].width]) and hold
        return hold

    def _is_held(self, proof: Proof, numbers: list[float]) -> bool:
        magnitude, hold = proof.magnitude(numbers), True
        for each in (proof, *self.operands.sharing.get(proof, ())):  # type: ignore[call-overload]  # scales alone share
            each.largest = max(each.largest, magnitude)
            hold = each.holds(magnitude) and hold
        return hold
