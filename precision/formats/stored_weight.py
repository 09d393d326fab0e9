"""A weight as a file stores it: data, and a format that says what they and the tensors beside them
are."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from ..base.dtypes import max_of, name_of
from ..base.errors import NonFiniteWeight
from ..base.message import Message, joined
from .format import Format, Tensors
from .plain import NUMBERS, PLAIN

CHUNK = 1 << 20
FULL_PRECISION = "full_precision_matrix_mult"
POWERS_OF_4 = tuple(4**exponent for exponent in range(1, 9))
"""The sizes of regular Hadamard matrices, as comfy-kitchen makes them (``_build_hadamard`` in
tensor/int8_utils.py)."""


class NonFiniteScale(ValueError):
    """The tensor ``leaf`` holds NaN, Inf, complex numbers, or a negative number where none can
    be."""

    def __init__(self, leaf: str):
        super().__init__("a scale that is NaN, infinite, negative or complex")
        self.leaf = leaf


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a model.

    Attributes:
        name: full tensor name, ``blocks.0.ffn.0.weight``.
        format: what the data and the tensors beside them stand for.
        tensors: what the format has beside the data.
        input_scale: fp32 0-dim multiplier of the inputs of a layer with fp8 numbers, if the file has one.
        settings: what the file's ``comfy_quant`` says of the layer, also of a weight that was patched since.
        outputs: of the layer, if the file tells them; rows beyond those are padding.
        file: the file that holds it, which of a sharded set is one of several.
        start: the byte of that file at which ``data`` begin; 0 for data that were made in memory.
    """

    name: str
    data: torch.Tensor
    format: Format = PLAIN
    tensors: Tensors = field(default_factory=dict)
    input_scale: torch.Tensor | None = None
    settings: dict = field(default_factory=dict)
    outputs: int | None = None
    file: str = ""
    start: int = 0

    @property
    def layer(self) -> str:
        return self.name.removesuffix(".weight")

    @property
    def full_precision(self) -> bool:
        """True if the file asks for ``full_precision_matrix_mult``."""
        return bool(self.settings.get(FULL_PRECISION))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The weight's own shape; ``data`` may hold two numbers in a byte."""
        return (len(self.experts), *self.experts[0].shape) if self.experts else self.format.shape(self)

    @cached_property
    def storage(self) -> str:
        """The storage name: ``bf16``, ``fp8_e4m3fn``, ``int8``, ``nvfp4``."""
        return self.format.storage_of(self)

    @property
    def bytes(self) -> int:
        """Bytes of the data, and of the scales and other tensors beside them."""
        return self.data.nbytes + sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def quantized(self) -> bool:
        """True if it is stored in 8 bits or fewer."""
        return self.format.is_quantized(self)

    @property
    def plain(self) -> bool:
        """True if ``data`` are the weight's values."""
        return self.format.plain

    @property
    def has_many_scales(self) -> bool:
        """True if it is fp8 with a scale for each row or block, which ComfyUI's fp8 does not
        have."""
        return self.format.has_many_scales(self)

    @property
    def is_number(self) -> bool:
        """True if the data are floating point numbers; e8m0, bare exponents, are none."""
        return self.data.dtype in NUMBERS

    def with_values(self, values: torch.Tensor) -> "StoredWeight":
        """Return plain values in place of the data, with the settings of the layer."""
        return replace(self, data=values, format=PLAIN, tensors={}, start=0)

    def unpacked(self, dtype: torch.dtype) -> "StoredWeight":
        """Return the weight itself if the data are its values, else plain values in ``dtype``."""
        return self if self.plain else self.with_values(self.dequantize(dtype))

    @property
    def auxiliary(self) -> dict[str, torch.Tensor]:
        """What ComfyUI needs besides the data of a weight in a format, by full name."""
        return self.format.auxiliary(self) if self.tensors else {}

    def moved(self, device: torch.device | str) -> "StoredWeight":
        """Return the same weight on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, data=self.data.to(device), tensors=tensors)

    @cached_property
    def experts(self) -> list["StoredWeight"]:
        """The weights of a bank of experts, ``(experts, rows, columns)``; empty for another
        weight."""
        if self.format.plain or "num_experts" not in self.settings:
            return []
        count = len(self.data)
        odd = next((tensor for tensor in self.tensors.values() if tensor.dim() and len(tensor) != count), None)
        if odd is not None:
            raise ValueError(Message("a tensor of shape {0} for {1} experts", tuple(odd.shape), count))
        alone = {key: value for key, value in self.settings.items() if key != "num_experts"}

        def expert(i: int) -> StoredWeight:
            own = {name: tensor[i] if tensor.dim() else tensor for name, tensor in self.tensors.items()}
            return replace(self, data=self.data[i], tensors=own, settings=alone, outputs=None)

        return list(map(expert, range(count)))

    @property
    def doubt(self) -> str:
        """Why the shape of a weight in a format is uncertain; "" for a certain shape."""
        return next(filter(None, (each.format.doubt(each) for each in self.experts or [self])), "")

    def check(self) -> None:
        """Raise ValueError unless the tensors of a weight fit its format."""
        dimensions = 3 if "num_experts" in self.settings else 2
        if self.data.dim() != dimensions or not self.data.numel():
            shape = tuple(self.data.shape)
            raise ValueError(Message("a weight of shape {0}, expected {1} dimensions", shape, dimensions))
        for expert in self.experts:
            expert.check()
        if self.experts:
            return
        if self.data.dtype not in self.format.dtypes:
            meant = name_of(self.format.dtypes[0])
            raise ValueError(Message("stored in {0}, expected {1}", name_of(self.data.dtype), meant))
        for name in self.tensors:
            if self.tensors[name].is_complex():
                raise NonFiniteScale(name)
            values = self.numbers(name)
            if not torch.isfinite(values).all() or (name not in self.format.signed and values.min() < 0):
                raise NonFiniteScale(name)
        self.format.check(self)
        self.group  # noqa: B018

    def numbers(self, name: str) -> torch.Tensor:
        """Return a tensor beside the data in fp32."""
        tensor = self.tensors[name]
        if not tensor.dtype.is_floating_point or not tensor.numel():
            raise ValueError(Message("its {0} holds {1} values in {2}", name, tensor.numel(), name_of(tensor.dtype)))
        return tensor.float()

    def row_scales(self, part: slice) -> torch.Tensor:
        """Return the scales of some rows as a column, or the one scale of all."""
        scales = self.numbers("weight_scale").reshape(-1, 1)
        return scales if len(scales) == 1 else scales[part]

    def require_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        """Raise ValueError unless a tensor has one of these shapes."""
        if tuple(self.tensors[name].shape) not in shapes:
            meant = joined(map(str, shapes), " or ")
            shape = tuple(self.tensors[name].shape)
            raise ValueError(Message("its {0} has shape {1}, expected {2}", name, shape, meant))

    def setting(self, key: str, default: Any) -> Any:
        """Return a value of ``comfy_quant``, at the top or under ``params``, as ComfyUI does."""
        params = self.settings.get("params")
        return self.settings.get(key, params.get(key, default) if isinstance(params, dict) else default)

    @cached_property
    def group(self) -> int | None:
        """The group of inputs that is rotated together; None for a weight that is not rotated."""
        if not (self.setting("convrot", False) if self.format.rotated is None else self.format.rotated):
            return None
        size = self.setting("convrot_groupsize", 256)
        if type(size) is not int or size not in POWERS_OF_4 or self.shape[-1] % size:
            problem = Message("a convrot_groupsize of {0} for {1} inputs", f"{size!r}", self.shape[-1])
            raise ValueError(Message("{0}, where a power of 4 that divides them is meant", problem))
        return size

    def parts(
        self, sample: int | None = None, align: int = 1, most: int | None = None
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the weight in fp32, some rows at a time: slices of :meth:`matrix` and their values.
        Up to ``most`` values each (4 MB), of like size: a BLAS may sum the few rows of a small rest
        in another order. The rows of a 2-D weight stay whole.

        ``sample``: give at most twice so many parts, spread evenly over the weight. ``align``:
        parts begin at multiples of so many rows, and may be that large."""
        rows, columns = self._matrix_shape
        height = max(1, (most or CHUNK) // max(columns, 1))
        count = -(-rows // height)
        starts = range(0, rows, -(-height // align) * align) if align > 1 else [rows * i // count for i in range(count)]
        ends = [*starts[1:], rows]
        for i in range(0, len(starts), max(1, len(starts) // sample) if sample else 1):
            part = slice(starts[i], ends[i])
            yield part, self.rows(part)

    def rows(self, rows: slice) -> torch.Tensor:
        """Return some rows of :meth:`matrix`, in fp32."""
        if self.experts:
            return self._rows_of_experts(rows)
        return self.format.rows(self, rows)

    def _rows_of_experts(self, part: slice) -> torch.Tensor:
        each = self.shape[1]
        first = part.start // each
        last = (part.stop - 1) // each
        slices = [slice(max(part.start - i * each, 0), min(part.stop - i * each, each)) for i in range(first, last + 1)]
        return torch.cat([self.experts[i].rows(rows) for i, rows in enumerate(slices, first)])

    def bound(self) -> float:
        """Return an upper bound on ``|weight|``; NaN if its data hold a NaN. Tight where there is one scale."""
        return max(expert.bound() for expert in self.experts) if self.experts else self.format.bound(self)

    def finite_bound(self, path) -> float:
        """Return an upper bound on the magnitude of the dequantized weight; its amax where there is one
        scale.

        Raises:
            NonFiniteWeight: it holds NaN or Inf, or exceeds fp32's range.
        """
        bound = self.bound()
        if not math.isfinite(bound):
            raise self.damaged(path, "holds NaN or Inf")
        if bound > max_of(torch.float32):
            raise self.damaged(path, "exceeds the range of fp32")
        return bound

    def damaged(self, path, problem: str) -> NonFiniteWeight:
        """Return the error for a weight with NaN, Inf or numbers beyond the range of fp32."""
        return NonFiniteWeight(self.file or path, problem, self.name, "The file is damaged: download it again.")

    @cached_property
    def amax(self) -> float:
        """The largest magnitude of the weight; reads all values."""
        return max(part.abs().max().item() for _, part in self.parts())

    def exceeds(self, limit: float, bound: float) -> bool:
        """True if a value of the weight exceeds ``limit``; reads the weight where its ``bound``
        leaves that open."""
        if bound <= limit or self.format.one_scale(self) is not None:
            return bound > limit
        return any(part.abs().max() > limit for _, part in self.parts())

    def matrix(self, tensor: torch.Tensor) -> torch.Tensor:
        """View a tensor of the weight's shape as the 2-D view that :meth:`parts` slices."""
        return tensor.reshape(self._matrix_shape)

    @property
    def _matrix_shape(self) -> tuple[int, int]:
        count = math.prod(self.shape)
        columns = self.shape[-1] if self.shape and count else 1
        rows = self.format.matrix_rows(self) or count // columns
        return rows, count // rows if rows else 1

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize the weight to ``dtype``; beyond the result this takes 16 MB.
        Unscaled data of that dtype is not copied."""
        if self.plain:
            same = self.data.dtype == dtype
            return self.data if same else torch.empty(self.shape, dtype=dtype, device=self.data.device).copy_(self.data)
        result = torch.empty(self.shape, dtype=dtype)
        target = self.matrix(result)
        for rows, part in self.parts():
            target[rows] = part
        return result
