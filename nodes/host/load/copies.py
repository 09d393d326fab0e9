"""Tensors that are made for a model, freed as soon as ComfyUI has copied them into it."""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from ....precision.arithmetic.patching import SharedScope

_made: dict[int, torch.Tensor] = {}


@contextlib.contextmanager
def freed_once_copied(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Free each of these tensors, which nobody else may use, once a module has copied it.

    ``load_model_weights`` in comfy/model_base.py copies all of a state dict before it drops the first tensor: a model
    whose weights were unpacked would be in memory twice. Views of a file cost nothing, and what is assigned stays.
    """
    own = {id(tensor): tensor for tensor in tensors}
    _made.update(own)
    try:
        with _SCOPE:
            yield
    finally:
        for key in own:
            _made.pop(key, None)


@contextlib.contextmanager
def _watching() -> Iterator[None]:
    original = torch.nn.Module._load_from_state_dict

    def load(module: torch.nn.Module, state_dict: dict, prefix: str, *args, **kwargs) -> None:
        _keep_shared(state_dict)
        original(module, state_dict, prefix, *args, **kwargs)
        for name, parameter in module._parameters.items():
            source = _made.get(id(state_dict.get(prefix + name)))
            if source is not None and parameter is not None and parameter.data_ptr() != source.data_ptr():
                source.untyped_storage().resize_(0)

    torch.nn.Module._load_from_state_dict = load
    try:
        yield
    finally:
        torch.nn.Module._load_from_state_dict = original


def _keep_shared(state_dict: dict) -> None:
    """Leave tensors alone that a model gets under two names; the first call of a load has all names."""
    for key, count in Counter(map(id, state_dict.values())).items():
        if count > 1:
            _made.pop(key, None)


_SCOPE = SharedScope(_watching)
