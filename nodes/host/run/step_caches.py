"""Keep a repeated call apart from what models and nodes keep of one step for the next."""

from ..core import PREFIX_CACHE

OFF = {PREFIX_CACHE: {"device": "off"}}
"""Option of ``transformer_options`` -> its value with which a model neither reads nor fills such a cache: keys and
values of the text in Qwen-Image 2.1 (``comfy/ldm/qwen_image21/model.py``, ComfyUI 0.37), whose key has no dtype."""


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
