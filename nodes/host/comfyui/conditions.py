"""Work of a diffusion model's own layers that ComfyUI does once per run, in ``extra_conds``, outside of the model's
calls.

ComfyUI 0.30 runs text adapters there: Anima, LTX-AV and MiniMax in ``comfy/model_base.py``, each through its model's
``preprocess_text_embeds``.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ....precision.base.patching import patched
from . import attributes as core

if TYPE_CHECKING:
    from comfy.model_base import BaseModel

TEXT = "c_crossattn"
Make = Callable[[], dict]


def adapts_text(model: "BaseModel") -> bool:
    """Tell whether ComfyUI runs layers of this model on the text before it calls the model."""
    return core.adapts_text(model.diffusion_model)


@contextlib.contextmanager
def conditions_through(model: "BaseModel", run: Callable[[Make], dict]) -> Iterator[None]:
    """Hand each ``extra_conds`` of a model to ``run`` while the context lasts; what is set last runs first."""
    original = core.extra_conditions(model)
    with patched([core.with_extra_conditions(model, lambda **kwargs: run(functools.partial(original, **kwargs)))]):
        yield
