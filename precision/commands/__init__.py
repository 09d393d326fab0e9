"""Run ``python -m halfsafe``: inspect, scan, convert, plan, doctor.

May import every room of the core but ``guard``, ``check`` and ``study``.
"""
