"""Carry out an accumulation plan around each call of a model, and say what its switches did.

May import ``comfyui``, ``replay`` and ``compute``.
"""
