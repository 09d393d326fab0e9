"""Layers whose input model code casts itself, found in that code: they run in another dtype than their neighbours."""

import ast
import functools
import inspect
import textwrap
import threading

import torch

FP32 = "fp32"
OWN_WEIGHT = "weight"
_FLOAT32 = ("torch.float32", "torch.float")
_one_at_a_time = threading.Lock()  # ast.parse of two threads raises SystemError, up to Python 3.12 (python/cpython#106905)


def own_cast(model: torch.nn.Module, name: str) -> str:
    """Tell what the code that calls a layer casts its input to: ``fp32``, the dtype of its own ``weight``, or empty.

    Read from the methods of the module that holds the layer, at calls of ``self.<layer>``: ``x.float()`` and
    ``x.to(torch.float32)``, as every Wan calls its patch embeddings (``comfy/ldm/wan``), and ``x.to(self.<layer>.weight.dtype)``,
    as CogVideoX does (``comfy/ldm/cogvideo/model.py``). Casts of a variable made before the call are not seen.
    """
    owner, _, leaf = name.rpartition(".")
    with _one_at_a_time:
        return _casts_in(type(model.get_submodule(owner))).get(leaf, "")  # type: ignore[arg-type]  # a class is hashable


@functools.lru_cache(maxsize=256)
def _casts_in(cls: type) -> dict[str, str]:
    """Map the attribute names of the layers that the methods of a class call with an input they cast to that cast."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("comfy."):
            found |= _casts_in_source(base)
    return found


def _casts_in_source(cls: type) -> dict[str, str]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # made in memory, or installed without its source
        return {}
    assigned = {
        node.targets[0].id: ast.unparse(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args and _layer(node.func))
    casts = ((_layer(call.func), _cast(call.args[0], _layer(call.func), assigned)) for call in calls)
    return {layer: cast for layer, cast in casts if cast}


def _layer(function: ast.expr) -> str:
    """The attribute of ``self`` that is called, or empty."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) and function.value.id == "self":
        return function.attr
    return ""


def _cast(argument: ast.expr, layer: str, assigned: dict[str, str]) -> str:
    if not isinstance(argument, ast.Call) or not isinstance(argument.func, ast.Attribute):
        return ""
    if argument.func.attr == "float":
        return FP32
    if argument.func.attr != "to":
        return ""
    given = [ast.unparse(value) for value in (*argument.args, *(word.value for word in argument.keywords if word.arg == "dtype"))]
    dtypes = [assigned.get(text, text) for text in given]
    if any(text in _FLOAT32 for text in dtypes):
        return FP32
    return OWN_WEIGHT if f"self.{layer}.weight.dtype" in dtypes else ""
