"""Load and save models, ControlNets, text encoders and VAEs through ComfyUI's own loaders.

May import the rooms below it: ``comfyui``, ``replay``, ``compute``, ``accumulation`` and ``lora``.
"""
