"""What people can choose by name. The command line reads this file before torch is imported, which takes seconds."""

from typing import Literal, get_args

RuledStorage = Literal[
    "as_file", "fp8_e4m3fn", "fp8_e5m2", "fp16", "bf16", "fp32", "int8", "w6a8", "w4a8", "nvfp4", "mxfp8"
]  # fmt: skip
StorageOption = Literal["auto", RuledStorage]
QuantizedStorage = Literal["fp8_e4m3fn", "fp8_e5m2", "int8", "w6a8", "w4a8", "nvfp4", "mxfp8"]
"""The storages of 8 bits or fewer, of which a weight is made; the others are dtypes, or change nothing."""
RuledCompute = Literal["fp8", "fp16", "fp16_safe", "bf16", "fp32", "int8"]
ComputeOption = Literal["auto", RuledCompute]
Stream = Literal["fp32", "same"]
"""The dtype of a layer's result; ``same`` as its input."""
RuledSums = Literal["fp32", "fp16"]
Goal = Literal["balanced", "quality", "speed", "memory"]

STORAGE_OPTIONS: tuple[StorageOption, ...] = get_args(StorageOption)
QUANTIZED_NAMES: tuple[QuantizedStorage, ...] = get_args(QuantizedStorage)
COMPUTE_OPTIONS: tuple[ComputeOption, ...] = get_args(ComputeOption)
GOALS: tuple[Goal, ...] = get_args(Goal)
