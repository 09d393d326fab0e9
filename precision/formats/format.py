"""What every quantization format of ComfyUI has.

A format is a class: its tensors in a file, how they are read and written, and what multiplies them. Names, tensors and
versions are those of ComfyUI ``comfy/quant_ops.py`` (``QUANT_ALGOS``) and ``comfy/ops.py``
(``_load_quantized_module``), layouts and products those of comfy-kitchen's ``tensor/*.py``;
``tests/host/load/test_registry.py`` holds the formats against both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch

from ..base.errors import StorageNotHeld
from ..base.message import Message
from ..base.modes import Mode
from .stored_weight import StoredWeight, Tensors


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
        writes: weights are written in it; ``calibrates``: with codes that a calibration chooses, too.
        by_largest: the tensors shared by all rows follow from the largest magnitude of the weight.
        aligned: the rows that are encoded together begin at multiples of it.
        by_row: the tensors beside the data that have a row for each row of the weight.
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
    def is_packed(self) -> bool:
        """True if ``<layer>.weight`` has fewer columns than the weight has inputs."""
        return bool(self.bits) or self.per_byte > 1

    @property
    def leaves(self) -> tuple[str, ...]:
        """The tensors beside ``<layer>.weight`` that ComfyUI reads, by the last part of their names."""
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

    # Reading

    def read(self, weight: StoredWeight) -> StoredWeight:
        """Add the tensors and settings that ComfyUI multiplies by to a weight whose file has others."""
        return weight

    def shape(self, weight: StoredWeight) -> tuple[int, ...]:
        """Return the shape of the values."""
        return (weight.data.shape[0], weight.data.shape[1] * self.per_byte)

    def stored_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the shape of ``<layer>.weight`` of a weight of so many rows and columns."""
        return (rows, columns // self.per_byte)

    def check(self, weight: StoredWeight) -> None:
        """Raise ValueError unless the tensors' shapes fit the weight's: one scale, or a scale for each row."""
        if weight.tensors["weight_scale"].numel() > 1:
            weight.require_shape("weight_scale", (weight.shape[0], 1), (weight.shape[0],))

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        """Unpack some rows of a weight to fp32."""
        raise NotImplementedError

    def doubt(self, weight: StoredWeight) -> str:
        """Return why a weight's own shape is uncertain; "" for a certain shape."""
        return ""

    # Writing

    def why_not(self, rows: int, columns: int) -> str:
        """Return why a weight of this shape cannot be held in the format; "" if possible."""
        return ""

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Map the tensors of a written weight to their shapes and dtypes, ``weight`` first."""
        raise NotImplementedError

    def settings(self, columns: int) -> dict:
        """Return the settings in ``<layer>.comfy_quant`` besides the format."""
        return {}

    def shared(self, parts: Iterable[torch.Tensor]) -> Tensors:
        """Make the tensors shared by all rows of a weight, from rows in parts that are spread over the weight, unless
        ``by_largest``."""
        return {}

    def scale_for(self, largest: float) -> Tensors:
        """Make the tensors shared by all rows of a weight from its largest magnitude, if ``by_largest``."""
        raise NotImplementedError

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
