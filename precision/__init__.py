"""Numeric core of Halfsafe: torch, numpy and safetensors, on any ``nn.Module``, without ComfyUI.

The names below are what most users need; each is imported when it is first asked for, so that importing this package
costs nothing. Everything else is in the sub-packages: ``files`` and ``formats`` (what is on disk and what it holds),
``devices``, ``plan`` (rules and decisions), ``arithmetic`` (operations and their overflow bounds), ``guard``,
``study``, ``library`` (storage and compute on plain modules), ``report``, ``commands``.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Applied": "library.applied",
    "HalfsafeError": "errors",
    "apply": "library.applied",
    "convert_file": "commands.convert",
    "detect": "devices.detect",
    "inspect_file": "commands.inspect",
    "plan_file": "commands.plan",
    "portable_apply": "library.portable",
    "restore": "library.applied",
    "rules_from": "plan.rules",
    "scan_file": "commands.inspect",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
