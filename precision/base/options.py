"""What people can choose by name. The command line reads this file before torch is imported, which takes seconds."""

STORAGE_OPTIONS = ("auto", "as_file", "fp8_e4m3fn", "fp8_e5m2", "fp16", "bf16", "fp32", "int8", "w6a8", "w4a8")
COMPUTE_OPTIONS = ("auto", "fp8", "fp16", "fp16_safe", "bf16", "fp32", "int8")
GOALS = ("balanced", "quality", "speed", "memory")
