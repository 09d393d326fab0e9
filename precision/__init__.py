"""Numeric core of Halfsafe: torch, numpy and safetensors, without ComfyUI.

``files`` and ``formats``: what is on disk and what it holds; ``devices``, ``plan``: rules and decisions;
``arithmetic``: operations and their overflow bounds; ``guard``, ``study``, ``report``, ``commands``.
"""
