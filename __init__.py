"""Halfsafe: FP8 loading, compute dtypes and accumulation for ComfyUI."""

WEB_DIRECTORY = "./web"


async def comfy_entrypoint():
    from .nodes import HalfsafeExtension

    return HalfsafeExtension()
