"""ComfyUI's ``nvfp4`` and ``mxfp8``, made and unpacked by comfy-kitchen.

Scales of blocks lie in cuBLAS' layout, tiles of 128 rows x 4 columns, and rows and columns are
filled up with zeros: https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
"""

from collections.abc import Mapping

import torch

from ..base.dtypes import max_of
from ..base.message import Message, joined
from .format import Format
from .stored_weight import StoredWeight, Tensors

TILE = 128
SMALLEST = 2.0**-118
"""The smallest magnitude that mxfp8 is given: 448 times the smallest scale of a block."""
LOOKED_AT = 256
"""Rows unpacked at a time to see whether a weight's last column is zero."""


class Blocks(Format):
    """A format with a scale for each ``block`` inputs, whose rows and columns are padded to a
    multiple of ``block``.

    A file has no record of the shape before (ComfyUI takes the module's, ``_orig_shape`` in
    comfy/ops.py). A layer's bias tells its rows; a weight that ends in a value other than zero was
    not padded."""

    block: int
    writes = True
    aligned = TILE
    by_row = ("weight_scale",)

    def _outputs(self, weight: StoredWeight) -> int | None:
        """Return the rows before the padding, where the layer's bias tells them."""
        fits = weight.outputs is not None and -(-weight.outputs // self.block) * self.block == len(weight.data)
        return weight.outputs if fits else None

    def shape(self, weight: StoredWeight) -> tuple[int, ...]:
        rows, columns = super().shape(weight)
        return (self._outputs(weight) or rows, columns)

    def stored_shape(self, rows: int, columns: int) -> tuple[int, int]:
        rows, columns = (-(-size // self.block) * self.block for size in (rows, columns))
        return super().stored_shape(rows, columns)

    def check(self, weight: StoredWeight) -> None:
        columns = weight.shape[1]
        if columns % self.block:
            raise ValueError(Message("{0} inputs, where a multiple of {1} is meant", columns, self.block))
        scales = weight.tensors["weight_scale"]
        down, across = self._scales(weight.shape[0], columns)
        if scales.numel() != down * across:
            raise ValueError(
                Message("its weight_scale of shape {0} is not padded to {1} x {2}", tuple(scales.shape), down, across)
            )

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        start = part.start // TILE * TILE
        end = -(-part.stop // TILE) * TILE
        scales = weight.tensors["weight_scale"].reshape(-(-weight.shape[0] // TILE) * TILE, -1)
        values = self._unpacked(weight, weight.data[start:end], scales[start:end])
        return values[part.start - start : part.stop - start]

    def _unpacked(self, weight: StoredWeight, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def why_not(self, rows: int, columns: int) -> str:
        odd = next((size for size in (rows, columns) if size % self.block), None)
        return (
            Message("{0} needs sizes that are multiples of {1}; this layer has {2}", self.storage, self.block, odd)
            if odd
            else ""
        )

    def _scales(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of the padded scales."""
        return -(-rows // TILE) * TILE, -(-columns // self.block // 4) * 4

    def doubt(self, weight: StoredWeight) -> str:
        rows = weight.shape[0]
        may_be_padded = self._outputs(weight) is None and rows % self.block == 0
        open_rows = may_be_padded and not weight.rows(slice(rows - 1, rows)).any()
        parts = (weight.rows(slice(start, min(start + LOOKED_AT, rows))) for start in range(0, rows, LOOKED_AT))
        open_columns = not any(part[:, -1].any() for part in parts)
        what = joined((name for name, is_open in (("rows", open_rows), ("columns", open_columns)) if is_open), " and ")
        return Message("its last {0} are zero, which may be padding", what) if what else ""


class Nvfp4(Blocks):
    """Two e2m1 numbers a byte, the high half first; ``weight_scale`` e4m3 for each 16 inputs,
    ``weight_scale_2`` for all.

    ``pre_quant_scale`` (columns,), which ComfyUI multiplies the layer's inputs by, is part of the
    weight here."""

    name = "nvfp4"
    storage = "nvfp4"
    since = "0.8.0"
    colour = (236, 214, 92)
    product = "scaled_mm_nvfp4"
    unpacker = "dequantize_nvfp4"
    needs = ("weight_scale", "weight_scale_2")
    may_have = ("input_scale", "pre_quant_scale")
    signed = ("pre_quant_scale",)
    byte_scale = ("weight_scale", "float8_e4m3fn")
    largest = 6
    factors = ("weight_scale", "weight_scale_2", "pre_quant_scale")
    writer = "quantize_nvfp4"
    by_largest = True
    dtypes = (torch.uint8,)
    per_byte = 2
    block = 16

    def check(self, weight: StoredWeight) -> None:
        super().check(weight)
        if weight.tensors["weight_scale_2"].numel() != 1:
            raise ValueError(Message("its weight_scale_2 holds {0} values", weight.tensors["weight_scale_2"].numel()))
        if "pre_quant_scale" in weight.tensors:
            weight.require_shape("pre_quant_scale", (weight.shape[1],))

    def _unpacked(self, weight: StoredWeight, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        whole = weight.numbers("weight_scale_2").reshape(())
        values = self.kitchen(self.unpacker)(data, whole, scales.to(torch.float8_e4m3fn), torch.float32)
        smoothing = weight.tensors.get("pre_quant_scale")
        return values if smoothing is None else values.mul_(smoothing.float())

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {
            "weight": ((rows, columns // 2), torch.uint8),
            "weight_scale": (self._scales(rows, columns), torch.float8_e4m3fn),
            "weight_scale_2": ((), torch.float32),
        }

    def scale_for(self, largest: float) -> Tensors:
        # As ``TensorCoreNVFP4Layout.quantize`` of comfy/quant_ops.py; above 0, because kernels divide by it.
        scale = torch.tensor(largest / (self.largest * max_of(torch.float8_e4m3fn)))
        return {"weight_scale_2": scale.clamp_(min=torch.finfo(torch.float32).tiny)}

    def encode(self, rows: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Tensors:
        data, scales = self.kitchen(self.writer)(rows.float(), params["weight_scale_2"].to(rows.device))
        return {"weight": data, "weight_scale": scales}


class Mxfp8(Blocks):
    """e4m3 numbers, ``weight_scale`` e8m0 for each 32 inputs."""

    name = "mxfp8"
    storage = "mxfp8"
    since = "0.18.0"
    colour = (190, 108, 70)
    product = "scaled_mm_mxfp8"
    unpacker = "dequantize_mxfp8"
    writer = "quantize_mxfp8"
    may_have = ("input_scale",)
    byte_scale = ("weight_scale", "float8_e8m0fnu")
    dtypes = (torch.float8_e4m3fn,)
    block = 32

    def _unpacked(self, weight: StoredWeight, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        return self.kitchen(self.unpacker)(data, scales, torch.float32)

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        scales = self._scales(rows, columns)
        return {"weight": ((rows, columns), torch.float8_e4m3fn), "weight_scale": (scales, torch.float8_e8m0fnu)}

    def encode(self, rows: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Tensors:
        # comfy-kitchen 0.2.26 makes NaN of a block whose scale would be below e8m0's smallest number, 2^-127.
        values = rows.float()
        data, scales = self.kitchen(self.writer)(values.masked_fill(values.abs() < SMALLEST, 0.0))
        return {"weight": data, "weight_scale": scales}
