"""Give what a repeat in fp32 has left in caches the dtype in which the call itself left it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from .kept_places import Place
from .kept_state import KeptState

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

NARROW = (torch.float16, torch.bfloat16)


class LeftBehind:
    """The dtypes of what a call has left, without the tensors: by shape, of those that ``before`` did not have."""

    def __init__(self, before: KeptState, model: BaseModel, options: dict):
        self._known = {id(tensor) for place in before.places for tensor in _floats(place.values())}
        self._before, self._model, self._options = before, model, options
        self._dtypes = Counter((tensor.shape, tensor.dtype) for _, tensor in self._new())

    def _new(self) -> Iterator[tuple[Place, torch.Tensor]]:
        for place in KeptState(self._model, self._options, 0).places:
            yield from ((place, tensor) for tensor in _floats(place.values()) if id(tensor) not in self._known)

    def give_dtypes(self) -> None:
        """Cast what a repeat in fp32 has left to the 16 bits in which the call itself left tensors of that shape.

        What is too large for those stays.
        """
        for place in {id(place): place for place, _ in self._new()}.values():
            held = place.kept.items() if isinstance(place.kept, dict) else enumerate(place.kept)
            cast = {key: self._as_left(value) for key, value in held}
            place.replace(cast if isinstance(place.kept, dict) else list(cast.values()))

    def _as_left(self, value: object) -> object:
        if type(value) is tuple:
            return tuple(map(self._as_left, value))
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32 or id(value) in self._known:
            return value
        left = [dtype for dtype in (torch.float32, *NARROW) if self._dtypes[value.shape, dtype]]
        fits = len(left) == 1 and value.numel() and bool(value.abs().amax() <= torch.finfo(left[0]).max)
        return value.to(left[0]) if fits else value


def _floats(values: Iterable) -> Iterator[torch.Tensor]:
    for value in values:
        if type(value) is tuple:
            yield from _floats(value)
        elif isinstance(value, torch.Tensor) and value.is_floating_point():
            yield value
