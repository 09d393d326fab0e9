"""Repeats of a failed call, each in a higher precision than the one before, until a result is finite."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

import torch

from ..base.modes import FP16_WIDE
from ..devices.hardware import device_module
from .localize import Origin
from .policy import ALL_IN_FP32, Escalation, ObservedRanges, escalate, escalate_to_fp32


@dataclass(frozen=True)
class RandomStart:
    """torch's random numbers as a call found them: a repeat from there draws what the call drew."""

    device: torch.device
    cpu: torch.Tensor
    own: torch.Tensor | None

    @classmethod
    def of(cls, device: torch.device) -> "RandomStart":
        """Take the present state; nothing is read back from a GPU, whose generator counts on the CPU."""
        generators = _generators(device)
        return cls(device, torch.get_rng_state(), generators.get_rng_state(device) if generators else None)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Draw from there on, and leave the random numbers of the CPU and of this kind of device as they were."""
        generators = _generators(self.device)
        kept = (range(generators.device_count()), self.device.type) if generators else ([], "cuda")
        with torch.random.fork_rng(kept[0], device_type=kept[1]):
            self.put_back()
            yield

    def put_back(self) -> None:
        """Draw from there on."""
        torch.set_rng_state(self.cpu)
        generators = _generators(self.device)
        if generators and self.own is not None:
            generators.set_rng_state(self.own, self.device)


def _generators(device: torch.device) -> ModuleType | None:
    """Return the module with the random numbers of a device in use; None for a CPU, and where torch has none."""
    module = device_module(device)
    is_in_use = getattr(module, "is_initialized", lambda: True)
    return module if hasattr(module, "get_rng_state") and is_in_use() else None


def model_steps(modes: Mapping[str, str], stream: str, present: Escalation) -> list[Escalation]:
    """List the escalations to repeat a diffusion model's call in, each wider than ``present``, the last all in fp32;
    none where all of it was already.

    A model whose layers are in fp32 is repeated too: its attention may be a kernel of 16 or 8 bits.

    Args:
        modes: layer -> mode by itself, of the layers that multiply.
        stream: the dtype of the values between layers.
        present: the escalation the call failed in.
    """
    if present.whole:
        return []
    steps = [*([safe_escalation(modes)] if stream == "fp16" else []), ALL_IN_FP32]
    return [step for step in steps if step | present != present]


def safe_escalation(modes: Mapping[str, str]) -> Escalation:
    """Return the escalation that cannot overflow: fp32 between layers, products with fp16 operands scaled to fit."""
    return Escalation(dict.fromkeys(modes, FP16_WIDE.name), stream=True)


def encoder_steps(dtype: torch.dtype, has_bf16: bool) -> list[torch.dtype]:
    """List the dtypes to repeat a VAE or text encoder in, that is in ``dtype``.

    The first is ``dtype`` itself, but for fp16, which overflows again. bf16 loses precision:
    only where the device has it.
    """
    if dtype == torch.float16:
        return [torch.bfloat16, torch.float32] if has_bf16 else [torch.float32]
    return [dtype, torch.float32] if dtype != torch.float32 else [dtype]


def escalation_after(
    repeat: Escalation,
    present: Escalation,
    observed: ObservedRanges,
    origin: Origin | None,
    modes: Mapping[str, str],
    in_fp16: bool,
    parts: Collection[str],
) -> Escalation:
    """Decide what runs wider from now on, after ``repeat`` gave a finite result.

    Args:
        present: the escalation the call failed in.
        observed: the magnitudes met in the repeat.
        in_fp16: the values between layers are fp16, so ``safe_escalation`` was tried before fp32.
        parts: the top-level parts of the model.
    """
    if not repeat.whole:
        return escalate(present, observed, origin, modes)
    return ALL_IN_FP32 if in_fp16 else escalate_to_fp32(present, origin, modes, parts)
