"""Read the source of a model's classes."""

import ast
import functools
import inspect
import textwrap
import threading

# ast.parse of two threads raises SystemError, up to Python 3.12 (python/cpython#106905).
one_at_a_time = threading.Lock()


def sources(cls: type) -> list[ast.Module]:
    """Parse the source of a class and of the classes it is derived from, of those that are ComfyUI's."""
    try:
        bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("comfy.")]
        return [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in bases]
    except (OSError, TypeError, SyntaxError):  # made in memory, or installed without its source
        return []


def attribute_of_self(value: ast.expr) -> str:
    """Return the attribute of ``self`` that an expression is; empty for any other expression."""
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
        return value.attr
    return ""


def called_one_by_one(cls: type) -> frozenset[str]:
    """Find the attributes of a class whose items its methods call, by index or in a loop, and not as a whole."""
    with one_at_a_time:
        return _called_one_by_one(cls)


@functools.lru_cache(maxsize=256)
def _called_one_by_one(cls: type) -> frozenset[str]:
    nodes = [node for tree in sources(cls) for node in ast.walk(tree)]
    indexed = (node.func.value for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript))
    looped = (node.iter for node in nodes if isinstance(node, ast.For))
    return frozenset(filter(None, map(attribute_of_self, (*indexed, *looped))))
