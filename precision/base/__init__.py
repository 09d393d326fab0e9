"""Names, limits, errors, texts and patches that every room of the core shares.

Imports torch and numpy alone.
"""
