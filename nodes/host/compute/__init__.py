"""Run the calls of a model or ControlNet under a compute plan: forwards, attention, and the state
learned per model.

May import ``comfyui`` and ``replay``; accumulation, LoRAs, loaders, guard, check, study and
reporting import it."""
