"""Patched operations with their overflow bounds, torch's precision flags, and patches for the length of a call."""
