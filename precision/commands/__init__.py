"""Run ``python -m halfsafe``: inspect, convert, doctor.

May import every room of the core but ``guard``, ``check`` and ``study``.
"""
