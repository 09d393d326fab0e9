"""Make weights in a storage: on the CPU or the device, rounded to nearest or by a calibration
(GPTQ).

May import ``base``, ``files``, ``formats`` and ``devices``.
"""
