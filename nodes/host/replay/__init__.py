"""The single wrapper around a model's calls and a sampler's runs, which can repeat a call or a
whole run from its original state.

May import ``comfyui`` and the precision core; compute, accumulation, guard and check import it.
"""
