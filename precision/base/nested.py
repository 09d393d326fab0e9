"""The tensors in the nested lists, tuples and dicts that models are given and return."""

from collections.abc import Iterator

import torch

PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}
"""Torch's own classes of tensors."""


def leaves(values, name: str = "") -> Iterator[tuple[str, object]]:
    """Walk nested lists, tuples, dicts and ComfyUI's nested tensors: (place, value) of what is in them."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from leaves(value, f"{name}.{key}" if name else str(key))
    elif isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            yield from leaves(value, f"{name}[{index}]")
    elif hasattr(values, "unbind") and not isinstance(values, torch.Tensor):
        yield from leaves(list(values.unbind()), name)
    else:
        yield name, values


def tensors_in(values) -> list[torch.Tensor]:
    """List the tensors of torch's own classes among nested values."""
    return [leaf for _, leaf in leaves(values) if type(leaf) in PLAIN]


def floats_in(values) -> list[torch.Tensor]:
    """List the tensors of floating-point or complex numbers among nested values, of any class."""
    tensors = [leaf for _, leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()]


def replaced(values, function):
    """Copy nested lists, tuples and dicts with ``function`` of each tensor of torch's own classes in its place."""
    if type(values) in PLAIN:
        return function(values)
    if isinstance(values, dict):
        return {key: replaced(value, function) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)(replaced(value, function) for value in values)
    return values


def plain_alias(func, result):
    """Return ``torch.Tensor(tensor)`` of another pack's tensor class."""
    # Under a dispatch mode torch leaves it of that class and calls the class's constructor, without its arguments.
    return result.as_subclass(torch.Tensor) if func is torch.ops.aten.alias.default else result
