"""Take :func:`apply` to another process, such as a Ray actor that holds a shard of a model."""

from collections.abc import Callable
from pathlib import Path


def portable_apply() -> Callable:
    """Make a function ``(module, settings) -> module`` that applies plain settings to a module where it is called.

    cloudpickle, which Ray and its users send functions with, pickles a function inside of another by value. One of this
    package's own it would pickle by name, and a worker cannot import that name where ComfyUI loaded the package, as it
    is a folder's path there. The worker needs no more than torch and, unless ``halfsafe`` can be imported,
    this folder at the same path.

    >>> import torch
    >>> from halfsafe.precision import portable_apply, restore
    >>> model = portable_apply()(torch.nn.Linear(32, 32).eval(), {"compute": "bf16"})
    >>> model(torch.ones(1, 32)).dtype
    torch.bfloat16
    """
    folder = str(Path(__file__).absolute().parents[2])

    def apply_here(module, settings: dict):
        import importlib.util
        import sys

        if "halfsafe" not in sys.modules and importlib.util.find_spec("halfsafe") is None:
            spec = importlib.util.spec_from_file_location(
                "halfsafe", f"{folder}/__init__.py", submodule_search_locations=[folder]
            )
            # mypy: the spec of a file that exists is not None.
            sys.modules["halfsafe"] = package = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
            spec.loader.exec_module(package)  # type: ignore[union-attr]
        importlib.import_module("halfsafe.precision.library.applied").apply(module, settings)
        return module

    return apply_here
