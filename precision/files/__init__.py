"""Read and write safetensors on disk, and recognise the bytes of other formats.

May import ``base`` alone.
"""
