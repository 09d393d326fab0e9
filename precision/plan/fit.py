"""Fit a model into a device's memory: for each layer the storage with which the whole loses least by prediction.

For layers ``i`` of ``n_i`` weights, in storages ``s_i`` that lose ``e(i, s)`` of a layer's result and take ``b(i, s)``
bytes, the choice makes ``E^2 = sum_i n_i e(i, s_i)^2 / sum_i n_i`` small with ``sum_i b(i, s_i) <= room``. It starts
from the least loss and takes, one by one, the step to a smaller storage that adds least to ``E^2`` per byte saved,
which is best but for what the last step saves too much. One storage for all layers is taken where that is better.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt

from ..formats.comfy_format import codes_of
from .facts import LayerSpec

PREDICTED_ERROR = {"int8": 0.0089, "w6a8": 0.0184, "w4a8": 0.0617}
"""Relative error of a layer's int8 product with weights rounded to nearest: MiniLM in benchmarks/README.md."""
FITTED = tuple(PREDICTED_ERROR)
FEWER_BITS = FITTED[1:]
"""Storages with fewer bits than 8, which pack a weight's columns."""
Errors = Callable[[str, str], float]
"""(layer, storage) -> what its result loses, as a relative error."""


@dataclass(frozen=True)
class Fit:
    """What layers are stored in so that they fit.

    Attributes:
        storages: layer name -> storage.
        bytes: of their tensors.
        error: predicted for all of them together.
    """

    storages: Mapping[str, str]
    bytes: int
    error: float


@dataclass(frozen=True)
class _Option:
    layer: str
    storage: str
    bytes: int
    cost: float


def predicted(layer: str, storage: str) -> float:
    """Return the error that is predicted for any layer in a storage."""
    return PREDICTED_ERROR[storage]


def fit_layers(
    layers: Sequence[LayerSpec], room: int, formats: Container[str], error: Errors = predicted
) -> Fit | None:
    """Choose int8, w6a8 or w4a8 for each of some Linear layers so that they take ``room`` bytes at most.

    Args:
        formats: what the ComfyUI that loads them holds quantized weights in, as storages are called.
        error: what each layer loses; :func:`predicted` where nothing was measured.

    Returns:
        None where they do not fit, or one of them can be held in none of these.
    """
    options = {layer.name: list(_options(layer, formats, error)) for layer in layers}
    if not all(options.values()):
        return None
    choices = (choice for choice in (_greedy(options, room), *_uniform(options)) if _bytes(choice) <= room)
    best = min(choices, key=lambda choice: (_cost(choice), _bytes(choice)), default=None)
    if best is None:
        return None
    weights = sum(prod(layer.shape) for layer in layers)
    storages = {option.layer: option.storage for option in best}
    return Fit(storages, _bytes(best), sqrt(_cost(best) / max(weights, 1)))


def bytes_in(storage: str, rows: int, columns: int) -> int:
    """Count the bytes of a weight with its scales in a quantized storage."""
    codes = codes_of(storage)
    tensors = [((rows, codes.data_columns(columns)), codes.dtype), *codes.shapes(rows, columns).values()]
    return sum(prod(shape) * dtype.itemsize for shape, dtype in tensors)


def _options(layer: LayerSpec, formats: Container[str], error: Errors) -> Iterator[_Option]:
    rows, columns = layer.shape
    for storage in FITTED:
        packed = layer.tells_model and storage in FEWER_BITS
        if storage in formats and not packed and not codes_of(storage).why_not(columns):
            cost = rows * columns * error(layer.name, storage) ** 2
            yield _Option(layer.name, storage, bytes_in(storage, rows, columns), cost)


def _greedy(options: Mapping[str, Sequence[_Option]], room: int) -> list[_Option]:
    chosen = {name: min(own, key=lambda option: (option.cost, option.bytes)) for name, own in options.items()}
    steps = [step for name, own in options.items() for step in _steps(chosen[name], own)]
    size = _bytes(chosen.values())
    for _, option in sorted(steps, key=lambda step: step[0]):
        if size <= room:
            break
        size += option.bytes - chosen[option.layer].bytes
        chosen[option.layer] = option
    return list(chosen.values())


def _steps(here: _Option, options: Sequence[_Option]) -> Iterator[tuple[float, _Option]]:
    """Yield (cost added per byte saved, smaller option) from one to the next, in ascending order of that cost."""
    while smaller := [option for option in options if option.bytes < here.bytes]:
        added = {option: (option.cost - here.cost) / (here.bytes - option.bytes) for option in smaller}
        here = min(smaller, key=lambda option: (added[option], option.bytes))
        yield added[here], here


def _uniform(options: Mapping[str, Sequence[_Option]]) -> Iterator[list[_Option]]:
    """Yield the choices of one storage for all layers, or the next larger one for a layer that cannot have it."""
    for storage in FITTED:
        most = FITTED.index(storage)
        able = [[option for option in own if FITTED.index(option.storage) <= most] for own in options.values()]
        if all(able):
            yield [own[-1] for own in able]


def _bytes(choice) -> int:
    return sum(option.bytes for option in choice)


def _cost(choice) -> float:
    return sum(option.cost for option in choice)
