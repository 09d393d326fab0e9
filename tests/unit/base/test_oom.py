"""Errors that mean a lack of device memory."""

import pytest
import torch
from halfsafe.precision.base.oom import is_torch_oom


def error_of_cuda(code):
    error = RuntimeError("CUDA error: operation failed")
    error.error_code = code
    return error


@pytest.mark.parametrize(
    ("error", "lacks_memory"),
    [
        (torch.OutOfMemoryError("Allocation on device"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 19.13 GiB)"), True),
        (error_of_cuda(2), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmul`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"), False),
        (error_of_cuda(700), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("the printer is out of memory"), False),
    ],
)
def test_a_lack_of_device_memory_is_told_from_other_errors(error, lacks_memory):
    assert is_torch_oom(error) is lacks_memory
