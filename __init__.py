"""Halfsafe: FP8 loading, compute dtypes and accumulation for ComfyUI."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import HalfsafeExtension

    return HalfsafeExtension()


def __getattr__(name: str) -> object:
    """Give the library's functions, such as ``halfsafe.apply``, importing them when they are first asked for."""
    from importlib import import_module

    library = import_module(".precision", __name__)
    if name in library.__all__:
        return getattr(library, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
