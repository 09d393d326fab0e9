"""Store the weights of a model with codes that are chosen by a calibration."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from ..formats.card import Provenance, card_entry
from ..formats.codes import Codes
from ..formats.comfy_format import SampledError, WeightPlan, sampled_rows
from ..formats.registry import FORMAT_OF_STORAGE
from ..formats.stored_weight import StoredWeight
from ..text import duration_text
from .calibration import Calibration
from .products import Products
from .rounding import rounded

CODES = {storage: row.codes for storage, row in FORMAT_OF_STORAGE.items() if row.codes}
VALUES = 1 << 24
PROBE = (256, 512, 256)


class CalibratedRounding:
    """Choose the codes of a model's weights by a calibration, weight by weight, where it knows the layer.

    Args:
        weights: all that will be written, by name, and ``plans``: what they will be stored in.
        source: the model's file, as :func:`~halfsafe.precision.formats.card.source_of` describes it.
        name: the model, in words.
        prefix: of the diffusion model's own names in the weights' names.
        device: to work on.

    Attributes:
        sampled: tensor name -> error of the values of some rows, as chosen.
        errors: layer -> squared error of its results on what it was calibrated with: rounded to nearest, and as chosen.

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
        self.calibration = calibration
        self.prefix = prefix
        self.device = torch.device(device)
        self.errors: dict[str, tuple[float, float]] = {}
        self.sampled: dict[str, SampledError] = {}
        self._plans = plans
        matrices = {self._layer(weight): weight for weight in weights.values() if len(weight.shape) == 2}
        calibration.require_model(source, name, {layer: weight.shape[1] for layer, weight in matrices.items()})
        self._work = {
            layer: weight.shape[0] * weight.shape[1] * products.width
            for layer, weight in matrices.items()
            if (products := self._products(weight, plans[weight.name]))
        }
        self._storages = {layer: plans[matrices[layer].name].storage for layer in self._work}
        self._done, self._began = 0, time.monotonic()

    @property
    def card(self) -> dict[str, object]:
        """What the card of the file says of it: what it gained once all is rounded; nothing where it rounds nothing."""
        if not self._work:
            return {}
        gained = {"error_of_results_to_nearest": round(share, 3)} if (share := self.share) is not None else {}
        return self.calibration.card(self._work) | gained

    @property
    def plans(self) -> Iterator[WeightPlan]:
        """The plans of all weights, with the errors of the codes that were chosen so far."""
        for name, plan in self._plans.items():
            yield replace(plan, error=self.sampled[name]) if name in self.sampled else plan

    @property
    def share(self) -> float | None:
        """The error of the layers' results on the calibration's own inputs, as a share of rounding to nearest: the
        mean."""
        shares = [math.sqrt(after / before) for before, after in self.errors.values() if before]
        return sum(shares) / len(shares) if shares else None

    def _layer(self, weight: StoredWeight) -> str:
        return weight.layer.removeprefix(self.prefix)

    def _products(self, weight: StoredWeight, plan: WeightPlan) -> Products | None:
        """Return what is known of a weight's inputs, where its codes can be chosen by that."""
        can = plan.storage in CODES and plan.changes and weight.name.endswith(".weight")
        return self.calibration.usable(self._layer(weight)) if can else None

    def __call__(
        self, weight: StoredWeight, plan: WeightPlan, tensors: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return a weight's tensors, given them rounded to nearest, with codes that are chosen."""
        products = self._products(weight, plan)
        if products is None:
            return tensors
        data = self._data(weight, plan.storage, products, tensors)
        self._done += self._work[self._layer(weight)]
        return tensors | {weight.name: data}

    def _data(
        self, weight: StoredWeight, storage: str, products: Products, tensors: Mapping[str, torch.Tensor]
    ) -> torch.Tensor:
        """Choose a weight's codes some rows at a time; its scales stay as they are."""
        codes, (rows, columns) = CODES[storage], weight.shape
        group = codes.group(columns)
        blocks = products.blocks if group is None else products.rotated(group)
        params = {name.rpartition(".")[2]: tensor.to(self.device) for name, tensor in tensors.items()}
        by_row = [leaf for leaf, (shape, _) in codes.shapes(rows, columns).items() if shape[:1] == (rows,)]
        data, before, after = torch.empty_like(tensors[weight.name]), 0.0, 0.0
        seen = sampled_rows(rows)
        count = -(-rows * columns // VALUES)
        for i in range(count):
            part = slice(rows * i // count, rows * (i + 1) // count)
            own = params | {leaf: params[leaf][part] for leaf in by_row}
            turned = codes.turned(weight.rows(part).to(self.device))
            nearest = partial(_numbers, codes, own)
            numbers, *errors = rounded(turned, blocks, products.tokens, nearest)
            data[part] = codes.data(codes.nearest(numbers, own)[0]).to(data.device)
            here = seen[(seen >= part.start) & (seen < part.stop)] - part.start
            self._sample(weight.name, numbers[here], turned[here])
            before, after = before + errors[0].item(), after + errors[1].item()
        self.errors[self._layer(weight)] = before, after
        return data

    def _sample(self, name: str, numbers: torch.Tensor, exact: torch.Tensor) -> None:
        """Add some rows to the error of a weight's values."""
        error = SampledError.of(numbers, exact)
        so_far = self.sampled.get(name, SampledError())
        self.sampled[name] = SampledError(so_far.error + error.error, so_far.values + error.values)

    def start(self) -> str:
        """Begin to count the time, and say how long it will take, by a small weight that is timed in each storage."""
        if not self._work:
            return "the calibration rounds no layer: none that it knows is written anew in int8, fp8, w6a8 or w4a8"
        paces = {storage: _seconds_per_product(self.device, storage) for storage in set(self._storages.values())}
        seconds = sum(work * paces[self._storages[layer]] for layer, work in self._work.items())
        self._began = time.monotonic()
        unreached = f"; {count} were not called" if (count := len(self.calibration.unreached)) else ""
        return f"rounding {len(self._work)} layers by the calibration: about {duration_text(seconds)}{unreached}"

    def left(self) -> str:
        """Say how long the layers that are not done yet will take."""
        left = sum(self._work.values()) - self._done
        if not left or not self._done:
            return ""
        seconds = (time.monotonic() - self._began) * left / self._done
        return f"{len(self.errors)} of {len(self._work)} layers rounded, {duration_text(seconds)} left"

    def text(self) -> str:
        """Say what it gained: the error on the calibration's own inputs, as a share of rounding to nearest."""
        if (share := self.share) is None:
            return "no layer was rounded by the calibration"
        return f"{len(self.errors)} layers rounded by the calibration: error of their results {share:.2f} of nearest"


def card_of(provenance: Provenance, plans: Iterable[WeightPlan], rounding: CalibratedRounding | None) -> dict[str, str]:
    """Make the card of a file, as an entry of its metadata; the errors of weights that were rounded by a calibration
    are their own once all are written."""
    if rounding is None:
        return card_entry(provenance, plans)
    return card_entry(replace(provenance, calibration=rounding.card), rounding.plans)


def _numbers(codes: Codes, params: Mapping[str, torch.Tensor], values: torch.Tensor, at: Sequence[int]) -> torch.Tensor:
    return codes.nearest(values, params, at)[1]


def _seconds_per_product(device: torch.device, storage: str) -> float:
    rows, columns, width = PROBE
    generator = torch.Generator().manual_seed(0)
    found = Products.empty(columns, width)
    found.add(torch.randn(2 * width, columns, generator=generator))
    weight, codes = torch.randn(rows, columns, generator=generator).to(device), CODES[storage]
    params = codes.prepare(weight)
    began = time.perf_counter()
    rounded(weight, found.blocks, found.tokens, partial(_numbers, codes, params))[1].item()
    return (time.perf_counter() - began) / (rows * columns * width)
