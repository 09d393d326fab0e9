"""Resolve rules, device and model to a storage, compute and accumulation per layer, each with its
reason.

May import ``base``, ``files``, ``formats``, ``arithmetic``, ``devices`` and ``make``.
"""
