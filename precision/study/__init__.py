"""Which layers of a model survive a lower precision, and how fast, small and close storages and
computes are.

Imports the plans, the report's drawing and what lies below them; neither the guard nor the
commands.
"""
