"""Tell errors that mean a lack of memory on a device from others."""

import torch

CUDA_OUT_OF_MEMORY = 2


def is_oom(error: BaseException) -> bool:
    """Tell whether an error means that a device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # Not of torch's allocators: CUDA itself raises an AcceleratorError with ``cudaErrorMemoryAllocation``, and MPS a
    # plain RuntimeError (aten/src/ATen/mps/MPSAllocator.mm).
    no_memory = getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY or "out of memory" in str(error).lower()
    return isinstance(error, RuntimeError) and no_memory
