"""Errors of a device without memory, as ComfyUI and the precision core tell them."""

import comfy.model_management

from ....precision.base.oom import is_oom as is_oom_of_torch


def is_oom(error: BaseException) -> bool:
    """Tell whether an error means that a device has no memory left.

    ComfyUI's own test comes first, as it also clears the error CUDA has pending. On torch 2.8 and later it takes the
    plain RuntimeError of MPS for another.
    """
    return comfy.model_management.is_oom(error) or is_oom_of_torch(error)
