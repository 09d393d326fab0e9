"""Numeric core of Halfsafe: torch, numpy and safetensors, without ComfyUI.

``base``: what all rooms use; ``files``, ``formats``: what is on disk and what it holds; ``arithmetic``: operations
and their checks; ``devices``, ``plan``: abilities and decisions; ``make``: quantized weights; ``report``;
``guard``, ``check``, ``study``: calls that fail, drift or are compared; ``commands``.
"""
