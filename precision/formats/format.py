"""What every quantization format of ComfyUI has, and a weight in one of them.

A format is a class: its tensors in a file, how they are read and written, and what multiplies them. Names, tensors and
versions are those of ComfyUI ``comfy/quant_ops.py`` (``QUANT_ALGOS``) and ``comfy/ops.py``
(``_load_quantized_module``), layouts and products those of comfy-kitchen's ``tensor/*.py``;
``tests/host/load/test_registry.py`` holds the formats against both.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch

from ..base.amax import host_amax
from ..base.dtypes import name_of
from ..base.errors import StorageNotHeld
from ..base.modes import Mode

Tensors = dict[str, torch.Tensor]
"""Tensors of a layer by the last part of their names: ``weight``, ``weight_scale``."""


class NonFiniteScale(ValueError):
    """The tensor ``leaf`` holds NaN, Inf, or a negative number where none can be."""

    def __init__(self, leaf: str):
        super().__init__("a scale that is NaN, infinite or negative")
        self.leaf = leaf


def kitchen_function(name: str) -> Callable | None:
    """Return an object of ComfyUI's package comfy-kitchen; None if the package or the object is missing."""
    try:
        import comfy_kitchen

        return attrgetter(name)(comfy_kitchen)
    except (ImportError, AttributeError):
        return None


class Format:
    """A quantization format of ComfyUI.

    Attributes:
        name: as ``comfy_quant`` declares it in a file.
        storage: as nodes, rules and reports call it.
        since: the first ComfyUI with it.
        colour: RGB, in pictures and on the page.
        product: comfy-kitchen's function that multiplies such a weight; empty for fp8, which torch's ``_scaled_mm``
            does.
        mode: the arithmetic of ComfyUI's own product; None where no row of ``precision/base/modes.py`` says it.
        quantizes_operands: that product multiplies quantized operands; else it unpacks the weight as it goes.
        bits: of a value, which tell formats with one name apart; 0 where the name does.
        asks: a parameter of ``quantize`` of comfy-kitchen's layout, without which it has the name but not this.
        unpacker: comfy-kitchen's function that unpacks it, and ``writer``: the one that makes it; empty where this
            package does, in constant memory for any number of rows of any dtype.
        writes: weights are written in it.
        needs: the tensors beside ``<layer>.weight`` that a file must have, and ``may_have``: those that it may.
        signed: the tensors that may be negative.
        largest: magnitude of a code; 0 where the data are numbers. A weight is at most that times its ``factors``, plus
            ``offset``: the tensors of those names.
        rotated: whether codes belong to rotated rows; None where ``convrot`` of a file says that.
        byte_scale: the tensor that a file may hold as bytes, and the name of its dtype in torch.
        dtypes: that data may be stored in, the usual one first, and ``per_byte``: how many values a byte holds.
    """

    name: str
    storage: str
    since: str
    colour: tuple[int, int, int]
    product: str = ""
    mode: Mode | None = None
    quantizes_operands: bool = True
    bits: int = 0
    asks: str = ""
    unpacker: str = ""
    writer: str = ""
    writes: bool = False
    needs: tuple[str, ...] = ("weight_scale",)
    may_have: tuple[str, ...] = ()
    signed: tuple[str, ...] = ()
    largest: float = 0
    factors: tuple[str, ...] = ("weight_scale",)
    offset: str = ""
    rotated: bool | None = False
    byte_scale: tuple[str, str] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.int8,)
    per_byte: int = 1

    @property
    def title(self) -> str:
        """The name, with the storage where several have it."""
        return f"{self.name} ({self.storage})" if self.bits else self.name

    @property
    def leaves(self) -> tuple[str, ...]:
        """The tensors beside ``<layer>.weight`` that ComfyUI reads, by the last part of their names."""
        return (*self.needs, *self.may_have)

    @property
    def unpacks(self) -> bool:
        """Tell whether its weights can be unpacked here."""
        return not self.unpacker or kitchen_function(self.unpacker) is not None

    @property
    def can_write(self) -> bool:
        """Tell whether weights can be written in it here."""
        return self.writes and (not self.writer or kitchen_function(self.writer) is not None)

    def kitchen(self, name: str) -> Any:
        """Return an object of comfy-kitchen.

        Raises:
            StorageNotHeld: it is not installed, or too old.
        """
        found = kitchen_function(name)
        if found is None:
            problem = f"{self.title} needs the comfy-kitchen of ComfyUI {self.since}, which this Python lacks."
            raise StorageNotHeld(problem, "Update ComfyUI and the packages that it requires, or use storage=int8.")
        return found

    # Reading

    def read(self, data: torch.Tensor, tensors: Tensors, settings: dict, outputs: int | None) -> "Encoded":
        """Make the weight of the tensors as a file has them; ``outputs``: of the layer, if the file tells them."""
        return Encoded(self, data, tensors, settings)

    def shape(self, weight: "Encoded") -> tuple[int, ...]:
        """Return the shape of the values."""
        return (weight.data.shape[0], weight.data.shape[1] * self.per_byte)

    def check(self, weight: "Encoded") -> None:
        """Raise ValueError unless the tensors' shapes fit the weight's: one scale, or a scale for each row."""
        if weight.tensors["weight_scale"].numel() > 1:
            weight.require_shape("weight_scale", (weight.shape[0], 1), (weight.shape[0],))

    def rows(self, weight: "Encoded", part: slice) -> torch.Tensor:
        """Unpack some rows of a weight to fp32."""
        raise NotImplementedError

    def doubt(self, weight: "Encoded") -> str:
        """Say why a weight's own shape is uncertain; "" for a certain shape."""
        return ""

    # Writing

    def why_not(self, columns: int) -> str:
        """Say why a weight with so many inputs cannot be held in the format; "" if possible."""
        return ""

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Map the tensors of a written weight to their shapes and dtypes, ``weight`` first."""
        raise NotImplementedError

    def settings(self, columns: int) -> dict:
        """Return what ``<layer>.comfy_quant`` says besides the format."""
        return {}

    def shared(self, parts: Iterable[torch.Tensor]) -> Tensors:
        """Make the tensors shared by all rows of a weight, from rows in parts that are spread over the weight."""
        return {}

    def encode(self, rows: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Tensors:
        """Round rows of a weight to nearest and make their tensors, without the shared tensors in ``params``."""
        raise NotImplementedError

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotate rows ``(n, K)`` to the basis of the codes, in fp32. Turning twice gives the rows again."""
        return rows.float()

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Round fp32 columns ``(n, c)`` of the turned weight to the nearest numbers that codes stand for.

        Args:
            params: the tensors of these rows.
            at: which columns of the weight they are; None for all of them.
        """
        raise NotImplementedError

    def codes(self, numbers: torch.Tensor, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make ``<layer>.weight`` of whole rows of numbers from :meth:`nearest`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Encoded:
    """A weight of ``shape`` (rows, columns) in a format.

    Attributes:
        data: ``<layer>.weight``.
        tensors: those beside it.
        settings: ``<layer>.comfy_quant``, with its ``format``.
        outputs: rows of the weight before it was padded, if the file tells them.

    Raises:
        ValueError: when made: the tensors do not fit the format; the message says why.
    """

    format: Format
    data: torch.Tensor
    tensors: Tensors
    settings: dict
    outputs: int | None = None

    def __post_init__(self):
        if self.data.dim() != 2 or not self.data.numel():
            raise ValueError(f"a weight of shape {tuple(self.data.shape)}, where two dimensions are meant")
        if self.data.dtype not in self.format.dtypes:
            meant = name_of(self.format.dtypes[0])
            raise ValueError(f"stored in {name_of(self.data.dtype)}, where {meant} is meant")
        for name in self.tensors:
            values = self.numbers(name)
            if not torch.isfinite(values).all() or (name not in self.format.signed and values.min() < 0):
                raise NonFiniteScale(name)
        self.format.check(self)
        self.group  # noqa: B018

    @property
    def shape(self) -> tuple[int, ...]:
        return self.format.shape(self)

    @property
    def doubt(self) -> str:
        return self.format.doubt(self)

    def rows(self, part: slice) -> torch.Tensor:
        """Unpack some rows to fp32, ``(n, columns)``."""
        return self.format.rows(self, part)

    def bound(self) -> float:
        """Return an upper bound on the magnitude of a weight; NaN if its data hold a NaN."""
        sizes = {name: self.numbers(name).abs().max().item() for name in self.tensors}
        factors = math.prod(sizes.get(name, 1.0) for name in self.format.factors)
        largest = self.format.largest or host_amax(self.data)
        return (largest * factors + sizes.get(self.format.offset, 0.0)) * math.sqrt(self.group or 1)

    def moved(self, device: torch.device | str) -> "Encoded":
        """Return the same weight on a device."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, data=self.data.to(device), tensors=tensors)

    def numbers(self, name: str) -> torch.Tensor:
        """Return a tensor beside the data in fp32."""
        tensor = self.tensors[name]
        if not tensor.dtype.is_floating_point or not tensor.numel():
            raise ValueError(f"its {name} holds {tensor.numel()} values in {name_of(tensor.dtype)}")
        return tensor.float()

    def row_scales(self, part: slice) -> torch.Tensor:
        """Return the scales of some rows as a column, or the one scale of all."""
        scales = self.numbers("weight_scale").reshape(-1, 1)
        return scales if len(scales) == 1 else scales[part]

    def require_shape(self, name: str, *shapes: tuple[int, ...]) -> None:
        """Raise ValueError unless a tensor has one of these shapes."""
        if tuple(self.tensors[name].shape) not in shapes:
            meant = " or ".join(map(str, shapes))
            raise ValueError(f"its {name} has the shape {tuple(self.tensors[name].shape)}, where {meant} is meant")

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
        # A regular Hadamard matrix exists for powers of 4.
        if type(size) is not int or size not in (4, 16, 64, 256, 1024) or self.shape[-1] % size:
            raise ValueError(f"a convrot_groupsize of {size!r} for {self.shape[-1]} inputs")
        return size


@dataclass(frozen=True)
class Experts(Encoded):
    """A bank of experts' weights, ``(experts, rows, columns)``; each tensor's first dimension is ``num_experts``."""

    def __post_init__(self):
        if self.data.dim() != 3 or not self.data.numel():
            raise ValueError(f"a bank of experts of shape {tuple(self.data.shape)}")
        self.experts  # noqa: B018

    @cached_property
    def experts(self) -> list[Encoded]:
        count = len(self.data)
        odd = next((t for t in self.tensors.values() if t.dim() and t.shape[0] != count), None)
        if odd is not None:
            raise ValueError(f"a tensor of shape {tuple(odd.shape)} for {count} experts")
        own = ({name: t[i] if t.dim() else t for name, t in self.tensors.items()} for i in range(count))
        return [Encoded(self.format, data, t, self.settings) for data, t in zip(self.data, own, strict=True)]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.experts), *self.experts[0].shape)

    @property
    def doubt(self) -> str:
        return next(filter(None, (expert.doubt for expert in self.experts)), "")

    def rows(self, part: slice) -> torch.Tensor:
        each = self.shape[1]
        first, last = part.start // each, (part.stop - 1) // each
        slices = [slice(max(part.start - i * each, 0), min(part.stop - i * each, each)) for i in range(first, last + 1)]
        return torch.cat([self.experts[i].rows(rows) for i, rows in enumerate(slices, first)])

    def bound(self) -> float:
        return max(expert.bound() for expert in self.experts)
