"""Halfsafe: FP8 loading, compute dtypes, accumulation and NaN guarding for ComfyUI."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import HalfsafeExtension

    return HalfsafeExtension()
