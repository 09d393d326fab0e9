"""Sizes smaller than the published ones, which ComfyUI fixes for some families, named by a model file's metadata.

ComfyUI reads of a file which family it is and takes the published model's sizes. While `small_sizes` is in effect, a file
whose metadata has ``sizes`` is built with those, and found to be of its family by the numbers in ``published``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator


def metadata(sizes: dict, published: dict | None = None) -> dict[str, str]:
    """What the metadata of a file of these sizes holds; ``published``: the numbers ComfyUI knows the family by, where they differ."""
    return {"sizes": json.dumps(sizes), "published": json.dumps(published or {})}


@contextlib.contextmanager
def small_sizes() -> Iterator[None]:
    """What ComfyUI detects has the sizes that a file's metadata names."""
    from comfy import model_detection

    detect_config, detect_class = model_detection.detect_unet_config, model_detection.model_config_from_unet

    def published(state_dict, prefix, metadata=None):
        config = detect_config(state_dict, prefix, metadata=metadata)
        return config and {**config, **_named(metadata, "sizes"), **_named(metadata, "published")}

    def small(*args, metadata=None, **options):
        found = detect_class(*args, metadata=metadata, **options)
        if found is not None:
            found.unet_config |= _named(metadata, "sizes")
        return found

    model_detection.detect_unet_config, model_detection.model_config_from_unet = published, small
    try:
        yield
    finally:
        model_detection.detect_unet_config, model_detection.model_config_from_unet = detect_config, detect_class


def _named(metadata: dict | None, key: str) -> dict:
    return json.loads((metadata or {}).get(key, "{}"))
