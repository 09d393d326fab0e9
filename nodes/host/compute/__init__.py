"""Run the calls of a model or ControlNet as a compute plan has it: forwards, attention, what is learned per model.

May import ``comfyui`` and ``replay``; accumulation, LoRAs, loaders, guard, check, study and reporting import it.
"""
