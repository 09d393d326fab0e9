"""Short runs of ComfyUI's sampler on the user's own inputs, in which layers and settings of a model
are measured.

Imports every room of the host but the guard's; the nodes alone import it.
"""
