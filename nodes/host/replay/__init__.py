"""Make one call of a model, or one whole run of a sampler, again as it was made first.

May import ``core`` and ``facts`` of the host and the precision core; compute, guard and check import it.
"""
