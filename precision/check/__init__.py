"""Compare a finite call with the same call in fp32.

May import ``guard``'s log, ``report`` and the rooms below them; no other room of the core imports it.
"""
