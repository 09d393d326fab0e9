"""Describe devices: profiles, detection, executed probes and memory; nothing is decided here.

May import ``base``, ``files`` and ``formats``.
"""
