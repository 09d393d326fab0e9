"""Read, quantize and write the quantization formats of weights, and tell a model's family.

May import ``base`` and ``files``.
"""
