"""Decide in what a failed call is repeated, and what runs in higher precision after a repeat that was finite.

Nothing here runs a model. A failed call is retried in ``fp16_safe``: fp16 matmul operands, everything else fp32. It
cannot overflow and reveals every layer's amax; later calls upcast only the layers that need it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch

from ..base.dtypes import FP16_MAX
from ..base.modes import FP16, FP16_WIDE, FP32, MODES, modes_named
from .localize import Origin

ON_NAN = ("retry_higher", "stop", "report")
OFF = "off"
LIMIT = FP16_MAX / 2
STREAM = "residual stream"
WHOLE_MODEL = "whole model"
EVENT = "halfsafe.guard"


@dataclass(frozen=True)
class Escalation:
    """What runs wider than the model would by itself.

    Args:
        layers: layer -> mode it runs in.
        blocks: the top-level parts of the model whose values between layers are fp32; they return the stream's dtype.
        stream: all values between layers are fp32.
        whole: everything is fp32.
    """

    layers: Mapping[str, str] = field(default_factory=dict)
    blocks: frozenset[str] = frozenset()
    stream: bool = False
    whole: bool = False

    def __bool__(self) -> bool:
        return bool(self.layers or self.blocks or self.stream or self.whole)

    def __or__(self, other: "Escalation") -> "Escalation":
        """Merge what runs wider in either: of a layer that both name, the mode that is nearer to fp32."""
        order = list(MODES).index
        nearer = {layer: max(self.layers.get(layer, mode), mode, key=order) for layer, mode in other.layers.items()}
        blocks = self.blocks | other.blocks
        return Escalation({**self.layers, **nearer}, blocks, self.stream or other.stream, self.whole or other.whole)

    def named(self) -> dict[str, str]:
        """Return what the report lists: layers with their modes, or the block, stream or model as a whole."""
        if self.whole:
            return {WHOLE_MODEL: FP32.name}
        named = {enclosing_block(layer, self.blocks) for layer in self.layers}
        parts = [STREAM] if self.stream else self.blocks - named
        return {**self.layers, **dict.fromkeys(parts, FP32.name)}

    def parts(self) -> list[str]:
        """List what the page names: the model, the stream, or top-level parts and the layers outside of them."""
        if self.whole or self.stream:
            return [WHOLE_MODEL if self.whole else STREAM]
        return sorted({enclosing_block(layer, self.blocks) or layer for layer in self.layers} | self.blocks)

    def rules(self) -> str:
        """Write the same as lines for Layer Rules, for a model that is given to Compute Dtype."""
        if self.whole:
            return "* compute=fp32 stream=fp32"
        inner = sorted(self.blocks - self.layers.keys())
        lines = ["* stream=fp32"] if self.stream else [f"{block}.* stream=fp32" for block in inner]
        return "\n".join([*lines, *(f"{layer} {MODES[mode].rule} stream=fp32" for layer, mode in self.layers.items())])


ALL_IN_FP32 = Escalation(whole=True)
AS_PLANNED = Escalation(stream=True)
"""The fallback of a model's compute plan in the place of that plan, ``fp16_safe``."""


@dataclass(frozen=True)
class ObservedRanges:
    """The largest magnitudes met in a call in which nothing could overflow.

    Args:
        layers: layer -> the larger of its largest input and result.
        blocks: top-level part -> its largest result.
        attention: the top-level parts with an attention whose bound passes fp16's range.
    """

    layers: Mapping[str, float] = field(default_factory=dict)
    blocks: Mapping[str, float] = field(default_factory=dict)
    attention: frozenset[str] = frozenset()


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


@dataclass(frozen=True)
class EncoderStep:
    """In what a VAE or text encoder runs. ``unpacked``: its quantized weights are dequantized before each product."""

    dtype: torch.dtype
    unpacked: bool = False


def encoder_steps(dtype: torch.dtype, has_bf16: bool, quantized: bool = False) -> list[EncoderStep]:
    """List the steps to repeat a VAE or text encoder at, that is in ``dtype``.

    The first is as it was, but for fp16, which overflows again. bf16 loses precision: only where the device has it.
    ``quantized``: its weights are, and all further steps have them dequantized.
    """
    wider = [torch.float32] if dtype != torch.float32 else []
    if dtype == torch.float16 and has_bf16:
        wider = [torch.bfloat16, *wider]
    as_it_was = [EncoderStep(dtype)] if dtype != torch.float16 else []
    unpacked = [EncoderStep(dtype, True)] if quantized else []
    return [*as_it_was, *unpacked, *(EncoderStep(one, quantized) for one in wider)]


def escalation_after(
    repeat: Escalation,
    present: Escalation,
    observed: ObservedRanges,
    origin: Origin | None,
    modes: Mapping[str, str],
    stream: str,
) -> Escalation:
    """Decide what runs wider from now on, after ``repeat`` gave a finite result.

    Args:
        present: the escalation the call failed in.
        observed: the magnitudes met in the repeat.
        modes: layer -> mode so far, of those that multiply.
        stream: the dtype of the values between layers; in fp16 ``safe_escalation`` was tried before fp32.
    """
    if not repeat.whole:
        return _escalate(present, observed, origin, modes)
    block = enclosing_block(origin.layer, observed.blocks) if origin else ""
    if stream == "fp16" or not block or block in present.blocks:
        return ALL_IN_FP32
    inside = {name: FP32.name for name in modes if enclosing_block(name, [block])}
    return Escalation({**present.layers, **inside}, present.blocks | {block}, present.stream)


def _escalate(
    present: Escalation, observed: ObservedRanges, origin: Origin | None, modes: Mapping[str, str]
) -> Escalation:
    """Return the escalation after a failed call that came out finite with nothing in fp16 but the operands of products.

    A layer is made wide if a value it met passes half of fp16's range; if a value between the top-level parts does, the
    stream is. Where no magnitude explains the failure, the part it happened in is widened, then the stream, then all.
    """
    wide = {name: FP16_WIDE.name for name, size in observed.layers.items() if size > LIMIT}
    culprit = origin.layer if origin else ""
    if culprit in modes and origin.multiplies and culprit not in wide:
        # All its values fit fp16: it is its sums or its 8-bit operands that do not.
        lowered = any(mode.sums_in_fp16 or mode.is_8bit for mode in modes_named([modes[culprit]]))
        wide[culprit] = (FP16 if lowered else FP16_WIDE).name
    blocks = {block for block in (enclosing_block(name, observed.blocks) for name in [*wide, culprit]) if block}
    if origin and "attention" in origin.op:
        blocks |= observed.attention
    grown = Escalation(
        {**present.layers, **wide},
        present.blocks | blocks,
        present.stream or any(size > LIMIT for size in observed.blocks.values()) or not (wide or blocks),
        present.whole,
    )
    if grown != present:
        return grown
    return Escalation(grown.layers, grown.blocks, True, present.stream)


def enclosing_block(layer: str, blocks: Collection[str]) -> str:
    """Return the top-level part a module is in; empty where it is in none."""
    inside = (block for block in blocks if layer == block or layer.startswith(f"{block}."))
    return max(inside, key=len, default="")
