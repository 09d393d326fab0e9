"""Keep a repeated call apart from what models and nodes keep of one step for the next."""

import torch

OFF = {"qwen_image21_cache": {"device": "off"}}
"""Option of ``transformer_options`` -> its value with which a model neither reads nor fills such a cache: keys and
values of the text in Qwen-Image 2.1 (``comfy/ldm/qwen_image21/model.py``, ComfyUI 0.37), whose key has no dtype."""
RESETS = {"reset_prefix_cache": "prefix_cache_enabled"}
"""Method of a diffusion model that empties its cache -> the attribute that the method is given."""


class KeptByPatches:
    """What patches of nodes keep in a dict ``cache``, as it is now: FluxKVCache (``comfy_extras/nodes_flux.py``)."""

    def __init__(self, options: dict):
        patches = [patch for group in options.get("patches", {}).values() for patch in group]
        keeping = [patch for patch in patches if isinstance(getattr(patch, "cache", None), dict)]
        self._kept = [(patch, dict(patch.cache)) for patch in keeping]

    def restore(self) -> None:
        """Give each patch what it kept when this was made."""
        for patch, kept in self._kept:
            patch.cache = dict(kept)


def empty(model: torch.nn.Module) -> None:
    """Empty what a diffusion model itself keeps: a call that was not finite has filled it with NaN."""
    for reset, given in RESETS.items():
        if hasattr(model, reset):
            getattr(model, reset)(getattr(model, given))
