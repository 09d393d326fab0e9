"""The check for NaN and Inf of weights that a load left unread, made once a model has used them."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING

from comfy.sd1_clip import SDClipModel

from ....precision.amax import amax_value
from ....precision.formats.comfy_format import finite_bound
from ....precision.formats.stored_weight import StoredWeight
from ....precision.nested import floats_in
from ..run.wrappers import FIRST_USE, set_wrapper

if TYPE_CHECKING:
    from comfy.model_patcher import ModelPatcher
    from comfy.sd import CLIP

logger = logging.getLogger("halfsafe")


class Unread:
    """Weights that are slices of a file which nothing has read yet.

    NaN and Inf of a weight are in the first result that it takes part in: where that is not finite they are read.
    """

    def __init__(self, weights: list[StoredWeight], path: str):
        self._weights, self._path = weights, path

    def __call__(self, executor, *args, **kwargs):
        """Wrap a model's call."""
        result = executor(*args, **kwargs)
        self.check(result)
        return result

    def check(self, result: object) -> None:
        """Read the weights if the first result they gave is not finite.

        Raises:
            NonFiniteWeight: one of them holds NaN or Inf.
        """
        if not self._weights:
            return
        weights, self._weights = self._weights, []
        if not all(math.isfinite(amax_value(part)) for part in floats_in(result)):
            logger.info("Halfsafe: %s: the first result is not finite; its weights are read.", self._path)
            for weight in weights:
                finite_bound(weight, self._path)


def check_at_first_call(patcher: ModelPatcher, unread: list[StoredWeight], path: str) -> None:
    """Check the weights of a diffusion model that are unread once its first call has a result."""
    if unread:
        set_wrapper(patcher, FIRST_USE, Unread(unread, path))


def check_at_first_text(clip: CLIP, unread: list[StoredWeight], path: str) -> None:
    """Check the weights of a text encoder that are unread once its first text is encoded."""
    if not unread:
        return
    check = Unread(unread, path)
    for module in clip.cond_stage_model.modules():
        if isinstance(module, SDClipModel):
            module.register_forward_hook(lambda _module, _given, result: check.check(result))
