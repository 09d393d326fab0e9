"""ComfyUI's ``asym_w4a8_int8``: codes of 4 or 6 bits for numbers on an int8 grid, made and unpacked
by comfy-kitchen.

``weight_s_rel`` (rows, groups) times a code's value, rounded to int8, times ``weight_s_channel``
(rows,), rotated. ``weight_codebook`` (16,) has the values of 4-bit codes, else they are the codes
about their middle; the top bits of 6-bit codes follow in a plane of their own
(``tensor/w4a8_int8.py``: 4 bits from 0.2.31 on, 6 bits from 0.2.40 on)."""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..base.message import Message
from ..base.modes import INT8
from .int8 import Rotated, rotation_group
from .stored_weight import StoredWeight, Tensors

GROUP = 16
LARGEST_6_BIT = 31


class W4a8(Rotated):
    """Codes of 4 bits, or of 6."""

    name = "asym_w4a8_int8"
    product = "w4a8_int8_linear"
    mode = INT8
    needs = ("weight_s_rel", "weight_s_channel")
    by_row = ("weight_s_rel", "weight_s_channel")
    may_have = ("weight_codebook", "weight_correction")
    signed = ("weight_codebook", "weight_correction")
    byte_scale = ("weight_s_rel", "float8_e4m3fn")
    largest = 127
    factors = ("weight_s_channel",)
    offset = "weight_correction"
    unpacker = "dequantize_w4a8_int8_weight"
    writer = "quantize_w4a8_int8_weight"
    writes = calibrates = True

    def __init__(self, storage: str, bits: int, since: str, colour: tuple[int, int, int], asks: str = ""):
        self.storage = storage
        self.bits = bits
        self.since = since
        self.colour = colour
        self.asks = asks

    def shape(self, weight: StoredWeight) -> tuple[int, ...]:
        scale = weight.tensors["weight_s_rel"]
        return (len(weight.data), (scale.shape[1] if scale.dim() == 2 else 0) * _group_size(weight))

    def stored_shape(self, rows: int, columns: int) -> tuple[int, int]:
        return (rows, columns * self.bits // 8)

    def check(self, weight: StoredWeight) -> None:
        rows, columns = weight.shape
        size = _group_size(weight)
        shapes = {"weight_s_rel": (rows, columns // size), "weight_s_channel": (rows,)}
        shapes |= {"weight_codebook": (16,), "weight_correction": (columns // size, rows)}
        for name in weight.tensors:
            weight.require_shape(name, shapes[name])
        bits = weight.data.shape[1] * 8 // max(columns, 1)
        if bits not in (4, 6) or weight.data.shape[1] * 8 != columns * bits:
            raise ValueError(Message("{0} bytes per row for {1} inputs", weight.data.shape[1], columns))
        if bits == 6 and len(weight.tensors) > 2:
            raise ValueError("6-bit codes with a codebook or correction, which the format does not have")

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        tensors = weight.tensors
        correction = tensors.get("weight_correction")
        return self.kitchen(self.unpacker)(
            weight.data[part],
            tensors["weight_s_rel"][part],
            tensors["weight_s_channel"][part],
            codebook=tensors.get("weight_codebook"),
            correction=None if correction is None else correction[:, part],
            group_size=_group_size(weight),
            convrot_groupsize=weight.group,
            output_dtype=torch.float32,
        )

    def why_not(self, rows: int, columns: int) -> str:
        odd = self.bits == 6 and columns % 32
        return super().why_not(rows, columns) or (
            Message("ComfyUI's 6-bit codes need a multiple of 32 inputs; this layer has {0}", columns) if odd else ""
        )

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scales = {
            "weight": ((rows, columns * self.bits // 8), torch.int8),
            "weight_s_rel": ((rows, columns // GROUP), torch.float8_e4m3fn),
            "weight_s_channel": ((rows,), torch.float32),
        }
        return scales | ({"weight_codebook": ((16,), torch.float32)} if self.bits == 4 else {})

    def settings(self, columns: int) -> dict:
        return {"group_size": GROUP, "convrot_groupsize": rotation_group(columns)}

    def shared(self, parts: Iterable[torch.Tensor]) -> Tensors:
        return {"weight_codebook": self._quantized(torch.cat(list(parts)))[4]} if self.bits == 4 else {}

    def encode(self, rows: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Tensors:
        data, relative, channel, *_ = self._quantized(rows, params.get("weight_codebook"))
        return {"weight": data, "weight_s_rel": relative, "weight_s_channel": channel}

    def _quantized(self, rows: torch.Tensor, codebook: torch.Tensor | None = None) -> tuple:
        # comfy-kitchen before 0.2.40 has 4 bits and no such parameter.
        bits = {} if self.bits == 4 else {"bits": self.bits}
        group = rotation_group(rows.shape[1])
        return self.kitchen(self.writer)(rows.float(), convrot_groupsize=group, codebook_tensor=codebook, **bits)

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> torch.Tensor:
        grids = self._grids(params, at)
        channel = params["weight_s_channel"].unsqueeze(1)
        targets = (values / channel).reshape(len(grids), -1)
        return grids.gather(1, _nearest(grids, targets)).view(values.shape).mul_(channel)

    def codes(self, numbers: torch.Tensor, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        grids = self._grids(params)
        targets = (numbers / params["weight_s_channel"].unsqueeze(1)).reshape(len(grids), -1)
        codes = _nearest(grids, targets).to(torch.uint8).view(numbers.shape)
        if self.bits == 4:
            return _halves(codes).view(torch.int8)
        codes += 1  # the code 0 is not used
        top = codes >> 4
        fours = top[:, ::4] | top[:, 1::4] << 2 | top[:, 2::4] << 4 | top[:, 3::4] << 6
        return torch.cat((_halves(codes), fours), 1).view(torch.int8)

    def _grids(self, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None) -> torch.Tensor:
        """Return the ascending int8 numbers of each group's codes, ``(rows * groups, codes)``."""
        relative = params["weight_s_rel"].float()
        if at is not None:
            relative = relative[:, torch.as_tensor(at, device=relative.device) // GROUP]
        if self.bits == 4:
            levels = params["weight_codebook"]
        else:
            levels = torch.arange(-LARGEST_6_BIT, LARGEST_6_BIT + 1.0, device=relative.device)
        return (levels * relative.unsqueeze(2)).round_().clamp_(-127, 127).view(-1, len(levels))


def _group_size(weight: StoredWeight) -> int:
    size = weight.setting("group_size", GROUP)
    if type(size) is not int or not 4 <= size <= 4096 or (16 % size and size % 16):
        raise ValueError(f"a group_size of {size!r}")
    return size


def _nearest(grids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Find the index of the nearest number of its row's ascending grid for each target, the lower
    of two as near."""
    position = torch.searchsorted(grids, targets.contiguous())
    low = (position - 1).clamp_(min=0)
    high = position.clamp_(max=grids.shape[1] - 1)
    return torch.where((targets - grids.gather(1, high)).abs_() < (targets - grids.gather(1, low)).abs_(), high, low)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """Pack the low 4 bits of two codes into a byte, the first one low."""
    return codes[:, ::2] & 15 | (codes[:, 1::2] & 15) << 4
