"""Store the weights of a model with codes that are chosen by a calibration."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from ..formats.card import Provenance, card_entry
from ..formats.comfy_format import Made, SampledError, WeightPlan, made_here
from ..formats.format import Format
from ..formats.registry import FORMAT_OF_STORAGE
from ..formats.stored_weight import StoredWeight
from .calibration import Calibration
from .products import Products
from .rounding import rounded

VALUES = 1 << 24


class CalibratedRounding:
    """Choose the codes of a model's weights by a calibration, weight by weight, where it has met the layer.

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
        calibration: Calibration,
        weights: Mapping[str, StoredWeight],
        plans: Mapping[str, WeightPlan],
        source: Mapping[str, object],
        name: str,
        prefix: str = "",
        device: torch.device | str = "cpu",
    ):
        self.calibration, self._prefix, self._device = calibration, prefix, torch.device(device)
        self.errors: dict[str, tuple[float, float]] = {}
        matrices = [weight for weight in weights.values() if len(weight.shape) == 2]
        columns = {self._layer(weight): weight.shape[1] for weight in matrices}
        calibration.require_model(source, name, columns)
        met = {weight.name: self._products(weight, plans[weight.name]) for weight in matrices}
        self._work = {name: sums for name, sums in met.items() if sums}

    def _layer(self, weight: StoredWeight) -> str:
        return weight.layer.removeprefix(self._prefix)

    def _products(self, weight: StoredWeight, plan: WeightPlan) -> Products | None:
        """Return the products of a weight's inputs, where its codes can be chosen by them."""
        can = plan.storage in FORMAT_OF_STORAGE and plan.changes and weight.name.endswith(".weight")
        return self.calibration.usable(self._layer(weight)) if can else None

    def card_entry(self, provenance: Provenance, plans: Mapping[str, WeightPlan]) -> dict[str, str]:
        """Make the card of the file, without errors of the weights that are rounded here."""
        card = self.calibration.card(self._work) if self._work else {}
        others = [replace(p, error=SampledError()) if name in self._work else p for name, p in plans.items()]
        return card_entry(replace(provenance, calibration=card), others)

    def made(self, weights: Mapping[str, StoredWeight], plans: Mapping[str, WeightPlan], path) -> Iterator[Made]:
        """Make weights as :func:`~halfsafe.precision.formats.comfy_format.made_here` does, with codes that are chosen.
        """
        for weight, tensors in made_here(weights, plans, path):
            if weight.name in self._work:
                tensors[weight.name] = self._data(weight, plans[weight.name], tensors)
            yield weight, tensors

    def _data(self, weight: StoredWeight, plan: WeightPlan, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Choose a weight's codes some rows at a time; its scales stay as they are."""
        format, (rows, columns), sums = FORMAT_OF_STORAGE[plan.storage], weight.shape, self._work[weight.name]
        blocks = turned_products(sums.blocks, format)
        params = {name.rpartition(".")[2]: tensor.to(self._device) for name, tensor in tensors.items()}
        by_row = [leaf for leaf, (shape, _) in format.specs(rows, columns).items() if shape[:1] == (rows,)]
        data, before, after = torch.empty_like(tensors[weight.name]), 0.0, 0.0
        count = -(-rows * columns // VALUES)
        for i in range(count):
            part = slice(rows * i // count, rows * (i + 1) // count)
            own = params | {leaf: params[leaf][part] for leaf in by_row}
            exact = format.turned(weight.rows(part).to(self._device))
            numbers, *errors = rounded(exact, blocks, sums.tokens, lambda v, at, own=own: format.nearest(v, own, at))
            data[part] = format.codes(numbers, own).to(data.device)
            before, after = before + errors[0].item(), after + errors[1].item()
        self.errors[self._layer(weight)] = before, after
        return data

    def start(self) -> str:
        """Say how many layers will be rounded by the calibration."""
        if not self._work:
            return "the calibration rounds no layer: none that it knows is written anew in int8, fp8, w6a8 or w4a8"
        return f"rounding {len(self._work)} layers by the calibration"

    def text(self) -> str:
        """Tell the gain: the error on the calibration's own inputs, as a share of rounding to nearest."""
        shares = [math.sqrt(after / before) for before, after in self.errors.values() if before]
        if not shares:
            return "no layer was rounded by the calibration"
        share = sum(shares) / len(shares)
        return f"{len(self.errors)} layers rounded by the calibration: error of their results {share:.2f} of nearest"


def turned_products(blocks: torch.Tensor, format: Format) -> torch.Tensor:
    """Return the blocks of the products of turned inputs."""
    half = format.turned(blocks.flatten(0, 1)).view_as(blocks)
    return format.turned(half.mT.flatten(0, 1)).view_as(blocks)
