"""Add LoRAs of 8-bit weights to the results of their layers, by ComfyUI's own adapters.

May import ``comfyui``, ``replay``, ``compute`` and ``accumulation``.
"""
