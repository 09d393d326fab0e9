"""Recognize out-of-memory errors of a device."""

import re

import torch

CUDA_OUT_OF_MEMORY = 2
# Not of torch's allocators: MPS raises a plain RuntimeError (aten/src/ATen/mps/MPSAllocator.mm), and so do cuBLAS and
# cuDNN and their ROCm twins, where ``cublasCreate`` without memory says ALLOC_FAILED or NOT_INITIALIZED.
LACK = re.compile(
    r"out of memory|(BLAS|CUDNN)_STATUS_\w*ALLOC\w*_FAILED|BLAS_STATUS_NOT_INITIALIZED|miopenStatusAllocFailed", re.I
)


def is_torch_oom(error: BaseException) -> bool:
    """True if an error means that a device has no memory left."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # CUDA itself raises an AcceleratorError with ``cudaErrorMemoryAllocation``.
    no_memory = getattr(error, "error_code", None) == CUDA_OUT_OF_MEMORY or LACK.search(str(error)) is not None
    return isinstance(error, RuntimeError) and no_memory
