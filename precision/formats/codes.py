"""How a storage writes a 2-D weight in ComfyUI's format: scales fixed by the weight, then the nearest codes.

A weight's codes belong to its rotated rows (:meth:`Codes.turned`) where the format rotates. ``params`` are the tensors
of the file besides the data, by the last part of their names (``weight_scale``): rows of them belong to rows of the
weight, except for those of :meth:`Codes.whole`.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch

from ..amax import host_amax
from .int8 import (
    LARGEST_CODE,
    SMALLEST_SCALE,
    dequantize_rows,
    quantize_rows,
    rotated,
    rotation_group,
    why_not_int8,
)
from .quantize import power_of_two_scale
from .scratch import empty
from .w4a8_scales import (
    GROUP,
    choose_codebook,
    choose_scales,
    choose_scales_of_6_bits,
    codebook_rows,
    levels_of_6_bits,
    nearest_levels,
    packed,
)  # fmt: skip

Params = dict[str, torch.Tensor]


class Codes:
    """The codes of one storage: what they are, and the numbers they stand for."""

    def why_not(self, columns: int) -> str:
        """Say why a weight with that many inputs cannot be held so; "" where it can be."""
        return why_not_int8(columns)

    def group(self, columns: int) -> int | None:
        """Return the group of inputs that is rotated together, None for a format that does not rotate."""
        return rotation_group(columns)

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotate rows ``(n, K)`` to the basis of the codes, in fp32. Turning twice gives the rows again."""
        group = self.group(rows.shape[1])
        return rows.float() if group is None else rotated(rows.float(), group)

    def sampled(self, rows: int, columns: int) -> torch.Tensor | None:
        """Return which rows of a weight :meth:`whole` wants to see; None for all of them."""
        return torch.zeros(0, dtype=torch.long)

    def whole(self, turned: torch.Tensor) -> Params:
        """Fix the tensors that all rows share by those rows that :meth:`sampled` names."""
        return {}

    def params(self, turned: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> Params:
        """Fix the scales of some rotated rows ``(n, K)``; the result has the tensors of ``whole`` too."""
        raise NotImplementedError

    def prepare(self, turned: torch.Tensor) -> Params:
        """Fix all tensors besides the data of a weight whose rotated rows are ``turned``, by itself alone."""
        seen = self.sampled(*turned.shape)
        return self.params(turned, self.whole(turned if seen is None else turned[seen.to(turned.device)]))

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Round fp32 columns ``(n, c)`` of the rotated weight to the nearest numbers that codes stand for.

        Args:
            at: which columns of the weight they are; None for all of them.

        Returns:
            Codes as :meth:`data` takes them, and their numbers in fp32, each of the shape of ``values``.
        """
        raise NotImplementedError

    def data(self, codes: torch.Tensor) -> torch.Tensor:
        """Make ``<layer>.weight`` of the codes of whole rows."""
        return codes

    def data_columns(self, columns: int) -> int:
        """Count the elements of a row of ``<layer>.weight``."""
        return columns

    dtype: torch.dtype = torch.int8
    """Of ``<layer>.weight``."""
    streams: bool = False
    """:meth:`encode` goes through any number of rows in constant memory."""

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Map the other tensors to their shapes and dtypes, without making them."""
        raise NotImplementedError

    def settings(self, columns: int) -> dict:
        """Return what ``<layer>.comfy_quant`` says besides the format."""
        return {}

    def pack(self, codes: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Params:
        """Make all tensors of a weight but ``comfy_quant``, by the last part of their names."""
        return {"weight": self.data(codes), **params}

    def encode(self, rows: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> Params:
        """Round rows of a weight as they are, not rotated, to nearest, and make their tensors."""
        turned = self.turned(rows)
        params = self.params(turned, whole)
        return self.pack(self.nearest(turned, params)[0], params)

    def encode_parts(
        self,
        parts: Iterable[tuple[slice, torch.Tensor]],
        shape: Sequence[int],
        whole: Mapping[str, torch.Tensor],
        device: torch.device | None = None,
    ) -> Params:
        """Round a weight that comes as slices and the rows in them; the result is on ``device``."""
        of = {"weight": ((shape[0], self.data_columns(shape[1])), self.dtype), **self.shapes(*shape)}
        made = {leaf: empty(*kind, device) for leaf, kind in of.items() if leaf not in whole}
        for part, rows in parts:
            found = self.encode(rows, whole)
            for leaf, tensor in made.items():
                tensor[part] = found[leaf]
        return {**made, **whole}


class Fp8Codes(Codes):
    """fp8 with one power-of-two scale for the whole weight."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype

    def why_not(self, columns: int) -> str:
        return ""

    def group(self, columns: int) -> int | None:
        return None

    def sampled(self, rows: int, columns: int) -> torch.Tensor | None:
        return None

    def whole(self, turned: torch.Tensor) -> Params:
        return {"weight_scale": torch.tensor(power_of_two_scale(host_amax(turned), self.dtype))}

    def params(self, turned: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> Params:
        return dict(whole)

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Columns that were corrected for earlier ones may exceed the range, which the cast would make NaN of.
        largest, scale = torch.finfo(self.dtype).max, params["weight_scale"].to(values.device)
        codes = (values / scale).clamp(-largest, largest).to(self.dtype)
        return codes, codes.float() * scale

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight_scale": ((), torch.float32)}


class Int8Codes(Codes):
    """int8 of the rotated weight with one scale per row."""

    streams = True

    def params(self, turned: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> Params:
        return {"weight_scale": (turned.abs().amax(1, keepdim=True) / LARGEST_CODE).clamp_(min=SMALLEST_SCALE)}

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes = (values / params["weight_scale"]).round_().clamp_(-LARGEST_CODE - 1, LARGEST_CODE).to(torch.int8)
        return codes, dequantize_rows(codes, params["weight_scale"], None)

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight_scale": ((rows, 1), torch.float32)}

    def settings(self, columns: int) -> dict:
        return {"convrot": True, "convrot_groupsize": rotation_group(columns)}

    def encode(self, rows: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> Params:
        codes, scale = quantize_rows(rows, rotation_group(rows.shape[1]))
        return {"weight": codes, "weight_scale": scale}


class W4a8Codes(Codes):
    """4-bit codes for 16 numbers of a codebook, times a scale per 16 inputs, on the int8 grid of their row."""

    bits = 4
    first = 0
    """The code of the lowest level."""

    def sampled(self, rows: int, columns: int) -> torch.Tensor | None:
        return codebook_rows(rows, columns)

    def whole(self, turned: torch.Tensor) -> Params:
        return {"weight_codebook": choose_codebook(turned)}

    def params(self, turned: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> Params:
        relative, channel = choose_scales(turned, whole["weight_codebook"])
        return {"weight_s_rel": relative, "weight_s_channel": channel, **whole}

    def levels(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the numbers of the codes before they are scaled, in ascending order."""
        return params["weight_codebook"]

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        relative, channel = params["weight_s_rel"].float(), params["weight_s_channel"].unsqueeze(1)
        if at is not None:
            relative = relative[:, torch.as_tensor(at, device=relative.device) // GROUP]
        codes, numbers = nearest_levels(self.levels(params), relative, values / channel)
        return codes.add_(self.first), numbers.mul_(channel)

    def data(self, codes: torch.Tensor) -> torch.Tensor:
        return packed(codes, self.bits)

    def data_columns(self, columns: int) -> int:
        return columns * self.bits // 8

    def shapes(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        relative = ((rows, columns // GROUP), torch.float8_e4m3fn)
        scales = {"weight_s_rel": relative, "weight_s_channel": ((rows,), torch.float32)}
        return scales | ({"weight_codebook": ((16,), torch.float32)} if self.bits == 4 else {})

    def settings(self, columns: int) -> dict:
        return {"group_size": GROUP, "convrot_groupsize": rotation_group(columns)}


class W6a8Codes(W4a8Codes):
    """6-bit codes for the whole numbers -31 to 31, times a scale per 16 inputs, on the int8 grid of their row."""

    bits = 6
    first = 1

    def why_not(self, columns: int) -> str:
        odd = columns % 32 and f"ComfyUI's 6-bit codes need a multiple of 32 inputs, and it has {columns}"
        return super().why_not(columns) or odd or ""

    def sampled(self, rows: int, columns: int) -> torch.Tensor | None:
        return Codes.sampled(self, rows, columns)

    def whole(self, turned: torch.Tensor) -> Params:
        return {}

    def params(self, turned: torch.Tensor, whole: Mapping[str, torch.Tensor]) -> Params:
        relative, channel = choose_scales_of_6_bits(turned)
        return {"weight_s_rel": relative, "weight_s_channel": channel}

    def levels(self, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return levels_of_6_bits(params["weight_s_channel"].device)
