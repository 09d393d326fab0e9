"""Store the weights of a model with codes that are chosen by a calibration: GPTQ, block by block.

Rounding to nearest keeps each number close. What counts is the layer's result, and there an error
in one column can be made good by the columns that are rounded after it: GPTQ (Frantar et al. 2022,
arXiv 2210.17323) rounds one column after the other, the one with the largest inputs first, and
moves the rest by what the inverse of the inputs' products says; sweeps of coordinate descent
afterwards choose each column again with all others fixed (QuantEase, Behdin et al. 2023, arXiv
2309.01885). Formats and scales stay as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch

from ..base.flags import flags_set
from ..base.message import Message
from ..base.oom import is_torch_oom
from ..formats.comfy_format import Made, made_here
from ..formats.layer_plan import LayerPlan
from ..formats.registry import FORMAT_OF_STORAGE
from ..formats.stored_weight import StoredWeight
from .calibration import CalibrationData, Products

VALUES = 1 << 24
DAMPING = 0.01
DAMPING_OF_FEW = 0.2
STEP = 32
SWEEPS = 2
ROUNDED = "{0} layers rounded with the calibration: output error {1} of rounding to nearest"

Nearest = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Round values ``(rows, c)``, which stand in those ``c`` columns of a weight, to the nearest
numbers it can hold."""


class CalibratedRounding:
    """Choose the codes of a model's weights by a calibration, weight by weight, where it has met
    the layer.

    Args:
        weights: all weights that will be written, by name, and ``plans``: what they will be stored in.
        source: the model's file, as :func:`~halfsafe.precision.formats.card.source_of` describes it.
        name: the model, in words.
        prefix: of the diffusion model's own names in the weights' names.
        device: to work on.

    Attributes:
        errors: layer -> squared error of its results on the calibration's inputs: rounded to nearest, and as chosen.

    Raises:
        HalfsafeError: when made: the calibration is of another model.
    """

    def __init__(
        self,
        calibration: CalibrationData,
        weights: Mapping[str, StoredWeight],
        plans: Mapping[str, LayerPlan],
        source: Mapping[str, object],
        name: str,
        prefix: str = "",
        device: torch.device | str = "cpu",
    ):
        self.calibration = calibration
        self._prefix = prefix
        self._device = torch.device(device)
        self.errors: dict[str, tuple[float, float]] = {}
        matrices = [weight for weight in weights.values() if len(weight.shape) == 2]
        columns = {self._layer(weight): weight.shape[1] for weight in matrices}
        calibration.require_model(source, name, columns)
        met = {weight.name: self._products(weight, plans[weight.name]) for weight in matrices}
        self._work = {name: sums for name, sums in met.items() if sums}

    def _layer(self, weight: StoredWeight) -> str:
        return weight.layer.removeprefix(self._prefix)

    def _products(self, weight: StoredWeight, plan: LayerPlan) -> Products | None:
        """Return the products of a weight's inputs, where its codes can be chosen by them."""
        format = FORMAT_OF_STORAGE.get(plan.storage)
        can = format and format.calibrates and plan.changes and weight.name.endswith(".weight")
        return self.calibration.usable(self._layer(weight)) if can else None

    def noted(self) -> dict[str, object]:
        """Return what the card of the file says of the calibration; nothing if no weight is rounded
        by it."""
        of = self.calibration
        seen = {"model": of.name, "runs": of.runs, "model_calls": of.calls, "layers": len(self._work)}
        return {"method": "GPTQ", **seen} if self._work else {}

    def made(self, weights: Mapping[str, StoredWeight], plans: Mapping[str, LayerPlan], path) -> Iterator[Made]:
        """Make weights as :func:`~halfsafe.precision.formats.comfy_format.made_here` does, with
        chosen codes."""
        for weight, tensors in made_here(weights, plans, path):
            if weight.name in self._work:
                with flags_set({"tf32_matmul": False}):  # which rounds what is rotated to 10 bits
                    tensors[weight.name] = self._data(weight, plans[weight.name], tensors)
            yield weight, tensors

    def _data(self, weight: StoredWeight, plan: LayerPlan, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Choose a weight's codes: on the device, and on the CPU from the first weight on that it
        has no memory for."""
        try:
            return self._chosen(weight, plan, tensors)
        except RuntimeError as error:
            if not is_torch_oom(error):
                raise
        self._device = torch.device("cpu")
        return self._chosen(weight, plan, tensors)

    def _chosen(self, weight: StoredWeight, plan: LayerPlan, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Choose a weight's codes some rows at a time; its scales stay as they are."""
        format = FORMAT_OF_STORAGE[plan.storage]
        sums = self._work[weight.name]
        rows, columns = weight.shape
        blocks = sums.turned(format)
        params = {name.rpartition(".")[2]: tensor.to(self._device) for name, tensor in tensors.items()}
        by_row = [leaf for leaf, (shape, _) in format.specs(rows, columns).items() if shape[:1] == (rows,)]
        data = torch.empty_like(tensors[weight.name])
        before = 0.0
        after = 0.0
        count = -(-rows * columns // VALUES)
        for i in range(count):
            part = slice(rows * i // count, rows * (i + 1) // count)
            own = params | {leaf: params[leaf][part] for leaf in by_row}
            exact = format.turned(weight.rows(part).to(self._device))
            numbers, *errors = rounded(exact, blocks, sums.tokens, lambda v, at, own=own: format.nearest(v, own, at))
            data[part] = format.codes(numbers, own).to(data.device)
            before = before + errors[0].item()
            after = after + errors[1].item()
        self.errors[self._layer(weight)] = before, after
        return data

    def start(self) -> str:
        """Return how many layers will be rounded by the calibration."""
        if not self._work:
            return "the calibration was not used: none of its layers is newly quantized to int8, fp8, w6a8 or w4a8"
        return Message("rounding {0} layers with the calibration", len(self._work))

    def text(self) -> str:
        """Return the gain: the error on the calibration's own inputs, as a share of rounding to
        nearest."""
        shares = [math.sqrt(after / before) for before, after in self.errors.values() if before]
        if not shares:
            return "The calibration was not used: no layer is newly quantized. Choose a storage such as int8."
        share = sum(shares) / len(shares)
        return Message(ROUNDED, len(self.errors), f"{share:.2f}")


@torch.no_grad()
def rounded(
    values: torch.Tensor, blocks: torch.Tensor, tokens: int, nearest: Nearest
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round a weight ``(rows, K)`` in fp32 with the least error on inputs of these products.

    Args:
        blocks: ``(K / b, b, b)``, on the host; in the weight's own basis. ``tokens``: how many inputs are in them.

    Returns:
        The numbers ``(rows, K)``, and the squared errors on those inputs, a sum each: of rounding to nearest, and of
        the numbers returned. No block of a row is worse than rounded to nearest: where it would be, it is.
    """

    def grid(at: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        return nearest(columns.T, at).T

    count, width, _ = blocks.shape
    order = blocks.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True)
    ordered = blocks.gather(1, order[:, :, None].expand_as(blocks)).gather(2, order[:, None, :].expand_as(blocks))
    columns = (order + torch.arange(count)[:, None] * width).to(values.device)
    exact = values.T[columns.reshape(-1)].view(count, width, -1)
    damped, factor = (matrix.to(values.device) for matrix in _damped_and_factor(ordered, _damping(width, tokens)))
    ordered = ordered.to(values.device)
    near = grid(columns.reshape(-1), exact.flatten(0, 1)).view_as(exact)
    chosen = _gptq(exact, columns, factor, grid)
    for _ in range(SWEEPS):
        _sweep(chosen, exact, columns, damped, grid)
    before = _errors(near - exact, ordered)
    after = _errors(chosen - exact, ordered)
    chosen = torch.where((after < before)[:, None], chosen, near)
    result = torch.empty_like(values.T)
    result[columns.reshape(-1)] = chosen.flatten(0, 1)
    return result.T.contiguous(), before.sum(), torch.minimum(before, after).sum()


def _damping(width: int, tokens: int) -> float:
    """Return the share of the mean diagonal to add to blocks of that width, sums over so many
    tokens.

    1 % is GPTQ's own. Fewer tokens than inputs say nothing of most directions, and a larger part
    keeps the change there small: as if each block had met a fifth of its width in tokens of no
    direction (docs/internals/calibration.md)."""
    return max(DAMPING, DAMPING_OF_FEW * width / max(tokens, 1))


def _gptq(exact: torch.Tensor, columns: torch.Tensor, factor: torch.Tensor, grid: Nearest) -> torch.Tensor:
    """Round each block's columns in order; ``factor``: the upper Cholesky factors of the inverse
    products."""
    moved = exact.clone()
    width = exact.shape[1]
    for start in range(0, width, STEP):
        end = min(start + STEP, width)
        errors = torch.empty_like(moved[:, start:end])
        for j in range(start, end):
            value = grid(columns[:, j], moved[:, j])
            errors[:, j - start] = (moved[:, j] - value) / factor[:, j, j, None]
            moved[:, j] = value
            moved[:, j + 1 : end] -= factor[:, j, j + 1 : end, None] * errors[:, None, j - start]
        moved[:, end:] -= torch.bmm(factor[:, start:end, end:].mT, errors)
    return moved


def _sweep(
    chosen: torch.Tensor, exact: torch.Tensor, columns: torch.Tensor, products: torch.Tensor, grid: Nearest
) -> None:
    """Choose each column again, in place, with the others as they are."""
    width = exact.shape[1]
    slope = torch.bmm(products, chosen - exact)
    for start in range(0, width, STEP):
        end = min(start + STEP, width)
        changes = torch.empty_like(chosen[:, start:end])
        for j in range(start, end):
            value = grid(columns[:, j], chosen[:, j] - slope[:, j] / products[:, j, j, None])
            changes[:, j - start] = value - chosen[:, j]
            chosen[:, j] = value
            slope[:, j + 1 : end] += products[:, j, j + 1 : end, None] * changes[:, None, j - start]
        slope[:, end:] += torch.bmm(products[:, start:end, end:].mT, changes)


def _errors(difference: torch.Tensor, products: torch.Tensor) -> torch.Tensor:
    """Return the squared error ``(blocks, rows)`` that a difference makes on inputs of these
    products."""
    return torch.bmm(products, difference).mul_(difference).sum(1)


def _damped_and_factor(products: torch.Tensor, damping: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return products with a part of their mean diagonal added, and the upper Cholesky factor of
    the inverse.

    Where even those have none, as sums in fp32 of few tokens may, more is added.
    """
    exact = products.double()
    mean = exact.diagonal(dim1=1, dim2=2).mean(1)[:, None, None]
    mean = torch.where(mean > 0, mean, 1.0)
    while True:
        damped = exact + damping * mean * torch.eye(exact.shape[1], dtype=torch.float64)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.any():
            factor, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed.any():
            return damped.float(), factor.float()
        damping *= 10
