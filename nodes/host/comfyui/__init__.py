"""Read and set what ComfyUI's own modules, layers and server hold: the adapters to its internals.

May import the precision core alone; every other room of the host imports these files.
"""
