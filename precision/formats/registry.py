"""The quantization formats of ComfyUI: a row each, with all that differs between them.

Names, tensors and versions: ComfyUI ``comfy/quant_ops.py`` (``QUANT_ALGOS``); products: comfy-kitchen's
``tensor/*.py``. ``tests/host/load/test_registry.py`` holds the rows against both.
"""

from dataclasses import dataclass

import torch

from ..modes import FP8, INT8, Mode
from .codes import Codes, Fp8Codes, Int8Codes, W4a8Codes, W6a8Codes
from .encoding import Encoding
from .encodings import Awq4, Fp8, Int4, Int8, Mxfp8, Nvfp4
from .w4a8 import W4a8


@dataclass(frozen=True)
class Format:
    """One quantization format of ComfyUI.

    Attributes:
        name: as ``comfy_quant`` declares it in a file.
        storage: as nodes, rules and reports call it.
        since: the first ComfyUI with it.
        encoding: reads its tensors.
        colour: RGB, in pictures and on the page.
        product: comfy-kitchen's function that multiplies such a weight; empty for fp8, which torch's ``_scaled_mm``
            does.
        mode: the arithmetic of ComfyUI's own product; None where no row of ``precision/modes.py`` says it.
        quantizes_operands: that product multiplies quantized operands; else it unpacks the weight as it goes.
        byte_scale: the scale that a file may hold as bytes, and the name of its dtype in torch.
        codes: writes it; None for a format that is only read.
        bits: of a value, which tell formats with one name apart; 0 where the name does.
        asks: a parameter of ``quantize`` of comfy-kitchen's layout, without which it has the name but not this.
    """

    name: str
    storage: str
    since: str
    encoding: type[Encoding]
    colour: tuple[int, int, int]
    product: str = ""
    mode: Mode | None = None
    quantizes_operands: bool = True
    byte_scale: tuple[str, str] | None = None
    codes: Codes | None = None
    bits: int = 0
    asks: str = ""

    @property
    def title(self) -> str:
        """The name, with the storage where several have it."""
        return f"{self.name} ({self.storage})" if self.bits else self.name

    @property
    def leaves(self) -> tuple[str, ...]:
        """The tensors next to ``<layer>.weight`` that ComfyUI reads, by the last part of their names."""
        return (*self.encoding.needs, *self.encoding.may_have)


_ROWS = (
    Format(
        "float8_e4m3fn", "fp8_e4m3fn", "0.4.0", Fp8, FP8.colour, mode=FP8,
        codes=Fp8Codes(torch.float8_e4m3fn),
    ),
    Format(
        "float8_e5m2", "fp8_e5m2", "0.8.0", Fp8, (220, 104, 46), mode=FP8,
        codes=Fp8Codes(torch.float8_e5m2),
    ),
    Format(
        "nvfp4", "nvfp4", "0.8.0", Nvfp4, (236, 214, 92), "scaled_mm_nvfp4",
        byte_scale=("weight_scale", "float8_e4m3fn"),
    ),
    Format(
        "mxfp8", "mxfp8", "0.18.0", Mxfp8, (190, 108, 70), "scaled_mm_mxfp8",
        byte_scale=("weight_scale", "float8_e8m0fnu"),
    ),
    Format("int8_tensorwise", "int8", "0.27.0", Int8, INT8.colour, "int8_linear", mode=INT8, codes=Int8Codes()),
    Format("convrot_w4a4", "int4", "0.28.0", Int4, (112, 156, 120), "convrot_w4a4_linear"),
    Format(
        "asym_w4a8_int8", "w4a8", "0.31.0", W4a8, (198, 226, 140), "w4a8_int8_linear", mode=INT8,
        byte_scale=("weight_s_rel", "float8_e4m3fn"), codes=W4a8Codes(), bits=4,
    ),
    Format(
        "asym_w4a8_int8", "w6a8", "0.38.0", W4a8, (150, 196, 110), "w4a8_int8_linear", mode=INT8,
        byte_scale=("weight_s_rel", "float8_e4m3fn"), codes=W6a8Codes(), bits=6, asks="bits",
    ),
    Format("awq_w4a16", "awq4", "0.38.1", Awq4, (160, 132, 200), "gemv_awq_w4a16", quantizes_operands=False),
)  # fmt: skip

FORMATS = {row.name: row for row in reversed(_ROWS)}
FORMAT_OF_STORAGE = {row.storage: row for row in _ROWS}


def fp8_dtypes(storage: str) -> tuple[str, ...]:
    """List the fp8 dtypes, by torch's names, that a device has to hold for weights in a storage."""
    row = FORMAT_OF_STORAGE.get(storage)  # the fnuz dtypes are no format of ComfyUI
    own = (storage.replace("fp8", "float8"),) if storage.startswith("fp8") else ()
    return own + (row.byte_scale[1:] if row and row.byte_scale else ())


def row_of(name: str, size: int, count: int) -> Format:
    """Return the row of a weight of ``count`` values whose data take ``size`` bytes, in what ComfyUI calls ``name``."""
    return next(row for row in _ROWS if row.name == name and row.bits in (0, 8 * size // count))
