"""Put back what nodes and models keep of one call for the next, so that a repeat finds what the call found.

Found from structure, in whatever hangs on a model's call: its ``transformer_options``, the model options of its
patcher, the attributes of its modules; from there containers, closures, instances and, of packs, the data in their
modules. Left alone: weights, what torch, Python's own library and ComfyUI's management of models keep, and the
attributes of single layers.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch

from .kept_places import Generated, Place, Tensors
from .kept_walk import Walk

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

NARROW = (torch.float16, torch.bfloat16)


class KeptState:
    """What is kept between the calls of a model, as it is now.

    Args:
        options: the call's ``transformer_options``.
        largest: tensors of at most so many bytes are copied, as they may be written to; larger ones are kept by
            reference. None: all are copied.

    ``keepers``: the packs that have code on the model.
    """

    def __init__(self, model: BaseModel, options: dict, largest: int | None = Tensors.LARGEST):
        self._walk = Walk(largest)
        self._walk.model(model, options)
        self.places: list[Place] = self._walk.places

    @property
    def keepers(self) -> list[str]:
        """Return the names of the packs whose code was met."""
        return sorted(self._walk.keepers)

    def restore(self) -> None:
        """Put everything back as it was."""
        with torch.inference_mode():
            for place in self.places:
                place.restore()

    def lost(self) -> list[str]:
        """Name what has changed since and cannot be put back."""
        return [place.name for place in self.places if isinstance(place, Generated) and place.has_advanced()]

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Put everything back when the context ends, whatever happens in it."""
        try:
            yield
        finally:
            self.restore()


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
