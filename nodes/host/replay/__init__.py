"""Make one call of a model, or one whole run of a sampler, again as it was made first.

May import ``comfyui`` and the precision core; compute, accumulation, guard and check import it.
"""
