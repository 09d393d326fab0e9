"""What every format of a weight has.

A format is a class: its tensors in a file, how they are read and written, and what multiplies them.
A weight (:class:`~.stored_weight.StoredWeight`) has a format, ``PLAIN`` if its data are the values,
and nothing outside of this room looks at data or scales to tell one from another: what somebody has
to know is asked of the format.

| asked | methods |
|---|---|
| its values, shape, bounds | ``rows``, ``shape``, ``bound``, ``largest_of``, ``has_values`` |
| its name in plans and reports | ``storage_of``, ``counted_as``, ``scaling``, ``scales_text``, ``layout`` |
| what ComfyUI makes of it | ``is_held_by``, ``as_loaded``, ``is_cast``, ``multiplies_in``, ``misread`` |
| what a storage changes | ``lies_in``, ``is_same_in``, ``is_rounded_again``, ``holds`` |
| what it may be held in | ``is_only_linear``, ``one_scale``, ``has_many_scales`` |
| its tensors, written | ``specs``, ``stored_bytes``, ``settings``, ``encode``, ``taken_over``, ``auxiliary`` |
| rows of several weights as one | ``joins``, ``by_row``, ``aligned`` |
| its product | ``kernels_for``, ``apply``, ``unpacking``, ``numbers``, ``apply_unpacked`` |

A product takes plain tensors. ``kernels_for`` looks up what it needs once for operands of a form,
``apply`` multiplies: data and scale are those of the call, so that nothing is kept of a weight that
may move or change. Kernels are functions of comfy-kitchen, which the caller finds (``Find``), so
that a product runs on any that are given.

The defaults below are those of ComfyUI's own quantization formats; ``plain.py`` has the others.
Names, tensors and versions are those of ComfyUI ``comfy/quant_ops.py`` (``QUANT_ALGOS``) and
``comfy/ops.py`` (``_load_quantized_module``), layouts and products those of comfy-kitchen's
``tensor/*.py``; ``tests/host/load/test_registry.py`` holds the formats against both."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from ..base.amax import amax_value
from ..base.errors import StorageNotHeld
from ..base.message import Message
from ..base.modes import Mode
from .layer_plan import AS_FILE

if TYPE_CHECKING:
    from .stored_weight import StoredWeight

Tensors = dict[str, torch.Tensor]
"""Tensors of a layer by the last part of their names: ``weight``, ``weight_scale``."""
Find = Callable[..., Callable]
"""``find(name, **arguments)`` returns comfy-kitchen's function of that name, in the first of its
backends that takes these arguments. The function takes them by their places."""
Unpacker = tuple[Callable, tuple]
"""comfy-kitchen's function that unpacks a weight, and its arguments after data and scale."""


def kitchen_function(name: str) -> Callable | None:
    """Return an object of ComfyUI's package comfy-kitchen; None if the package or the object is
    missing."""
    try:
        import comfy_kitchen

        return attrgetter(name)(comfy_kitchen)
    except (ImportError, AttributeError):
        return None


class Format:
    """A format of a weight; a quantization format of ComfyUI, unless it says otherwise.

    Attributes:
        plain: the data are the values, and nothing stands beside them.
        counted_as: what weights count as where the dtype of most of a file is asked; empty for their storage.
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
        writes: weights are written in it; ``calibrates``: with codes that a calibration chooses, too.
        by_largest: the tensors shared by all rows follow from the largest magnitude of the weight.
        aligned: the rows that are encoded together begin at multiples of it.
        by_row: the tensors beside the data that have a row for each row of the weight.
        joins: rows of several weights make one weight of the format.
        needs: the tensors beside ``<layer>.weight`` that a file must have, and ``may_have``: those that it may.
        signed: the tensors that may be negative.
        largest: magnitude of a code; 0 where the data are numbers. A weight is at most that times its ``factors``, plus
            ``offset``: the tensors of those names.
        rotated: whether codes belong to rotated rows; None where ``convrot`` of a file says that.
        byte_scale: the tensor that a file may hold as bytes, and the name of its dtype in torch.
        in_fp32: scales that CUDA kernels take in fp32 alone, and that some tools write in another dtype.
        dtypes: that data may be stored in, the usual one first, and ``per_byte``: how many values a byte holds.
    """

    name: str
    storage: str
    since: str
    colour: tuple[int, int, int]
    plain: bool = False
    counted_as: str = "quantized"
    joins: bool = True
    product: str = ""
    mode: Mode | None = None
    quantizes_operands: bool = True
    bits: int = 0
    asks: str = ""
    unpacker: str = ""
    writer: str = ""
    writes: bool = False
    calibrates: bool = False
    by_largest: bool = False
    aligned: int = 1
    by_row: tuple[str, ...] = ()
    needs: tuple[str, ...] = ("weight_scale",)
    may_have: tuple[str, ...] = ()
    signed: tuple[str, ...] = ()
    largest: float = 0
    factors: tuple[str, ...] = ("weight_scale",)
    offset: str = ""
    rotated: bool | None = False
    byte_scale: tuple[str, str] | None = None
    in_fp32: tuple[str, ...] = ("weight_scale", "weight_scale_2", "weight_s_channel", "input_scale")
    dtypes: tuple[torch.dtype, ...] = (torch.int8,)
    per_byte: int = 1

    @property
    def title(self) -> str:
        """The name, with the storage where several have it."""
        return f"{self.name} ({self.storage})" if self.bits else self.name

    @property
    def scaling(self) -> str:
        """How far one scale reaches (``tensor``, ``row``, ``block``); the storage, of a format with
        scales of its own; "" for one without."""
        return self.storage

    @property
    def is_packed(self) -> bool:
        """True if ``<layer>.weight`` has fewer columns than the weight has inputs."""
        return bool(self.bits) or self.per_byte > 1

    @property
    def leaves(self) -> tuple[str, ...]:
        """The tensors beside ``<layer>.weight`` that ComfyUI reads, by the last part of their
        names."""
        return (*self.needs, *self.may_have)

    @property
    def unpacks(self) -> bool:
        """True if its weights can be unpacked here."""
        return not self.unpacker or kitchen_function(self.unpacker) is not None

    @property
    def can_write(self) -> bool:
        """True if weights can be written in it here."""
        return self.writes and (not self.writer or kitchen_function(self.writer) is not None)

    def kitchen(self, name: str) -> Any:
        """Return an object of comfy-kitchen.

        Raises:
            StorageNotHeld: it is not installed, or too old.
        """
        found = kitchen_function(name)
        if found is None:
            problem = Message(
                "{0} needs the comfy-kitchen of ComfyUI {1}, which is not installed.", self.title, self.since
            )
            raise StorageNotHeld(problem, "Update ComfyUI and the packages that it requires, or use storage=int8.")
        return found

    # What it is

    def storage_of(self, weight: StoredWeight) -> str:
        """Return the storage of a weight, as nodes, rules and reports call it."""
        return self.storage

    def is_quantized(self, weight: StoredWeight) -> bool:
        """True if a weight is stored in 8 bits or fewer."""
        return True

    def scales_text(self, weight: StoredWeight) -> str:
        """Return what a single scale stands in place of, in words: the storage, or how many
        scales."""
        return self.storage

    def layout(self, weight: StoredWeight) -> str:
        """Return how a weight is scaled and rotated, in words; "" for a weight without scales."""
        if weight.experts:
            return self.layout(weight.experts[0])
        leaves = ("weight_s_rel", "weight_scale")
        scale = next((weight.tensors[leaf] for leaf in leaves if leaf in weight.tensors), None)
        count = 0 if scale is None else scale.numel()
        rows, columns = weight.shape[-2:]
        each = getattr(self, "block", 0) or (rows * columns // count if count else 0)
        text: str = Message("a scale for each {0} inputs", each)
        if count == 1 or each == columns:
            text = "one scale" if count == 1 else "a scale for each row"
        return Message("{0}; rotated in groups of {1} inputs", text, weight.group) if weight.group else text

    # What ComfyUI makes of it

    def is_held_by(self, storages: Container[str]) -> bool:
        """True if a ComfyUI with these quantized storages holds a weight of the format, or its
        numbers."""
        return self.storage in storages

    def as_loaded(self, weight: StoredWeight) -> str:
        """Return the storage in which ComfyUI holds a weight if no other storage is requested."""
        return AS_FILE

    def is_cast(self, weight: StoredWeight) -> bool:
        """True if ComfyUI casts a weight from one dtype of more than 8 bits to another as it loads
        it, with no second copy."""
        return False

    def is_only_linear(self, weight: StoredWeight) -> bool:
        """True if ComfyUI holds such a weight in Linear modules alone, because it casts others
        without a scale."""
        return False

    def multiplies_in(self, weight: StoredWeight) -> Mode | None:
        """Return the arithmetic of ComfyUI's own product of a weight of a layer; None where no mode
        says it. A bank of experts is no layer: it multiplies by a function of its own."""
        return None if weight.experts else self.mode

    def misread(self, weight: StoredWeight, declared: bool, marked: bool) -> Iterator[str]:
        """Yield how ComfyUI's own loader misreads a weight (``MISREADINGS`` of plain.py).

        ``declared``: the file says that it is quantized, in a way that ComfyUI reads; ``marked``:
        by ``scaled_fp8``."""
        yield from ()

    # What a storage changes

    def lies_in(self, weight: StoredWeight, storage: str) -> bool:
        """True if a weight is in a storage already, so that the tensors of its file are kept."""
        return storage == self.storage

    def is_same_in(self, weight: StoredWeight, storage: str) -> bool:
        """True if a weight keeps its numbers and its scale in a storage."""
        return False

    def one_scale(self, weight: StoredWeight) -> torch.Tensor | None:
        """Return the 0-dim scale that alone multiplies the data, 1 for values; None where there is
        more to it."""
        return None

    def is_rounded_again(self, weight: StoredWeight) -> bool:
        """True if fp8 with one scale rounds numbers that lie on another grid: of many scales, or of
        whole numbers."""
        return self.one_scale(weight) is None

    def has_many_scales(self, weight: StoredWeight) -> bool:
        """True for fp8 with a scale for each row or block, which ComfyUI's fp8 does not have."""
        return False

    def holds(self, weight: StoredWeight) -> bool:
        """True if the format holds the numbers of a weight without rounding them."""
        return False

    def taken_over(self, weight: StoredWeight) -> Tensors:
        """Make the tensors of a weight whose numbers the format holds."""
        raise NotImplementedError

    # Reading

    def has_values(self, weight: StoredWeight) -> bool:
        """True if a weight stands for numbers of a model, and not for indices or a text."""
        return True

    def matrix_rows(self, weight: StoredWeight) -> int | None:
        """Return as how many rows a weight is seen; None where its last dimension is a row."""
        return None

    def bound(self, weight: StoredWeight) -> float:
        """Return an upper bound on the magnitude of a weight; NaN if its data hold a NaN."""
        sizes = {name: weight.numbers(name).abs().max().item() for name in weight.tensors}
        factors = math.prod(sizes.get(name, 1.0) for name in self.factors)
        data = amax_value(weight.data) if not self.largest and weight.is_number else 0.0
        return ((self.largest or data) * factors + sizes.get(self.offset, 0.0)) * math.sqrt(weight.group or 1)

    def largest_of(self, weight: StoredWeight, bound: float) -> float:
        """Return the magnitude from which the single scale of a weight is computed: its ``bound``,
        or its amax if the bound is loose."""
        return weight.amax

    def auxiliary(self, weight: StoredWeight) -> dict[str, torch.Tensor]:
        """Return what ComfyUI needs besides the data of a weight, by full name."""
        tensors = {f"{weight.layer}.{leaf}": tensor for leaf, tensor in weight.tensors.items()}
        return tensors | {f"{weight.layer}.comfy_quant": comfy_quant_tensor(weight.settings)}

    def read(self, weight: StoredWeight) -> StoredWeight:
        """Add the tensors and settings that ComfyUI multiplies by to a weight whose file has
        others."""
        return weight

    def shape(self, weight: StoredWeight) -> tuple[int, ...]:
        """Return the shape of the values."""
        return (weight.data.shape[0], weight.data.shape[1] * self.per_byte)

    def stored_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of ``<layer>.weight`` of a weight of so many rows and columns."""
        return (rows, columns // self.per_byte)

    def check(self, weight: StoredWeight) -> None:
        """Raise ValueError unless the tensors' shapes fit the weight's: one scale, or a scale for
        each row."""
        if weight.tensors["weight_scale"].numel() > 1:
            weight.require_shape("weight_scale", (weight.shape[0], 1), (weight.shape[0],))

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        """Unpack some rows of a weight to fp32."""
        raise NotImplementedError

    def doubt(self, weight: StoredWeight) -> str:
        """Return why a weight's own shape is uncertain; "" for a certain shape."""
        return ""

    # Multiplying

    def kernels_for(self, find: Find, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, group: int) -> tuple:
        """Look up what :meth:`apply` needs, once for ``x`` of a dtype, device and dimensions and a
        form of a weight.

        ``group``: the number of inputs that the weight's rotation turns together; 0 without a
        rotation."""
        raise NotImplementedError

    def apply(
        self, bound: tuple, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply ``x`` (..., K) by a weight (N, K) as it is stored. Returns (..., N) in the dtype
        of ``x``.

        ``bound``: what :meth:`kernels_for` returned for operands of this form.
        """
        raise NotImplementedError

    def unpacking(
        self, find: Find, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, group: int
    ) -> Unpacker:
        """Look up what unpacks such a weight to a dtype."""
        raise NotImplementedError

    def numbers(self, unpacker: Unpacker, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Unpack a weight (N, K)."""
        kernel, more = unpacker
        return kernel(data, scale, *more)

    def apply_unpacked(
        self, unpacker: Unpacker, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply ``x`` (..., K) by an unpacked weight (N, K). ``unpacker``: to the dtype of
        ``x``."""
        kernel, more = unpacker  # :meth:`numbers`, written out: this runs in each layer of each call
        return F.linear(x, kernel(data, scale, *more), None if bias is None else bias.to(x.dtype))

    # Writing

    def why_not(self, rows: int, columns: int) -> str:
        """Return why a weight of this shape cannot be held in the format; "" if possible."""
        return ""

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Map the tensors of a written weight to their shapes and dtypes, ``weight`` first."""
        raise NotImplementedError

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Count the bytes of a written weight with its scales."""
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.specs(rows, columns).values())

    def settings(self, columns: int) -> dict:
        """Return the settings in ``<layer>.comfy_quant`` besides the format."""
        return {}

    def shared(self, parts: Iterable[torch.Tensor]) -> Tensors:
        """Make the tensors shared by all rows of a weight, from rows in parts that are spread over
        the weight, unless ``by_largest``."""
        return {}

    def scale_for(self, largest: float) -> Tensors:
        """Make the tensors shared by all rows of a weight from its largest magnitude, if
        ``by_largest``."""
        raise NotImplementedError

    def encode(self, rows: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Tensors:
        """Round rows of a weight to nearest and make their tensors, without the shared tensors in
        ``params``."""
        raise NotImplementedError

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        """Rotate rows ``(n, K)`` to the basis of the codes, in fp32. Turning twice gives the rows
        again."""
        return rows.float()

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Round fp32 columns ``(n, c)`` of the turned weight to the nearest numbers that codes
        stand for.

        Args:
            params: the tensors of these rows.
            at: which columns of the weight they are; None for all of them.
        """
        raise NotImplementedError

    def codes(self, numbers: torch.Tensor, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Make ``<layer>.weight`` of whole rows of numbers from :meth:`nearest`."""
        raise NotImplementedError


def comfy_quant_tensor(settings: dict) -> torch.Tensor:
    """Make ComfyUI's ``<layer>.comfy_quant``: JSON as uint8."""
    return torch.frombuffer(bytearray(json.dumps(settings), "utf-8"), dtype=torch.uint8)
