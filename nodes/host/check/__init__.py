"""Repeat a guarded call in fp32, and measure the error of the original call.

May import ``replay``, ``compute`` and ``guard``; the nodes pass a check to the guard, which does
not import it.
"""
