"""The one wrapper around a model's calls and a sampler's runs, which makes a call or a whole run again as it was made
first.

May import ``comfyui`` and the precision core; compute, accumulation, guard and check import it.
"""
