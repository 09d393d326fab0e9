"""INT8 with rotated inputs and one scale per row: ComfyUI's ``int8_tensorwise`` with ``convrot``.

A weight's rows are cut into groups of ``G`` inputs and each group is multiplied by a normalized
regular Hadamard matrix, which spreads an outlier over its group (ConvRot, arXiv 2512.03673). Inputs
are rotated the same way before a matmul, so ``(x R)(W R)^T = x W^T``. Everything is computed in
fp32 and equals comfy-kitchen's eager ``quantize_int8_convrot_weight`` of an fp32 weight bit for
bit, where the matmul library sums the rows of both in one order. A GPU adds in an order of its own:
its scales can differ in their last bits from a CPU's, and its codes by one step where they nearly
tie; so do codes of comfy-kitchen for a bf16 or fp16 weight, which it rotates in that dtype."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import torch

from ..base.message import Message
from ..base.modes import INT8
from .format import Find, Format, Unpacker
from .fp8 import room
from .stored_weight import StoredWeight, Tensors

GROUPS = (256, 64, 16)
LARGEST_MATRIX = 1024
LARGEST_CODE = 127
SMALLEST_SCALE = 1e-30
BLOCK = 1 << 20
INT8_RESULTS = (torch.float32, torch.float16, torch.bfloat16)
"""The dtypes that comfy-kitchen unpacks int8 to, by their codes (``_dtype_code`` in its
``tensor/int8.py``)."""


def rotation_group(columns: int) -> int | None:
    """Return the largest group that divides a number of inputs; None where int8 would be ruined by
    outliers."""
    return next((group for group in GROUPS if columns and columns % group == 0), None)


@cache
def _hadamard(size: int) -> torch.Tensor:
    """Return the normalized regular Hadamard matrix of ``size``, a power of 4; fp32, symmetric and
    its own inverse."""
    with torch.inference_mode(False):
        base = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
        matrix = base
        while len(matrix) < size:
            matrix = torch.kron(matrix, base)
        return matrix / size**0.5


def rotated(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Rotate every ``group`` of columns of fp32 rows ``(n, K)``. Rotating twice gives the rows
    again."""
    if group > LARGEST_MATRIX:  # the Kronecker product of two smaller matrices: 64 MB for a group of 4096
        right = _hadamard(LARGEST_MATRIX).to(rows.device)
        left = _hadamard(group // LARGEST_MATRIX).to(rows.device)
        halves = rows.reshape(-1, len(left), len(right))
        return torch.matmul(left, torch.matmul(halves, right.T)).reshape(rows.shape)
    return torch.matmul(rows.reshape(-1, group), _hadamard(group).to(rows.device).T).reshape(rows.shape)


@torch.no_grad()
def quantize_rows(rows: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows ``(n, K)`` of any float dtype: int8 codes of the rotated rows, and their scales
    ``(n, 1)`` in fp32.

    Works through blocks of up to ``BLOCK`` elements: smaller ones wait longer at OpenMP's barriers
    than they compute. The blocks are of like size: a BLAS may sum the few rows of a small rest in
    another order. No clamp is needed: a value exceeds 127 scales by so little that it rounds to
    127."""
    codes = torch.empty(rows.shape, dtype=torch.int8, device=rows.device)
    scale = rows.new_empty(len(rows), 1, dtype=torch.float32)
    count = -(-len(rows) // max(1, BLOCK // rows.shape[1])) or 1
    turn = _hadamard(group).to(rows.device).T
    blocks = room(2 * max(BLOCK, rows.shape[1]), torch.float32, rows.device).view(2, -1)
    for block, code, s in zip(*(tensor.tensor_split(count) for tensor in (rows, codes, scale)), strict=True):
        values, result = (each[: block.numel()].view(block.shape) for each in blocks)
        torch.mm(values.copy_(block).view(-1, group), turn, out=result.view(-1, group))
        torch.div(torch.abs(result, out=values).amax(1, keepdim=True), LARGEST_CODE, out=s).clamp_(min=SMALLEST_SCALE)
        code.copy_(result.div_(s).round_())
    return codes, scale


def dequantize_rows(codes: torch.Tensor, scale: torch.Tensor, group: int | None) -> torch.Tensor:
    """Return the fp32 rows of int8 codes ``(n, K)``; ``group``: None for a weight without
    rotation."""
    values = codes.float().mul_(scale)
    return values if group is None else rotated(values, group)


class Rotated(Format):
    """A format whose codes belong to rotated rows."""

    rotated: bool | None = True

    def why_not(self, rows: int, columns: int) -> str:
        if rotation_group(columns):
            return ""
        return Message(
            "its {0} inputs are not a multiple of 16, and int8 without a rotation fails on outliers", columns
        )

    def turned(self, rows: torch.Tensor) -> torch.Tensor:
        return rotated(rows.float(), rotation_group(rows.shape[1]))


class Int8(Rotated):
    """One int8 number a weight, ``weight_scale`` fp32 of shape () or (rows, 1); rotated where
    ``convrot`` is set.

    Its product is comfy-kitchen's kernel, which rotates and quantizes the inputs too.
    """

    name = "int8_tensorwise"
    storage = "int8"
    since = "0.27.0"
    colour = INT8.colour
    product = "int8_linear"
    mode = INT8
    largest = 128
    rotated = None
    writes = calibrates = True
    by_row = ("weight_scale",)

    def read(self, weight: StoredWeight) -> StoredWeight:
        """Give a weight its ``weight_scale`` in the shape that ComfyUI multiplies by, and
        ``convrot`` where also its embeddings look."""
        scale = weight.tensors["weight_scale"]
        settings = weight.settings
        if scale.dim() == 1 or (scale.numel() == 1 and len(weight.data) > 1):
            scale = scale.reshape(()) if scale.numel() == 1 else scale.reshape(-1, 1)
        if weight.group is not None:
            settings = settings | {"convrot": True, "convrot_groupsize": weight.group}
        return replace(weight, tensors={"weight_scale": scale}, settings=settings)

    def kernels_for(self, find: Find, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, group: int) -> tuple:
        names = ("x", "weight", "weight_scale", "bias", "out_dtype", "convrot", "convrot_groupsize")
        rotation = bool(group), group or 256
        call = (x.contiguous(), data, scale, None, x.dtype, *rotation)
        return find(self.product, **dict(zip(names, call, strict=True))), rotation

    def apply(
        self, bound: tuple, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        kernel, rotation = bound
        dtype = x.dtype
        bias, x = None if bias is None else bias.to(dtype), x.contiguous()
        # What watches operations, such as the guard's search, sees no kernel, but its operator.
        if torch._C._len_torch_dispatch_stack():
            return torch.ops.comfy_kitchen.int8_linear(x, data, scale, bias, INT8_RESULTS.index(dtype), *rotation)
        return kernel(x, data, scale, bias, dtype, *rotation)

    def unpacking(
        self, find: Find, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, group: int
    ) -> Unpacker:
        code = INT8_RESULTS.index(dtype)
        if group:
            name = "dequantize_int8_convrot_weight_dtype"
            return find(name, q=data, scale=scale, group_size=group, output_dtype_code=code), (group, code)
        return find("dequantize_int8_simple_dtype", q=data, scale=scale, output_dtype_code=code), (code,)

    def rows(self, weight: StoredWeight, part: slice) -> torch.Tensor:
        return dequantize_rows(weight.data[part], weight.row_scales(part), weight.group)

    def specs(self, rows: int, columns: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"weight": ((rows, columns), torch.int8), "weight_scale": ((rows, 1), torch.float32)}

    def settings(self, columns: int) -> dict:
        return {"convrot": True, "convrot_groupsize": rotation_group(columns)}

    def encode(self, rows: torch.Tensor, params: Mapping[str, torch.Tensor]) -> Tensors:
        codes, scale = quantize_rows(rows, rotation_group(rows.shape[1]))
        return {"weight": codes, "weight_scale": scale}

    def nearest(
        self, values: torch.Tensor, params: Mapping[str, torch.Tensor], at: Sequence[int] | None = None
    ) -> torch.Tensor:
        scale = params["weight_scale"]
        return (values / scale).round_().clamp_(-LARGEST_CODE - 1, LARGEST_CODE).mul_(scale)

    def codes(self, numbers: torch.Tensor, params: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return (numbers / params["weight_scale"]).round_().to(torch.int8)
