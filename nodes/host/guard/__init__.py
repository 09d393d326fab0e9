"""Guard each call of a model, VAE or text encoder: find NaN and Inf, repeat wider, tell why.

May import every room of the host but ``check``, ``study`` and ``reporting``; the node hands it the check.
"""
