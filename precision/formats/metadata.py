"""The texts in a safetensors header next to its tensors: which of them stay true of weights stored in another way."""

from collections.abc import Mapping

QUANTIZATION_KEY = "_quantization_metadata"
CARD_KEY = "halfsafe"


def lasting_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that stays true once weights are converted: without ComfyUI's table of quantized layers and
    our card, which are written anew, and hashes of the tensors (``modelspec.hash_sha256``, ``sshs_model_hash``)."""
    return {
        key: value for key, value in metadata.items() if key not in (QUANTIZATION_KEY, CARD_KEY) and "hash" not in key
    }
