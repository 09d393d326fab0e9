"""Layers whose dtype model code fixes itself, found in that code: they run in another dtype than their neighbours."""

import ast
import functools

import torch

from ..core import casts_weights
from .model_code import attribute_of_self, one_at_a_time, sources

FP32 = "fp32"
OWN_WEIGHT = "weight"
TIMES = ("t", "timestep", "timesteps")
_FLOAT32 = ("torch.float32", "torch.float")


def own_cast(model: torch.nn.Module, name: str) -> str:
    """Tell what the code around a layer casts its input to: ``fp32``, the dtype of its own ``weight``, or empty.

    Read from the methods of the module that holds the layer, at calls of ``self.<layer>``: ``x.float()`` and
    ``x.to(torch.float32)``, as every Wan calls its patch embeddings (``comfy/ldm/wan``), and
    ``x.to(self.<layer>.weight.dtype)``, as CogVideoX does (``comfy/ldm/cogvideo/model.py``). A layer that is made with
    ``dtype=torch.float32``, itself or as part of a module that is, is given fp32, as those of MiniMax H3 are
    (``comfy/ldm/minimax/model.py``); so is one that is no operation of ComfyUI's and is called with the timestep, as
    Stable Audio's features of it (``comfy/ldm/audio/dit.py``).
    """
    with one_at_a_time:
        return _own_cast(model, name)


def _own_cast(model: torch.nn.Module, name: str) -> str:
    owner, _, leaf = name.rpartition(".")
    holder = type(model.get_submodule(owner))
    if cast := _casts_in(holder).get(leaf, ""):  # type: ignore[arg-type]  # a class is hashable
        return cast
    is_called_with_time = leaf in _called_with_time(holder)  # type: ignore[arg-type]
    of_time = is_called_with_time and not casts_weights(model.get_submodule(name))
    return FP32 if of_time or _is_made_in_fp32(model, name) else ""


def _is_made_in_fp32(model: torch.nn.Module, name: str) -> bool:
    parts = name.split(".")
    owners = ((type(model.get_submodule(".".join(parts[:depth]))), part) for depth, part in enumerate(parts))
    return any(part in _made_in_fp32(owner) for owner, part in owners)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=256)
def _casts_in(cls: type) -> dict[str, str]:
    """Map the attribute names of the layers that the methods of a class call with an input they cast to that cast."""
    found: dict[str, str] = {}
    for tree in sources(cls):
        found |= _casts_in_source(tree)
    return found


@functools.lru_cache(maxsize=256)
def _made_in_fp32(cls: type) -> frozenset[str]:
    """Find the attributes of a class that its methods set to something made with ``dtype=torch.float32``."""
    nodes = (node for tree in sources(cls) for node in ast.walk(tree))
    assigned = (node for node in nodes if isinstance(node, ast.Assign))
    in_fp32 = (node for node in assigned if any(text in _FLOAT32 for text in _given_dtypes(node.value)))
    return frozenset(filter(None, (attribute_of_self(node.targets[0]) for node in in_fp32)))


@functools.lru_cache(maxsize=256)
def _called_with_time(cls: type) -> frozenset[str]:
    """Find the attributes that the methods of a class call with the timestep itself, which ComfyUI gives in fp32."""
    calls = (node for tree in sources(cls) for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    return frozenset(filter(None, (attribute_of_self(call.func) for call in calls if _root(call.args[0]) in TIMES)))


def _root(value: ast.expr) -> str:
    value = value.value if isinstance(value, ast.Subscript) else value
    return value.id if isinstance(value, ast.Name) else ""


def _casts_in_source(tree: ast.Module) -> dict[str, str]:
    assigned = {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    named = ((attribute_of_self(call.func), call) for call in calls)
    casts = ((layer, _cast(call.args[0], layer, assigned)) for layer, call in named if layer)
    return {layer: cast for layer, cast in casts if cast}


def _given_dtypes(value: ast.expr) -> list[str]:
    """Return the source of what a call is given as ``dtype=``; nothing of what is no call."""
    keywords = value.keywords if isinstance(value, ast.Call) else []
    return [ast.unparse(word.value) for word in keywords if word.arg == "dtype"]


def _cast(argument: ast.expr, layer: str, assigned: dict[str, str]) -> str:
    if not isinstance(argument, ast.Call) or not isinstance(argument.func, ast.Attribute):
        return ""
    if argument.func.attr == "float":
        return FP32
    if argument.func.attr != "to":
        return ""
    given = [*map(ast.unparse, argument.args), *_given_dtypes(argument)]
    dtypes = [assigned.get(text, text) for text in given]
    if any(text in _FLOAT32 for text in dtypes):
        return FP32
    return OWN_WEIGHT if f"self.{layer}.weight.dtype" in dtypes else ""
