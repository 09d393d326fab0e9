"""Take :func:`apply` to another process, such as a Ray actor that holds a shard of a model."""

from collections.abc import Callable
from pathlib import Path


def portable_apply() -> Callable:
    """Make a function ``(module, settings) -> module`` that applies plain settings to a module where it is called.

    cloudpickle, which Ray and its users send functions with, pickles it by value. A function of this package it would
    pickle by name, and a worker cannot import that name where ComfyUI loaded the package, as it is a folder's path there.
    The worker needs no more than torch and, unless ``halfsafe`` can be imported, this folder at the same path.

    >>> import torch
    >>> from halfsafe.precision import portable_apply, restore
    >>> model = portable_apply()(torch.nn.Linear(32, 32).eval(), {"compute": "bf16"})
    >>> model(torch.ones(1, 32)).dtype
    torch.bfloat16
    """
    folder = str(Path(__file__).absolute().parents[2])

    def apply_here(module, settings: dict):
        import sys
        from importlib import import_module
        from importlib.util import find_spec, module_from_spec, spec_from_file_location

        if "halfsafe" not in sys.modules and find_spec("halfsafe") is None:
            spec = spec_from_file_location("halfsafe", f"{folder}/__init__.py", submodule_search_locations=[folder])
            sys.modules["halfsafe"] = package = module_from_spec(spec)
            spec.loader.exec_module(package)
        import_module("halfsafe.precision.library.applied").apply(module, settings)
        return module

    apply_here.__module__ = "__main__"  # what cloudpickle takes for a function to pickle by value
    return apply_here
